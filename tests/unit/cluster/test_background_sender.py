"""Messages to members without a link: in which order they are sent, and what becomes of those that cannot be sent."""

import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from nexar.cluster.control_channel import MAX_QUEUED_MESSAGES, BackgroundSender
from nexar.cluster.control_loop import CancelToken, DialCancelled
from nexar.errors import PeerLost
from nexar.wire.control import Message, Ping
from tests.ranks import EVENT_TIMEOUT
from tests.unit.cluster.memory_mesh import eventually


class Scene:
    """A mesh whose dials wait until a test lets them through. Some members cannot be reached."""

    def __init__(self) -> None:
        self.said: list[tuple[int, Message]] = []
        self.dialed: list[int] = []
        self.gone: set[int] = set()
        self.open = threading.Event()
        self.threads: list[threading.Thread] = []
        self.sender = BackgroundSender(cast(Any, self), self._run_in_thread)

    def _run_in_thread(self, task: Callable[[], None]) -> None:
        self.threads.append(threading.Thread(target=task))
        self.threads[-1].start()

    def link(self, node: int, _: float) -> Any:
        self.dialed.append(node)
        assert self.open.wait(EVENT_TIMEOUT)
        if node in self.gone:
            raise PeerLost(node=node, cause="nobody is there")
        return Line(self, node)


class Line:
    def __init__(self, scene: Scene, node: int) -> None:
        self._scene, self._node = scene, node

    def send_control(self, message: Message) -> None:
        self._scene.said.append((self._node, message))


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.open.set()
    for thread in made.threads:
        thread.join(EVENT_TIMEOUT)


def test_many_messages_to_one_member_take_one_thread_and_keep_their_order(scene: Scene) -> None:
    for number in range(5):
        scene.sender.send(7, Ping(number))
    eventually(lambda: scene.dialed == [7], "a dial")
    scene.open.set()
    eventually(lambda: len(scene.said) == 5, "all words")
    assert scene.said == [(7, Ping(number)) for number in range(5)]
    assert len(scene.threads) == 1


def test_of_too_many_messages_the_newest_are_kept(scene: Scene) -> None:
    for number in range(MAX_QUEUED_MESSAGES + 10):
        scene.sender.send(7, Ping(number))
    scene.open.set()
    eventually(lambda: len(scene.said) == MAX_QUEUED_MESSAGES, "the newest")
    assert scene.said[-1] == (7, Ping(MAX_QUEUED_MESSAGES + 9))


def test_who_cannot_be_reached_keeps_nobody_waiting_and_is_tried_again_with_the_next_message(scene: Scene) -> None:
    scene.gone.add(7)
    scene.open.set()
    scene.sender.send(7, Ping(1))
    eventually(lambda: not scene.sender._queued, "it was given up")
    scene.gone.clear()
    scene.sender.send(7, Ping(2))
    eventually(lambda: scene.said == [(7, Ping(2))], "the next word")
    eventually(lambda: not scene.sender._queued, "nobody is on the way")


def test_a_sender_thread_that_fails_or_cannot_start_does_not_block_the_next() -> None:
    tasks: list[Callable[[], None]] = []

    def aside(task: Callable[[], None]) -> None:
        if not tasks:
            tasks.append(task)
            raise RuntimeError("can't start new thread")
        tasks.append(task)

    class Broken:
        def link(self, node: int, deadline: float) -> Any:
            raise ZeroDivisionError(node)

    sender = BackgroundSender(Broken(), aside)
    with pytest.raises(RuntimeError, match="new thread"):
        sender.send(7, Ping(1))
    assert not sender._queued
    sender.send(7, Ping(2))
    with pytest.raises(ZeroDivisionError):
        tasks[1]()
    assert not sender._queued


def test_whoever_waits_is_woken_once_it_is_made() -> None:
    cancel_token, woken = CancelToken(), threading.Event()
    with cancel_token.waking(woken.set):
        assert not woken.is_set()
        cancel_token.cancel()
        assert woken.is_set()
    assert cancel_token.is_cancelled


def test_whoever_comes_later_is_woken_at_once() -> None:
    cancel_token, woken = CancelToken(), threading.Event()
    cancel_token.cancel()
    cancel_token.cancel()
    with cancel_token.waking(woken.set):
        assert woken.is_set()


def test_whoever_has_left_is_left_alone() -> None:
    cancel_token, woken = CancelToken(), threading.Event()
    with cancel_token.waking(woken.set):
        pass
    cancel_token.cancel()
    assert not woken.is_set()


def test_a_pause_lasts_its_time_or_until_the_cancellation() -> None:
    cancel_token = CancelToken()
    cancel_token.pause(0.001)
    threading.Timer(0.02, cancel_token.cancel).start()
    with pytest.raises(DialCancelled, match="closed"):
        cancel_token.pause(EVENT_TIMEOUT)
    with pytest.raises(DialCancelled):
        cancel_token.pause(EVENT_TIMEOUT)
