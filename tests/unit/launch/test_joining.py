import time
from collections.abc import Callable
from typing import Any

import pytest

from nexar.config import Config
from nexar.errors import SeedUnreachable
from nexar.launch import joining, leave_at_exit
from nexar.launch.joining import join
from nexar.observe import metrics as metrics_module
from nexar.security.invitation import Invitation

INVITATION = Invitation(("127.0.0.1:1",), bytes(32), None)


class FakeMetrics:
    """Without a socket."""

    def __init__(self) -> None:
        self.collector = metrics_module.Collector()
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class FakePresence:
    class node:  # noqa: N801
        id = 7


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, FakeMetrics]]:
    made: list[tuple[int, int, FakeMetrics]] = []

    def open_metrics(_: Config, port: int, local_rank: int) -> FakeMetrics:
        made.append((port, local_rank, FakeMetrics()))
        return made[-1][2]

    monkeypatch.setattr(metrics_module, "open_metrics", open_metrics)
    return made


def bootstrap_with(monkeypatch: pytest.MonkeyPatch, does: Callable[..., Any]) -> None:
    monkeypatch.setattr(joining, "bootstrap", does)


def test_without_the_setting_there_are_no_metrics(
    monkeypatch: pytest.MonkeyPatch, opened: list[tuple[int, int, FakeMetrics]]
) -> None:
    bootstrap_with(monkeypatch, lambda *_, **settings: settings)
    found: Any = join(Config(), INVITATION, rank=1, size=2, local_rank=1)
    assert (found["rank"], found["size"]) == (1, 2)
    assert opened == []


def test_metrics_are_of_the_node_that_joined_and_end_with_it(
    monkeypatch: pytest.MonkeyPatch, opened: list[tuple[int, int, FakeMetrics]]
) -> None:
    bootstrap_with(monkeypatch, lambda *_, beside, **__: beside(FakePresence(), object()))
    close: Any = join(Config(metrics_port=9300), INVITATION, local_rank=2)
    ((port, local_rank, metrics),) = opened
    assert (port, local_rank, metrics.closed) == (9300, 2, 0)
    assert metrics.collector.source is not None
    assert metrics.collector.source.me == 7
    close()
    assert metrics.closed == 1


def test_who_could_not_join_leaves_no_port_open(
    monkeypatch: pytest.MonkeyPatch, opened: list[tuple[int, int, FakeMetrics]]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise SeedUnreachable(addresses=("a:1",), attempts=1, cause="nobody")

    bootstrap_with(monkeypatch, fail)
    with pytest.raises(SeedUnreachable):
        join(Config(metrics_port=0), INVITATION)
    assert opened[0][2].closed == 1


def test_an_exit_before_the_caller_has_the_communicator_leaves_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may be in init() when the main thread ends."""
    left: list[object] = []
    error = ValueError("it ends the program")

    class Made:
        def __exit__(self, kind: object, error: object, trace: object) -> None:
            left.append(error)

    def exits(*_: object, beside: Callable[..., Any], **__: object) -> Made:
        made = Made()
        known = set(leave_at_exit._leavers)
        beside(FakePresence(), made)
        (leaver,) = (each for key, each in leave_at_exit._leavers.items() if key not in known)
        leaver.begin(error)
        assert leaver.has_left(time.monotonic() + 30.0)
        leaver.cancel()
        return made

    bootstrap_with(monkeypatch, exits)
    join(Config(), INVITATION)
    assert left == [error]
