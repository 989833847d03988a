import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nexar.communicator.serialization import decode_object
from nexar.errors import UsageError
from nexar.links.operation import DeferredIO
from nexar.rpc.registry import Registry, ServedFunction
from nexar.rpc.server import AsyncThread, ServedCall, Server, WorkerPool, cancelled_answer, raised_answer
from nexar.wire.rpc import Body, BodyKind, decode, encode
from tests.ranks import EVENT_TIMEOUT
from tests.unit.rpc.scene import FakePost, Values, called


def job(function: ServedFunction, row: memoryview) -> ServedCall:
    made = ServedCall(1, 2, Values())
    made.set_work(function, decode(row))
    return made


def served(run: object, *, pickle: bool = False) -> ServedFunction:
    return ServedFunction("f", run, False, pickle)  # type: ignore[arg-type]


def test_a_job_calls_its_function_and_makes_the_answer() -> None:
    made = job(served(lambda x, y: x - y), called("f", 5, y=3))
    assert made.run() == 2
    assert decode_object(decode(made.returned(2)).pieces) == 2


def test_large_arguments_are_let_go_when_the_function_has_them() -> None:
    made = job(served(len), called("f", np.zeros(10_000)))
    assert made.run() == 10_000
    assert made._body.pieces == ()


def test_results_are_pickled_only_where_caller_and_function_agreed() -> None:
    for pickle, asked, outcome in ((True, True, True), (True, False, False)):
        made = job(served(len, pickle=pickle), called("f", [1], pickle=asked))
        assert made.run() == 1
        assert decode(made.returned(1)).pickled is outcome
    with pytest.raises(UsageError, match="serve it with pickle=True"):
        job(served(len), called("f", [1], pickle=True)).run()


def test_a_job_is_over_when_its_time_is_or_nobody_waits() -> None:
    assert job(served(len), called("f", seconds=0.0)).over
    made = job(served(len), called("f"))
    assert not made.over
    made.abandoned = True
    assert made.over


def test_a_result_above_the_limit_is_refused() -> None:
    with pytest.raises(UsageError, match=r"result of f takes .* 256 MiB"):
        job(served(len), called("f")).returned(np.zeros(300 << 20, np.uint8))


def test_answers_of_calls_that_came_to_nothing_say_why() -> None:
    assert decode(cancelled_answer("closed")) == Body(BodyKind.CANCELLED, "closed")
    found = decode(raised_answer(ValueError("no")))
    assert (found.what, found.text.splitlines()[-1]) == (BodyKind.RAISED, "ValueError: no")


def started(loop: AsyncThread, work: Any) -> threading.Event:
    """Set when the task has ended."""
    ended = threading.Event()
    loop.call_soon(lambda: loop.start(work(), lambda _: ended.set()) and None)
    return ended


def test_coroutines_run_beside_one_another() -> None:
    loop = AsyncThread("test")
    meet = asyncio.Barrier(3)

    async def work() -> None:
        await meet.wait()

    endings = [started(loop, work) for _ in range(3)]
    assert all(each.wait(EVENT_TIMEOUT) for each in endings)
    loop.close(EVENT_TIMEOUT)


def test_closing_cancels_what_runs_and_leaves_no_thread() -> None:
    loop = AsyncThread("test")
    begun = threading.Event()
    seen: list[str] = []

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    ended = started(loop, work)
    assert begun.wait(EVENT_TIMEOUT)
    loop.close(EVENT_TIMEOUT)
    assert ended.wait(EVENT_TIMEOUT)
    assert seen == ["cancelled"]
    loop.call_soon(lambda: pytest.fail("it ran"))
    loop.close(EVENT_TIMEOUT)


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
def test_who_wants_to_end_the_process_ends_only_itself(end: type[BaseException]) -> None:
    loop = AsyncThread("test")
    errors: list[BaseException | None] = []
    ended = threading.Event()

    async def work() -> None:
        raise end

    def reported(task: asyncio.Task[None]) -> None:
        errors.append(task.exception())
        ended.set()

    def begin() -> None:
        loop.start(work(), reported)

    loop.call_soon(begin)
    assert ended.wait(EVENT_TIMEOUT)
    assert [type(error) for error in errors] == [end]
    assert started(loop, lambda: asyncio.sleep(0)).wait(EVENT_TIMEOUT), "others go on"
    loop.close(EVENT_TIMEOUT)


def test_who_stops_the_loop_stops_nobody() -> None:
    loop = AsyncThread("test")

    async def work() -> None:
        asyncio.get_running_loop().stop()

    assert started(loop, work).wait(EVENT_TIMEOUT)
    assert started(loop, lambda: asyncio.sleep(0)).wait(EVENT_TIMEOUT)
    loop.close(EVENT_TIMEOUT)


def test_a_loop_that_is_blocked_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    loop = AsyncThread("stubborn")
    go, begun = threading.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        while not go.is_set():
            time.sleep(0.001)  # noqa: ASYNC251 - a function that blocks the loop is what this is about

    ended = started(loop, work)
    assert begun.wait(EVENT_TIMEOUT)
    with caplog.at_level(logging.WARNING):
        loop.close(0.01)
    assert "stubborn" in caplog.text
    go.set()
    assert ended.wait(EVENT_TIMEOUT)
    loop.close(EVENT_TIMEOUT)


def test_tasks_run_at_once_and_beside_one_another() -> None:
    pool = WorkerPool("test", 3)
    together = threading.Barrier(4)
    for _ in range(3):
        pool.submit(lambda: together.wait(EVENT_TIMEOUT) and None)
    together.wait(EVENT_TIMEOUT)
    pool.close(EVENT_TIMEOUT)


def test_no_more_threads_are_made_than_the_limit_and_none_for_what_a_free_one_can_do() -> None:
    pool = WorkerPool("test", 2)
    done = threading.Semaphore(0)
    go = threading.Event()

    def task() -> None:
        go.wait(EVENT_TIMEOUT)
        done.release()

    for _ in range(6):
        pool.submit(task)
    assert len(pool._threads) == 2
    go.set()
    for _ in range(6):
        assert done.acquire(timeout=EVENT_TIMEOUT)
    pool.close(EVENT_TIMEOUT)


def test_what_is_submitted_after_the_end_is_dropped() -> None:
    pool = WorkerPool("test", 1)
    pool.close(EVENT_TIMEOUT)
    pool.submit(lambda: pytest.fail("it ran"))
    pool.close(EVENT_TIMEOUT)


def test_closing_from_one_of_its_own_threads_does_not_wait_for_itself() -> None:
    pool = WorkerPool("test", 1)
    closed = threading.Event()

    def task() -> None:
        pool.close(EVENT_TIMEOUT)
        closed.set()

    pool.submit(task)
    assert closed.wait(EVENT_TIMEOUT)
    pool.close(EVENT_TIMEOUT)


def test_a_task_that_does_not_end_is_named_in_the_log_and_ends_later(caplog: pytest.LogCaptureFixture) -> None:
    pool = WorkerPool("stubborn", 1)
    go = threading.Event()
    pool.submit(lambda: go.wait(EVENT_TIMEOUT) and None)
    with caplog.at_level(logging.WARNING):
        pool.close(0.01)
    assert "stubborn-1" in caplog.text
    go.set()
    pool.close(EVENT_TIMEOUT)


NODE = 5


class Scene:
    """A server of two places."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.deferred_io = DeferredIO()
        self.post = FakePost()
        self.registry = Registry()
        self.server = Server(
            self.lock, self.deferred_io, self.post, Values(), self.registry, limit=2, name="test",  # type: ignore[arg-type]
        )  # fmt: skip

    def call_server(self, act: Any, *facts: Any) -> Any:
        """As the driving thread does: under the lock, then the I/O."""
        with self.lock:
            result = act(*facts)
        self.deferred_io.flush()
        return result

    def call(self, number: int, function: str | int, *arguments: Any, **settings: Any) -> None:
        self.call_server(self.server.called, NODE, number, called(function, *arguments, **settings))

    def withdraw(self, number: int) -> None:
        self.call_server(self.server.called, NODE, number, encode(Body(BodyKind.WITHDRAW)))

    def answer(self) -> Body:
        """The next one."""
        assert self.post.arrived.acquire(timeout=EVENT_TIMEOUT)
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
        self.go.wait(EVENT_TIMEOUT)
        return "through"

    async def asynchronous(self) -> None:
        self.begun.release()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.append("cancelled")
            self.go.set()

    def wait(self) -> None:
        assert self.begun.acquire(timeout=EVENT_TIMEOUT)


def test_a_call_is_run_and_answered(scene: Scene) -> None:
    scene.registry.add(lambda x, y=2: [x, y], "f", 9)
    scene.call(1, "f", 1)
    scene.call(2, 9, 1, y=3)
    found = sorted(decode_object(scene.answer().pieces) for _ in range(2))
    assert found == [[1, 2], [1, 3]]


def test_an_unknown_function_is_answered_with_what_there_is(scene: Scene) -> None:
    scene.registry.add(len, number=3)
    scene.call(1, "f")
    assert scene.answer()[:2] == (BodyKind.UNKNOWN, "len (id 3)")
    assert scene.server._calls == {}


def test_one_call_more_than_there_are_places_is_turned_away(scene: Scene) -> None:
    gate = Gate()
    scene.registry.add(gate, "gate")
    for number in range(3):
        scene.call(number, "gate")
    answer = scene.answer()
    assert (answer.what, answer.number) == (BodyKind.OVERLOADED, 2)
    assert scene.call_server(scene.server.expects, NODE, 7) is not None  # a large one is turned away by its envelope
    assert scene.answer().what == BodyKind.OVERLOADED
    gate.go.set()
    assert [scene.answer().what for _ in range(2)] == [BodyKind.RETURNED] * 2
    scene.call(8, "gate")
    assert scene.answer().what == BodyKind.RETURNED


def test_a_place_is_held_from_the_envelope_on_and_freed_if_nothing_comes(scene: Scene) -> None:
    assert scene.call_server(scene.server.expects, NODE, 1) is None
    assert scene.call_server(scene.server.expects, NODE, 1) is not None
    assert scene.call_server(scene.server.expects, NODE, 2) is None
    scene.call(3, "f")
    assert scene.answer().what == BodyKind.UNKNOWN  # that is found out without a place
    scene.call_server(scene.server.missed, NODE, 1, MemoryError("none left"))
    assert "none left" in scene.answer().text
    scene.registry.add(lambda: 1, "f")
    scene.call(2, "f")
    assert scene.answer().what == BodyKind.RETURNED
    assert scene.server._calls == {}


def test_a_call_whose_time_is_over_is_not_run(scene: Scene) -> None:
    ran: list[int] = []
    scene.registry.add(ran.append, "f")
    scene.call(1, "f", 1, seconds=0.0)
    assert scene.answer().what == BodyKind.EXPIRED
    assert ran == []


def test_an_async_function_whose_time_is_over_is_cancelled(scene: Scene) -> None:
    gate = Gate()
    scene.registry.add(gate.asynchronous, "f")
    scene.call(1, "f", seconds=0.01)
    assert scene.answer().what == BodyKind.EXPIRED
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
    assert gate.go.wait(EVENT_TIMEOUT)
    blocking.go.set()
    scene.server.close()
    assert scene.post.posted == []
    assert scene.server._calls == {}


def test_a_large_call_that_is_withdrawn_on_its_way_is_not_run_when_it_comes(scene: Scene) -> None:
    ran: list[int] = []
    scene.registry.add(ran.append, "f")
    scene.call_server(scene.server.expects, NODE, 1)
    scene.withdraw(1)
    scene.call(1, "f", 1)
    scene.server.close()
    assert ran == []
    assert scene.server._calls == {}


def test_the_calls_of_a_lost_node_are_cancelled(scene: Scene) -> None:
    gate = Gate()
    scene.registry.add(gate.asynchronous, "f")
    scene.call(1, "f")
    gate.wait()
    scene.call_server(scene.server.lost, NODE + 1)
    assert not gate.go.is_set()
    scene.call_server(scene.server.lost, NODE)
    assert gate.go.wait(EVENT_TIMEOUT)


def test_at_the_end_every_caller_that_waits_is_notified(scene: Scene) -> None:
    gate = Gate()
    scene.registry.add(gate, "g")
    scene.registry.add(gate.asynchronous, "f")
    scene.call(1, "g")
    scene.call(2, "f")
    gate.wait()
    gate.wait()
    scene.call_server(scene.server.end, "closed")
    assert [scene.answer()[:2] for _ in range(2)] == [(BodyKind.CANCELLED, "closed")] * 2
    gate.go.set()
    scene.server.close()
    assert scene.post.posted == []


@pytest.mark.parametrize("row", [memoryview(b"nonsense"), encode(Body(BodyKind.RETURNED))])
def test_what_is_no_call_is_answered_as_an_error(scene: Scene, row: memoryview) -> None:
    scene.call_server(scene.server.called, NODE, 1, row)
    assert scene.answer().what == BodyKind.RAISED


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
    with scene.lock:  # both messages come before anybody has a thread for the call
        scene.server.called(NODE, 1, called("f", 1))
        scene.server.called(NODE, 1, encode(Body(BodyKind.WITHDRAW)))
    scene.deferred_io.flush()
    scene.call(2, "f", 2)
    assert scene.answer().what == BodyKind.RETURNED
    scene.server.close()
    assert ran == [2]
    assert scene.post.posted == []
    assert scene.server._calls == {}


def test_a_large_call_of_an_unknown_function_gives_its_place_back(scene: Scene) -> None:
    scene.registry.add(len, "f")
    for number in range(5):
        assert scene.call_server(scene.server.expects, NODE, number) is None
        scene.call(number, "unknown")
        assert scene.answer().what == BodyKind.UNKNOWN
    assert scene.server._calls == {}


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
    assert [scene.answer().what for _ in range(5)] == [BodyKind.RETURNED] * 5
