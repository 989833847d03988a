"""Closing many links at once."""

from __future__ import annotations

import threading
import time

import pytest

from nexar.links.closing import Closing
from nexar.links.link import Link
from nexar.links.parting import part
from nexar.links.progress import Progress
from nexar.transport.sleep import PollSleeper
from nexar.types import AwaitedPeer
from tests.unit.links.conftest import Pair

PATIENCE = 0.1


class Slow:
    """A link whose peer says something now and then, and agrees after a while, or never."""

    def __init__(self, progress: Progress, *, words: int, agrees: bool) -> None:
        self.aborted: str | None = None
        self._progress = progress
        self._words = words
        self._agrees = agrees
        self._closing = Closing(progress.lock, AwaitedPeer(node=3))

    def begin_close(self) -> Closing:
        return self._closing

    def heard_bytes(self) -> float:
        """Asked once in each round."""
        self._words -= 1
        if self._words < 0 and self._agrees:
            with self._progress.lock:
                self._closing.finish()
        return -self._words if self._words >= 0 else 0.0

    def abort(self, reason: str) -> None:
        self.aborted = reason


@pytest.fixture
def progress() -> Progress:
    sleeper = PollSleeper()
    with Progress(sleeper, []) as made:
        yield made
    sleeper.close()


def test_a_peer_that_is_slow_is_waited_for_while_it_says_anything(progress: Progress) -> None:
    slow = Slow(progress, words=4, agrees=True)
    begin = time.monotonic()
    part(progress, [slow], patience=PATIENCE, longest=60)  # type: ignore[list-item]
    assert slow.aborted is None
    assert time.monotonic() - begin > 2 * PATIENCE


def test_peers_that_are_silent_are_given_up_after_one_patience(progress: Progress) -> None:
    silent = [Slow(progress, words=0, agrees=False) for _ in range(3)]
    begin = time.monotonic()
    part(progress, silent, patience=PATIENCE, longest=60)  # type: ignore[arg-type]
    assert all(link.aborted is not None for link in silent)
    assert time.monotonic() - begin < 10


def test_a_peer_that_never_agrees_is_given_up_in_the_end(progress: Progress) -> None:
    endless = Slow(progress, words=1 << 40, agrees=False)
    part(progress, [endless], patience=PATIENCE / 10, longest=PATIENCE)  # type: ignore[list-item]
    assert endless.aborted is not None


def test_a_link_behind_a_silent_one_is_closed_politely(pair: Pair) -> None:
    silent = Slow(pair.left.progress, words=0, agrees=False)
    links: list[Link] = [silent, pair.to_right]  # type: ignore[list-item]
    begin = threading.Thread(target=part, args=(pair.left.progress, links), kwargs={"patience": 1, "longest": 60})
    begin.start()
    begin.join()
    assert silent.aborted is not None
    assert [str(loss) for loss in pair.losses] == [str(pair.to_left.failure)]
    assert "it closed the link" in str(pair.to_left.failure)
