"""Words to members without a link: how many threads carry them, and what becomes of those that cannot be said."""

import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from nexar.cluster.couriers import AT_ONCE, MOST_WORDS, Couriers
from nexar.errors import PeerLost
from nexar.wire.messages import Message, Ping
from tests.ranks import PATIENCE
from tests.unit.cluster.memory_mesh import eventually


class Scene:
    """A mesh whose dials wait until a test lets them through. Some members cannot be reached."""

    def __init__(self) -> None:
        self.said: list[tuple[int, Message]] = []
        self.dialed: list[int] = []
        self.gone: set[int] = set()
        self.open = threading.Event()
        self.threads: list[threading.Thread] = []
        self.couriers = Couriers(cast(Any, self), self._aside)

    def _aside(self, task: Callable[[], None]) -> None:
        self.threads.append(threading.Thread(target=task))
        self.threads[-1].start()

    def link(self, node: int, _: float) -> Any:
        self.dialed.append(node)
        assert self.open.wait(PATIENCE)
        if node in self.gone:
            raise PeerLost(node=node, cause="nobody is there")
        return Line(self, node)


class Line:
    def __init__(self, scene: Scene, node: int) -> None:
        self._scene, self._node = scene, node

    def send_control(self, word: Message) -> None:
        self._scene.said.append((self._node, word))


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.open.set()
    for thread in made.threads:
        thread.join(PATIENCE)


def test_many_words_to_one_member_take_one_thread_and_keep_their_order(scene: Scene) -> None:
    for number in range(5):
        scene.couriers.send(7, Ping(number))
    eventually(lambda: scene.dialed == [7], "a dial")
    scene.open.set()
    eventually(lambda: len(scene.said) == 5, "all words")
    assert scene.said == [(7, Ping(number)) for number in range(5)]
    assert len(scene.threads) == 1


def test_of_too_many_words_the_newest_are_kept(scene: Scene) -> None:
    for number in range(MOST_WORDS + 10):
        scene.couriers.send(7, Ping(number))
    scene.open.set()
    eventually(lambda: len(scene.said) == MOST_WORDS, "the newest")
    assert scene.said[-1] == (7, Ping(MOST_WORDS + 9))


def test_however_many_members_there_are_not_many_threads_are_on_the_way(scene: Scene) -> None:
    for node in range(1, 2 * AT_ONCE + 1):
        scene.couriers.send(node, Ping(node))
    eventually(lambda: len(scene.dialed) == AT_ONCE, "all couriers are out")
    scene.open.set()
    eventually(lambda: len(scene.said) == 2 * AT_ONCE, "all words")
    assert len(scene.threads) == AT_ONCE
    assert sorted(node for node, _ in scene.said) == list(range(1, 2 * AT_ONCE + 1))


def test_who_cannot_be_reached_keeps_nobody_waiting_and_is_tried_again_with_the_next_word(scene: Scene) -> None:
    scene.gone.add(7)
    scene.open.set()
    scene.couriers.send(7, Ping(1))
    eventually(lambda: not scene.couriers._words, "it was given up")
    scene.gone.clear()
    scene.couriers.send(7, Ping(2))
    eventually(lambda: scene.said == [(7, Ping(2))], "the next word")
    eventually(lambda: scene.couriers._busy == 0, "nobody is on the way")


def test_a_courier_that_fails_or_cannot_be_sent_leaves_the_way_free_for_the_next() -> None:
    tasks: list[Callable[[], None]] = []

    def aside(task: Callable[[], None]) -> None:
        if not tasks:
            tasks.append(task)
            raise RuntimeError("can't start new thread")
        tasks.append(task)

    class Broken:
        def link(self, node: int, deadline: float) -> Any:
            raise ZeroDivisionError(node)

    couriers = Couriers(Broken(), aside)
    with pytest.raises(RuntimeError, match="new thread"):
        couriers.send(7, Ping(1))
    assert (couriers._busy, couriers._words) == (0, {})
    couriers.send(7, Ping(2))
    with pytest.raises(ZeroDivisionError):
        tasks[1]()
    assert (couriers._busy, couriers._words) == (0, {})
