import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from nexar.communicator.objects import decode_object
from nexar.links.outbox import Outbox
from nexar.rpc.registry import Registry
from nexar.rpc.server import Server
from nexar.wire.calls import Body, What, encode
from tests.ranks import PATIENCE
from tests.unit.rpc.scene import FakePost, Values, called

NODE = 5


class Scene:
    """A server of two places."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.outbox = Outbox()
        self.post = FakePost()
        self.registry = Registry()
        self.server = Server(
            self.lock, self.outbox, self.post, Values(), self.registry, limit=2, name="test",  # type: ignore[arg-type]
        )  # fmt: skip

    def tell(self, act: Any, *facts: Any) -> Any:
        """As the driving thread does: under the lock, then the I/O."""
        with self.lock:
            result = act(*facts)
        self.outbox.flush()
        return result

    def call(self, number: int, function: str | int, *arguments: Any, **settings: Any) -> None:
        self.tell(self.server.called, NODE, number, called(function, *arguments, **settings))

    def withdraw(self, number: int) -> None:
        self.tell(self.server.called, NODE, number, encode(Body(What.WITHDRAW)))

    def answer(self) -> Body:
        """The next one."""
        assert self.post.arrived.acquire(timeout=PATIENCE)
        return self.post.posted.pop(0)[3]


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.server.close()


class Gate:
    """A function that waits."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go = threading.Event()
        self.ended: list[str] = []

    def __call__(self) -> str:
        self.begun.release()
        self.go.wait(PATIENCE)
        return "through"

    async def asynchronous(self) -> None:
        self.begun.release()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.append("cancelled")
            self.go.set()

    def wait(self) -> None:
        assert self.begun.acquire(timeout=PATIENCE)


def test_a_call_is_run_and_answered(scene: Scene) -> None:
    scene.registry.add(lambda x, y=2: [x, y], "f", 9)
    scene.call(1, "f", 1)
    scene.call(2, 9, 1, y=3)
    found = sorted(decode_object(scene.answer().pieces) for _ in range(2))
    assert found == [[1, 2], [1, 3]]


def test_an_unknown_function_is_answered_with_what_there_is(scene: Scene) -> None:
    scene.registry.add(len, number=3)
    scene.call(1, "f")
    assert scene.answer()[:2] == (What.UNKNOWN, "len (id 3)")
    assert scene.server._jobs == {}


def test_one_call_more_than_there_are_places_is_turned_away(scene: Scene) -> None:
    gate = Gate()
    scene.registry.add(gate, "gate")
    for number in range(3):
        scene.call(number, "gate")
    answer = scene.answer()
    assert (answer.what, answer.number) == (What.OVERLOADED, 2)
    assert scene.tell(scene.server.expects, NODE, 7) is not None  # a large one is turned away by its envelope
    assert scene.answer().what == What.OVERLOADED
    gate.go.set()
    assert [scene.answer().what for _ in range(2)] == [What.RETURNED] * 2
    scene.call(8, "gate")
    assert scene.answer().what == What.RETURNED


def test_a_place_is_held_from_the_envelope_on_and_freed_if_nothing_comes(scene: Scene) -> None:
    assert scene.tell(scene.server.expects, NODE, 1) is None
    assert scene.tell(scene.server.expects, NODE, 1) is not None
    assert scene.tell(scene.server.expects, NODE, 2) is None
    scene.call(3, "f")
    assert scene.answer().what == What.UNKNOWN  # that is found out without a place
    scene.tell(scene.server.missed, NODE, 1, MemoryError("none left"))
    assert "none left" in scene.answer().text
    scene.registry.add(lambda: 1, "f")
    scene.call(2, "f")
    assert scene.answer().what == What.RETURNED
    assert scene.server._jobs == {}


def test_a_call_whose_time_is_over_is_not_run(scene: Scene) -> None:
    ran: list[int] = []
    scene.registry.add(ran.append, "f")
    scene.call(1, "f", 1, seconds=0.0)
    assert scene.answer().what == What.EXPIRED
    assert ran == []


def test_an_async_function_whose_time_is_over_is_cancelled(scene: Scene) -> None:
    gate = Gate()
    scene.registry.add(gate.asynchronous, "f")
    scene.call(1, "f", seconds=0.01)
    assert scene.answer().what == What.EXPIRED
    assert gate.ended == ["cancelled"]


def test_a_timeout_of_the_functions_own_is_an_error_of_the_function(scene: Scene) -> None:
    async def f() -> None:
        raise TimeoutError("of mine")

    scene.registry.add(f)
    scene.call(1, "f")
    assert "TimeoutError: of mine" in scene.answer().text


def test_a_withdrawn_call_is_cancelled_and_not_answered(scene: Scene) -> None:
    gate, blocking = Gate(), Gate()
    scene.registry.add(gate.asynchronous, "f")
    scene.registry.add(blocking, "g")
    scene.call(1, "f")
    scene.call(2, "g")
    gate.wait()
    blocking.wait()
    scene.withdraw(1)
    scene.withdraw(2)
    scene.withdraw(99)
    assert gate.go.wait(PATIENCE)
    blocking.go.set()
    scene.server.close()
    assert scene.post.posted == []
    assert scene.server._jobs == {}


def test_a_large_call_that_is_withdrawn_on_its_way_is_not_run_when_it_comes(scene: Scene) -> None:
    ran: list[int] = []
    scene.registry.add(ran.append, "f")
    scene.tell(scene.server.expects, NODE, 1)
    scene.withdraw(1)
    scene.call(1, "f", 1)
    scene.server.close()
    assert ran == []
    assert scene.server._jobs == {}


def test_the_calls_of_a_lost_node_are_cancelled(scene: Scene) -> None:
    gate = Gate()
    scene.registry.add(gate.asynchronous, "f")
    scene.call(1, "f")
    gate.wait()
    scene.tell(scene.server.lost, NODE + 1)
    assert not gate.go.is_set()
    scene.tell(scene.server.lost, NODE)
    assert gate.go.wait(PATIENCE)


def test_at_the_end_every_caller_that_waits_is_told(scene: Scene) -> None:
    gate = Gate()
    scene.registry.add(gate, "g")
    scene.registry.add(gate.asynchronous, "f")
    scene.call(1, "g")
    scene.call(2, "f")
    gate.wait()
    gate.wait()
    scene.tell(scene.server.end, "closed")
    assert [scene.answer()[:2] for _ in range(2)] == [(What.CANCELLED, "closed")] * 2
    gate.go.set()
    scene.server.close()
    assert scene.post.posted == []


@pytest.mark.parametrize("row", [memoryview(b"nonsense"), encode(Body(What.RETURNED))])
def test_what_is_no_call_is_answered_as_an_error(scene: Scene, row: memoryview) -> None:
    scene.tell(scene.server.called, NODE, 1, row)
    assert scene.answer().what == What.RAISED


def test_arguments_that_cannot_be_read_or_do_not_fit_are_an_error_of_the_call(scene: Scene) -> None:
    scene.registry.add(lambda: 1, "f")
    scene.call(1, "f", range(3), pickle=True)
    assert "serve it with pickle=True" in scene.answer().text
    scene.call(2, "f", 1)
    assert "positional argument" in scene.answer().text


def test_a_result_that_cannot_be_sent_is_an_error_of_the_call(scene: Scene) -> None:
    scene.registry.add(object, "f")
    scene.call(1, "f")
    assert "cannot be sent" in scene.answer().text


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_call_that_is_withdrawn_before_it_starts_does_not_run(scene: Scene, asynchronous: bool) -> None:
    ran: list[int] = []

    async def later(value: int) -> None:
        ran.append(value)

    scene.registry.add(later if asynchronous else ran.append, "f")
    with scene.lock:  # both words come before anybody has a thread for the call
        scene.server.called(NODE, 1, called("f", 1))
        scene.server.called(NODE, 1, encode(Body(What.WITHDRAW)))
    scene.outbox.flush()
    scene.call(2, "f", 2)
    assert scene.answer().what == What.RETURNED
    scene.server.close()
    assert ran == [2]
    assert scene.post.posted == []
    assert scene.server._jobs == {}


def test_a_large_call_of_an_unknown_function_gives_its_place_back(scene: Scene) -> None:
    scene.registry.add(len, "f")
    for number in range(5):
        assert scene.tell(scene.server.expects, NODE, number) is None
        scene.call(number, "unknown")
        assert scene.answer().what == What.UNKNOWN
    assert scene.server._jobs == {}


def test_who_calls_again_as_soon_as_it_is_answered_finds_its_place_free(scene: Scene) -> None:
    scene.registry.add(len, "f")
    scene.server._limit = 1
    numbers = iter(range(2, 6))
    keep = scene.post.answer

    def answer(node: int, space: int, number: int, row: memoryview) -> None:
        keep(node, space, number, row)
        following = next(numbers, None)
        if following is not None:
            scene.call(following, "f", [1])

    scene.post.answer = answer  # type: ignore[method-assign]
    scene.call(1, "f", [1])
    assert [scene.answer().what for _ in range(5)] == [What.RETURNED] * 5
