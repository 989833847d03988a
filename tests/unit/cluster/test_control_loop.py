"""Timers in virtual time, queued callbacks, sockets, and the end of a control loop. Decisions in order."""

import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from nexar.cluster.control_loop import MAX_QUEUED, ControlLoop, SerialQueue
from nexar.errors import InternalError
from tests.ranks import EVENT_TIMEOUT
from tests.unit.cluster.memory_mesh import eventually
from tests.unit.cluster.virtual_loop import VirtualLoop


@pytest.fixture
def virtual() -> Iterator[VirtualLoop]:
    with VirtualLoop(100.0) as made:
        yield made


@pytest.fixture
def loop() -> Iterator[ControlLoop]:
    with ControlLoop() as made:
        yield made


def threads_of(name: str) -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == name]


# ---------------------------------------------------------------- timers


def test_timers_run_in_the_order_of_their_times_each_at_its_own(virtual: VirtualLoop) -> None:
    ran: list[tuple[str, float]] = []
    for name, when in (("third", 103.0), ("first", 101.0), ("second", 102.0), ("also second", 102.0)):
        virtual.call_at(when, lambda now, name=name: ran.append((name, now)))  # type: ignore[misc]
    virtual.advance(0.5)
    assert ran == []
    virtual.advance(10.0)
    assert ran == [("first", 101.0), ("second", 102.0), ("also second", 102.0), ("third", 103.0)]


def test_a_callback_returns_its_next_time(virtual: VirtualLoop) -> None:
    ran: list[float] = []

    def beat(now: float) -> float | None:
        ran.append(now)
        return now + 1.0 if len(ran) < 3 else None

    virtual.call_at(101.0, beat)
    virtual.advance(60.0)
    assert ran == [101.0, 102.0, 103.0]
    assert virtual.next_due() is None


def test_a_timer_can_be_cancelled_and_moved_both_ways(virtual: VirtualLoop) -> None:
    ran: list[float] = []
    timer = virtual.call_at(101.0, ran.append)
    timer.move(105.0)
    virtual.advance(3.0)
    assert ran == []
    timer.move(104.0)
    virtual.advance(1.0)
    assert ran == [104.0]
    timer.move(106.0)
    timer.cancel()
    virtual.advance(10.0)
    assert ran == [104.0]


def test_a_wake_up_only_makes_it_earlier(virtual: VirtualLoop) -> None:
    ran: list[float] = []
    timer = virtual.call_at(None, ran.append)
    assert virtual.next_due() is None
    timer.wake_by(105.0)
    timer.wake_by(109.0)
    timer.wake_by(None)
    assert virtual.next_due() == 105.0
    timer.wake_by(103.0)
    virtual.advance(20.0)
    assert ran == [103.0]


def test_a_time_set_during_the_callback_causes_another_call(virtual: VirtualLoop) -> None:
    ran: list[float] = []

    def again(now: float) -> float:
        ran.append(now)
        if len(ran) == 1:
            timer.wake_by(102.0)
        return 200.0

    timer = virtual.call_at(101.0, again)
    virtual.advance(10.0)
    assert ran == [101.0, 102.0]
    assert virtual.next_due() == 200.0


def test_a_timer_that_always_wants_to_run_at_once_starves_no_other(virtual: VirtualLoop) -> None:
    ran: list[str] = []
    virtual.call_at(100.0, lambda now: [ran.append("greedy"), now][1])  # type: ignore[func-returns-value]
    virtual.call_at(100.0, lambda _: ran.append("modest"))
    virtual.call_soon(lambda: ran.append("queued"))
    virtual.step()
    assert ran == ["queued", "greedy", "modest"]
    virtual.step()
    assert ran[3:] == ["greedy"]


def test_a_closed_timer_never_runs_again(virtual: VirtualLoop) -> None:
    ran: list[float] = []
    timer = virtual.call_at(101.0, ran.append)
    timer.close()
    timer.close()
    timer.move(102.0)
    timer.wake_by(102.0)
    virtual.advance(10.0)
    assert ran == []


def test_one_callback_may_close_the_timer_of_another_that_is_due_too(virtual: VirtualLoop) -> None:
    ran: list[str] = []
    virtual.call_at(101.0, lambda _: other.close())
    other = virtual.call_at(101.0, lambda _: ran.append("other"))
    virtual.advance(5.0)
    assert ran == []


def test_a_timer_that_is_moved_very_often_takes_no_more_memory(virtual: VirtualLoop) -> None:
    timer = virtual.call_at(None, lambda _: None)
    for number in range(1000):
        timer.move(200.0 + number)
    assert len(virtual._timers) == 1
    assert virtual.next_due() == 1199.0
    timer.cancel()
    assert len(virtual._timers) == 0


def test_a_timer_may_be_set_in_the_middle_of_setting_another(virtual: VirtualLoop) -> None:
    """As by a finaliser that the garbage collector runs."""
    ran: list[str] = []
    with virtual._lock:
        virtual.call_at(101.0, lambda _: ran.append("finaliser"))
        virtual.call_soon(lambda: ran.append("queued"))
    virtual.advance(2.0)
    assert ran == ["queued", "finaliser"]


def test_closing_a_timer_waits_for_its_callback(loop: ControlLoop) -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def work(_: float) -> None:
        begun.set()
        assert go_on.wait(EVENT_TIMEOUT)
        ended.set()

    timer = loop.call_at(time.monotonic(), work)
    assert begun.wait(EVENT_TIMEOUT)
    threading.Timer(0.02, go_on.set).start()
    timer.close()
    assert ended.is_set()


def test_a_callback_may_close_its_own_timer(loop: ControlLoop) -> None:
    done = threading.Event()

    def end(now: float) -> float:
        timer.close()
        done.set()
        return now

    timer = loop.call_at(None, end)
    timer.move(time.monotonic())
    assert done.wait(EVENT_TIMEOUT)


def test_a_sleeping_loop_is_woken_by_an_earlier_timer(loop: ControlLoop) -> None:
    done = threading.Event()
    loop.call_at(time.monotonic() + 1000, lambda _: None)
    eventually(lambda: loop._sleeps_until is not None, "it sleeps")
    due = time.monotonic() + 0.02
    loop.call_at(due, lambda _: done.set())
    assert done.wait(EVENT_TIMEOUT)
    assert time.monotonic() >= due


# ---------------------------------------------------------------- queued callbacks


def test_queued_callbacks_run_in_order_in_one_thread_that_starts_with_the_first(loop: ControlLoop) -> None:
    ran: list[tuple[int, str]] = []
    done = threading.Event()
    assert loop._thread is None
    for number in range(100):
        assert loop.call_soon(lambda number=number: ran.append((number, threading.current_thread().name)))  # type: ignore[misc]
    loop.call_soon(done.set)
    assert done.wait(EVENT_TIMEOUT)
    assert ran == [(number, "nexar-control") for number in range(100)]


def test_a_callback_that_raises_is_logged_and_ends_nothing(
    virtual: VirtualLoop, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[str] = []

    def broken(*_: object) -> None:
        raise ZeroDivisionError("not today")

    virtual.call_soon(broken)
    virtual.call_soon(lambda: ran.append("queued"))
    virtual.call_at(100.0, broken)
    virtual.call_at(100.0, lambda _: ran.append("timer"))
    virtual.step()
    assert ran == ["queued", "timer"]
    assert [record.exc_info is not None for record in caplog.records] == [True, True]
    assert "broken of the control loop raised" in caplog.text
    assert "not today" in caplog.text


def test_a_slow_callback_is_logged_with_its_name(virtual: VirtualLoop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "nexar.cluster.control_loop")
    virtual.call_soon(lambda: virtual.clock.advance(0.009))
    virtual.call_at(100.0, lambda _: virtual.clock.advance(0.025))
    virtual.step()
    assert [record.getMessage() for record in caplog.records] == [
        "the callback test_a_slow_callback_is_logged_with_its_name.<locals>.<lambda> took 25 ms of the control loop"
    ]


def test_a_full_queue_drops_the_newest_callback_and_says_so_once(
    virtual: VirtualLoop, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []
    taken = [virtual.call_soon(lambda number=number: ran.append(number)) for number in range(MAX_QUEUED + 3)]  # type: ignore[misc]
    assert taken == [True] * MAX_QUEUED + [False] * 3
    assert len(caplog.records) == 1
    virtual.step()
    assert ran == list(range(MAX_QUEUED))
    assert virtual.call_soon(lambda: ran.append(-1))
    virtual.step()
    assert ran[-1] == -1


def test_what_a_queued_callback_queues_waits_for_the_next_step(virtual: VirtualLoop) -> None:
    ran: list[str] = []

    def again() -> None:
        ran.append("again")
        virtual.call_soon(again)

    virtual.call_soon(again)
    virtual.step()
    virtual.step()
    assert ran == ["again", "again"]


# ---------------------------------------------------------------- sockets


def test_sockets_call_back_while_they_are_registered(loop: ControlLoop) -> None:
    left, right = socket.socketpair()
    got: list[bytes] = []
    done = threading.Event()

    def readable() -> None:
        got.append(right.recv(16))
        loop.unregister(right)
        loop.unregister(right)
        done.set()

    with left, right:
        loop.call_soon(lambda: loop.register(right, selectors.EVENT_READ, readable))
        left.send(b"one")
        assert done.wait(EVENT_TIMEOUT)
        left.send(b"two")
        flush(loop)
    assert got == [b"one"]


def test_a_socket_that_another_callback_has_just_unregistered_is_left_alone(virtual: VirtualLoop) -> None:
    (a, b), (c, d) = socket.socketpair(), socket.socketpair()
    called: list[str] = []

    def only_me(name: str, other: socket.socket) -> Callable[[], None]:
        def readable() -> None:
            called.append(name)
            virtual.unregister(other)

        return readable

    with a, b, c, d:
        virtual.register(b, selectors.EVENT_READ, only_me("b", d))
        virtual.register(d, selectors.EVENT_READ, only_me("d", b))
        a.send(b"!")
        c.send(b"!")
        virtual.step()
    assert len(called) == 1


def test_other_threads_may_not_register_sockets(loop: ControlLoop) -> None:
    left, right = socket.socketpair()
    with left, right, pytest.raises(InternalError, match="its own callbacks"):
        loop.register(left, selectors.EVENT_READ, lambda: None)


def flush(loop: ControlLoop) -> None:
    """Wait until everything queued has run."""
    done = threading.Event()
    assert loop.call_soon(done.set)
    assert done.wait(EVENT_TIMEOUT)


# ---------------------------------------------------------------- the end


def test_closing_runs_what_is_queued_and_no_timer_and_joins_the_thread() -> None:
    loop = ControlLoop(name="a loop that ends")
    ran: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        assert go_on.wait(EVENT_TIMEOUT)

    loop.call_soon(first)
    assert begun.wait(EVENT_TIMEOUT)
    loop.call_soon(lambda: ran.append("queued"))
    loop.call_at(time.monotonic(), lambda _: ran.append("timer"))
    threading.Timer(0.02, go_on.set).start()
    loop.close()
    loop.close()
    assert ran == ["queued"]
    assert not threads_of("a loop that ends")
    assert not loop.call_soon(lambda: ran.append("late"))
    loop.call_at(time.monotonic(), lambda _: ran.append("late"))
    assert ran == ["queued"]


def test_closing_closes_sockets_that_are_still_registered(loop: ControlLoop) -> None:
    left, right = socket.socketpair()
    with left, right:
        loop.call_soon(lambda: loop.register(right, selectors.EVENT_READ, lambda: None))
        flush(loop)
        loop.close()
        assert right.fileno() == -1


def test_a_callback_may_close_the_loop(loop: ControlLoop) -> None:
    loop.call_soon(loop.close)
    eventually(lambda: loop._poller is None, "it has ended")


def test_a_loop_that_was_never_used_has_neither_thread_nor_descriptors() -> None:
    loop = ControlLoop()
    assert (loop._thread, loop._poller) == (None, None)
    loop.close()


@contextmanager
def another_thread_holds(lock: Any) -> Iterator[None]:
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            assert release.wait(EVENT_TIMEOUT)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(EVENT_TIMEOUT)
    yield
    release.set()
    if thread.is_alive():  # not in a forked child
        thread.join()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_can_use_nothing_and_waits_for_nothing(loop: ControlLoop) -> None:
    ran = threading.Event()
    timer = loop.call_at(time.monotonic() + 1000, lambda _: None)
    flush(loop)
    queue: SerialQueue[str] = SerialQueue(lambda _: ran.set())
    queue.post(["of the parent"])
    with another_thread_holds(loop._lock):
        child = os.fork()
    if child == 0:
        loop.abandon()
        refused = not loop.call_soon(ran.set)
        timer.move(0.0)
        timer.close()
        queue.drain()
        loop.close()
        os._exit(0 if refused and not ran.is_set() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    flush(loop)  # the parent's goes on


# ---------------------------------------------------------------- decisions in order


def test_items_are_performed_in_order_and_posted_ones_come_after_those_that_wait() -> None:
    done: list[str] = []

    def perform(item: str) -> None:
        done.append(item)
        if item == "first":
            queue.post(["posted"])
            queue.drain()  # this thread performs already, and comes to it later

    queue = SerialQueue(perform)
    queue.post(["first", "second"])
    queue.drain()
    assert done == ["first", "second", "posted"]


def test_a_thread_that_finds_another_performing_leaves_its_items_to_that_one() -> None:
    begun, go_on = threading.Event(), threading.Event()
    done: list[tuple[str, str]] = []

    def perform(item: str) -> None:
        done.append((item, threading.current_thread().name))
        begun.set()
        assert go_on.wait(EVENT_TIMEOUT)

    queue = SerialQueue(perform)
    queue.post(["slow"])
    thread = threading.Thread(target=queue.drain, name="the other")
    thread.start()
    assert begun.wait(EVENT_TIMEOUT)
    queue.post(["mine"])
    queue.drain()
    assert done == [("slow", "the other")]
    go_on.set()
    thread.join()
    assert done == [("slow", "the other"), ("mine", "the other")]


def test_an_item_that_raises_ends_the_call_and_the_rest_waits_for_the_next() -> None:
    done: list[int] = []

    def perform(item: int) -> None:
        if item == 1:
            raise ValueError("not this one")
        done.append(item)

    queue = SerialQueue(perform)
    queue.post([0, 1, 2])
    with pytest.raises(ValueError, match="not this one"):
        queue.drain()
    assert done == [0]
    queue.drain()
    assert done == [0, 2]


def test_a_thread_that_must_not_perform_leaves_it_to_the_loop(loop: ControlLoop) -> None:
    done: list[str] = []
    queue = SerialQueue(lambda _: done.append(threading.current_thread().name))
    queue.post(["item"])
    loop.call_soon(queue.drain)
    flush(loop)
    assert done == ["nexar-control"]
