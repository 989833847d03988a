"""What a node drives besides its transports: tasks, pollers, attempts."""

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from nexar.errors import Cancelled, InternalError, OperationTimeout, PeerLost, UsageError
from nexar.links import progress
from nexar.links.event_loop import EventLoop
from nexar.links.operation import FINISHED, Waiter
from nexar.links.progress import DEFAULT_SPIN, DriverElection, ProgressThread, spin_of
from nexar.transport.registry import ThirdPartyTransport, TransportFailed
from tests.unit.cluster.memory_mesh import eventually
from tests.unit.links.waiting import Node, Posted, ScriptedTransport, Sleep, Waiting, in_a_while


class Stage:
    """A background with everything that it drives."""

    def __init__(self) -> None:
        self.sleep = Sleep()
        self.transport = ScriptedTransport(self.sleep)
        self.event_loop = EventLoop(self.sleep, [self.transport], 0.0)
        self.election = DriverElection(threading.Lock())

    def open(self) -> ProgressThread:
        self.background = ProgressThread(self.election, self.event_loop)
        return self.background


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.event_loop.stop()
    made.background.close()


def polled(stage: Stage) -> bool:
    """Does anybody drive?"""
    done = threading.Event()
    stage.transport.execute(done.set)
    return done.wait(10)


def test_it_drives_when_nobody_leads(stage: Stage) -> None:
    stage.open()
    assert polled(stage)


def test_it_hands_over_to_who_follows(stage: Stage) -> None:
    background, waiter = stage.open(), Waiter()
    assert stage.sleep.begun.wait(10)
    waiter.prepare()
    stage.election.waiting_threads.append(waiter)
    assert background.is_driving
    stage.sleep.wake()
    waiter.sleep(10)
    assert not waiter.asleep
    stage.election.waiting_threads.remove(waiter)


def test_it_takes_over_from_a_leader_under_whom_it_parked(stage: Stage) -> None:
    stage.election.driver_lock.acquire()
    background = stage.open()
    while not background.parked:  # after some ticks under this one leader
        background._thread.join(0.002)
    stage.election.driver_lock.release()
    background.unpark()
    background.unpark()
    assert polled(stage)


def test_it_steps_in_at_once_when_asked_and_nobody_leads(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_TICK", 3600.0)
    made = stage.open()
    assert not stage.sleep.begun.wait(0.01)
    made.drive_now()
    assert polled(stage)
    made.drive_now()
    assert polled(stage)


@pytest.fixture
def driver_election() -> DriverElection:
    return DriverElection(threading.Lock())


def follow(driver_election: DriverElection, count: int) -> list[Waiter]:
    waiters = [Waiter() for _ in range(count)]
    for waiter in waiters:
        waiter.prepare()
        driver_election.waiting_threads.append(waiter)
    return waiters


def test_an_offer_wakes_one_follower_and_the_next_offer_the_next(driver_election: DriverElection) -> None:
    waiters = follow(driver_election, 3)
    driver_election.offer()
    assert [waiter.asleep for waiter in waiters] == [False, True, True]
    driver_election.offer()
    assert [waiter.asleep for waiter in waiters] == [False, False, True]


def test_an_offer_to_nobody_is_fine(driver_election: DriverElection) -> None:
    driver_election.offer()


def test_the_end_wakes_every_follower_and_stands_for_later_ones(driver_election: DriverElection) -> None:
    waiters = follow(driver_election, 5)
    driver_election.end(UsageError("over"))
    assert not any(waiter.asleep for waiter in waiters)
    assert driver_election.ended is not None


def test_in_a_forked_child_nobody_follows(driver_election: DriverElection) -> None:
    waiters = follow(driver_election, 2)
    driver_election.abandon(UsageError("the parent's"))
    assert driver_election.waiting_threads == []
    assert all(waiter.asleep for waiter in waiters), "a child takes no lock"


MANY = 200


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.progress.close()


def lost() -> PeerLost:
    return PeerLost(node=3, cause="it is gone")


# -- the good case ---------------------------------------------------------------------------------------------------


def test_a_wait_drives_until_its_operations_are_done(node: Node) -> None:
    first, second = node.post(), node.post()
    node.transport.execute(first.end, second.end)
    node.wait(first, second, FINISHED)
    assert first.done
    assert second.done


def test_a_wait_that_follows_ends_when_the_leader_finishes_its_operation(node: Node) -> None:
    mine, yours = node.post(), node.post()
    leader = Waiting(node, [mine])
    assert node.sleep.begun.wait(10)
    follower = Waiting(node, [yours])
    node.transport.execute(yours.end)
    assert follower.ended() is None
    node.transport.execute(mine.end)
    assert leader.ended() is None


def test_two_threads_may_wait_for_one_operation(node: Node) -> None:
    operation = node.post()
    threads = [Waiting(node, [operation]) for _ in range(5)]
    node.transport.execute(operation.end)
    assert [thread.ended() for thread in threads] == [None] * 5


# -- who waits for what ----------------------------------------------------------------------------------------------


def test_it_is_known_which_thread_waits_for_what_whether_it_leads_or_follows(node: Node) -> None:
    begun = time.monotonic()
    mine, yours = node.post("the first"), node.post("the second")
    leader = Waiting(node, [FINISHED, mine])
    leader.is_driving()
    follower = Waiting(node, [yours])
    eventually(lambda: len(node.progress.waits()) == 2, "both wait")
    known = {thread: (name, since) for thread, name, since in node.progress.waits()}
    assert {thread: name for thread, (name, _) in known.items()} == {
        leader.ident: "the first",
        follower.ident: "the second",
    }
    assert all(begun <= since <= time.monotonic() for _, since in known.values())
    node.transport.execute(mine.end, yours.end)
    assert (leader.ended(), follower.ended()) == (None, None)
    assert node.progress.waits() == []


def test_asking_who_waits_keeps_nothing_alive_that_the_asking_thread_drops(node: Node) -> None:
    """A thread that waits answers other ranks: a request that it drops then must be cancelled at once."""

    def ask() -> weakref.ref[threading.Event]:
        dropped = threading.Event()
        assert node.progress.waits() == []
        return weakref.ref(dropped)

    gc.disable()
    try:
        assert ask()() is None
    finally:
        gc.enable()


def test_a_wait_is_known_to_its_own_node_alone(node: Node) -> None:
    operation, other = node.post(), Node()
    thread = Waiting(node, [operation])
    thread.is_driving()
    assert node.progress.waits()
    assert other.progress.waits() == []
    other.progress.close()
    node.transport.execute(operation.end)
    assert thread.ended() is None


def test_a_wait_of_a_signal_handler_is_known_beside_the_one_it_interrupts() -> None:
    seen: list[list[str]] = []

    def look() -> None:
        seen.append([name for _, name, _ in node.progress.waits()])
        inner.end()
        outer.end()

    def handle(*_: object) -> None:
        node.transport.execute(look)
        node.wait(inner)

    def interrupt() -> None:
        eventually(lambda: bool(node.progress.waits()), "it waits")
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        node = Node()
        outer, inner = node.post("the outer"), node.post("the inner")
        thread = threading.Thread(target=interrupt)
        thread.start()
        node.wait(outer)
        thread.join()
        node.progress.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [["the inner", "the outer"]]


# -- errors ----------------------------------------------------------------------------------------------------------


def test_an_error_ends_the_wait_at_once_and_the_rest_is_cancelled(node: Node) -> None:
    send, receive = node.post("the send"), node.post("the receive")
    node.transport.execute(lambda: send.end(lost()))
    begin = time.monotonic()
    with pytest.raises(PeerLost, match="it is gone"):
        node.wait(send, receive, deadline=begin + 5)
    assert time.monotonic() - begin < 4
    assert receive.cancelled


def test_an_error_is_raised_whatever_its_place_among_the_operations(node: Node) -> None:
    operations = [node.post(f"number {number}") for number in range(4)]
    node.transport.execute(operations[0].end, lambda: operations[2].end(lost()))
    with pytest.raises(PeerLost):
        node.wait(*operations)
    assert [operation.cancelled for operation in operations] == [False, True, False, True]


def test_an_error_from_before_the_wait_is_raised_without_waiting(node: Node) -> None:
    receive, send = node.post("the receive"), node.post("the send")
    send.end(lost())
    with pytest.raises(PeerLost):
        node.wait(receive, send)
    assert receive.cancelled


def test_an_error_ends_the_wait_of_a_follower(node: Node) -> None:
    mine = node.post()
    leader = Waiting(node, [mine])
    assert node.sleep.begun.wait(10)
    failing, other = node.post(), node.post()
    follower = Waiting(node, [failing, other])
    node.transport.execute(lambda: failing.end(lost()))
    assert isinstance(follower.ended(), PeerLost)
    assert other.cancelled
    node.transport.execute(mine.end)
    assert leader.ended() is None


def test_operations_that_end_after_an_error_do_not_confuse_the_wait(node: Node) -> None:
    first, second, third = (node.post() for _ in range(3))
    node.transport.execute(lambda: (first.end(lost()), second.end()))
    with pytest.raises(PeerLost):
        node.wait(first, second, third)
    assert third.cancelled


# -- the abort signal -------------------------------------------------------------------------------------------------


def test_a_cancel_token_ends_the_wait_of_the_driver_and_of_followers(node: Node) -> None:
    abort_signal, mine, yours = node.post("the abort signal"), node.post(), node.post()

    def wait(operation: Posted) -> None:
        with pytest.raises(PeerLost, match="it is gone"):
            node.progress.wait([operation], in_a_while(), abort_signal)

    threads = [threading.Thread(target=wait, args=(operation,), daemon=True) for operation in (mine, yours)]
    threads[0].start()
    assert node.sleep.begun.wait(10)
    threads[1].start()
    begin = time.monotonic()
    abort_signal.end(lost())
    for thread in threads:
        thread.join(5)
    assert time.monotonic() - begin < 4
    assert mine.cancelled
    assert yours.cancelled


def test_a_cancel_token_from_before_the_wait_ends_it_at_once(node: Node) -> None:
    abort_signal, operation = node.post(), node.post()
    abort_signal.end(lost())
    with pytest.raises(PeerLost):
        node.progress.wait([operation], in_a_while(), abort_signal)
    assert operation.cancelled


def test_a_cancel_token_that_is_not_used_is_not_waited_for_and_keeps_no_trace(node: Node) -> None:
    abort_signal = node.post()
    for _ in range(3):
        operation = node.post()
        node.transport.execute(operation.end)
        node.progress.wait([operation, FINISHED], in_a_while(), abort_signal)
    assert not abort_signal._callbacks
    assert not abort_signal.cancelled
    operation = node.post()
    node.transport.execute(abort_signal.end, operation.end)
    node.progress.wait([operation], in_a_while(), abort_signal)


def test_what_is_done_does_not_mind_the_cancel_token(node: Node) -> None:
    abort_signal = node.post()
    abort_signal.end(lost())
    node.progress.wait([FINISHED], in_a_while(), abort_signal)


# -- the deadline ----------------------------------------------------------------------------------------------------


def test_at_the_deadline_a_wait_names_what_is_missing_and_cancels_it(node: Node) -> None:
    done, missing = node.post("the done one"), node.post("the missing one")
    node.transport.execute(done.end)
    with pytest.raises(OperationTimeout, match="the missing one") as caught:
        node.wait(done, missing, deadline=time.monotonic() + 0.01)
    assert "the done one" not in str(caught.value)
    assert missing.cancelled


class DoneWhenAsked(Posted):
    """Is finished by somebody else in the very moment in which its wait gives it up."""

    __slots__ = ("failure", "moment")

    def awaited(self):  # type: ignore[no-untyped-def]
        if self.moment == "named":
            self.end(self.failure)
        return super().awaited()

    def cancel(self) -> None:
        if self.moment == "cancelled":
            self.end(self.failure)
        super().cancel()


def overtaken(node: Node, moment: str, failure: BaseException | None = None) -> DoneWhenAsked:
    operation = DoneWhenAsked(node.progress.lock)
    operation.moment, operation.failure = moment, failure
    return operation


def test_a_wait_that_keeps_its_operations_leaves_them_in_flight_at_the_deadline(node: Node) -> None:
    late = node.post()
    for _ in range(2):
        with pytest.raises(OperationTimeout):
            node.progress.wait([late], time.monotonic() + 0.01, keep=True)
        assert not late.done
    node.transport.execute(late.end)
    node.wait(late)
    assert late.error is None


@pytest.mark.parametrize("moment", ["named", "cancelled"])
def test_an_operation_that_is_done_just_as_its_wait_gives_up_is_no_timeout(node: Node, moment: str) -> None:
    operation = overtaken(node, moment)
    node.wait(operation, deadline=time.monotonic())
    assert operation.done
    assert not operation.cancelled


def test_an_operation_that_fails_just_as_its_wait_gives_up_raises_its_own_error(node: Node) -> None:
    waiting = node.post()
    with pytest.raises(PeerLost):
        node.wait(waiting, overtaken(node, "cancelled", lost()), deadline=time.monotonic())
    assert waiting.cancelled


def test_a_timeout_among_operations_that_are_done_meanwhile_names_only_the_missing(node: Node) -> None:
    missing = node.post("the missing one")
    with pytest.raises(OperationTimeout, match="the missing one") as caught:
        node.wait(overtaken(node, "cancelled"), missing, deadline=time.monotonic())
    assert "1 more" not in str(caught.value)


def test_a_follower_whose_operation_ends_at_its_deadline_never_raises_anything_strange(node: Node) -> None:
    never = node.post()
    leader = Waiting(node, [never])
    assert node.sleep.begun.wait(10)
    for _ in range(100):
        operation, now = node.post(), time.monotonic()
        follower = Waiting(node, [operation], deadline=now + 0.002)
        while time.monotonic() < now + 0.0019:
            pass
        node.transport.execute(operation.end)
        assert isinstance(follower.ended(), OperationTimeout | None)
        assert operation.done
    node.transport.execute(never.end)
    assert leader.ended() is None


def test_the_deadline_is_kept_under_constant_traffic(node: Node) -> None:
    node.transport.always = lambda: None
    waiting = Waiting(node, [node.post()], deadline=time.monotonic() + 0.05)
    try:
        assert isinstance(waiting.ended(5), OperationTimeout)
    finally:
        node.transport.always = None


# -- driver election -----------------------------------------------------------------------------------------------


def test_a_leader_that_leaves_hands_over(node: Node) -> None:
    operations = [node.post() for _ in range(20)]
    threads = [Waiting(node, [operation]) for operation in operations]
    for operation, thread in zip(operations, threads, strict=True):
        node.transport.execute(operation.end)
        assert thread.ended() is None


def test_the_progress_thread_drives_while_nobody_waits(node: Node) -> None:
    driven = threading.Event()
    node.transport.execute(driven.set)
    assert driven.wait(10)


def test_what_a_transport_raises_costs_no_more_than_the_connection_it_has_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    node = Node()
    node.transport.execute(lambda: 1 / 0)
    operation = node.post()
    node.transport.execute(operation.end)
    node.wait(operation)
    assert "ZeroDivisionError" in caplog.text
    assert node.progress._progress_thread._thread.is_alive()
    node.progress.close()


class Broken:
    """A poller with a bug."""

    spins = False

    def poll(self) -> bool:
        raise ZeroDivisionError("a bug")

    def prepare_sleep(self) -> bool:
        return True


def test_a_fault_that_is_nobodys_connection_ends_every_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    node = Node()
    node.progress.add_poller(Broken())
    node.progress._progress_thread._thread.join(10)
    with pytest.raises(InternalError, match="progress thread ended"):
        node.wait(node.post())
    node.progress.close()


def test_a_transport_that_raises_at_every_look_ends_every_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    node = Node()

    def again() -> None:
        node.transport.execute(again)
        raise ZeroDivisionError

    node.transport.execute(again)
    node.progress._progress_thread._thread.join(60)
    with pytest.raises(InternalError, match="progress thread ended"):
        node.wait(node.post())
    node.progress.close()


# -- the end ---------------------------------------------------------------------------------------------------------


def test_closing_ends_every_wait() -> None:
    node = Node()
    operations = [node.post() for _ in range(MANY)]
    threads = [Waiting(node, [operation]) for operation in operations]
    assert node.sleep.begun.wait(10)
    node.transport.on_close = lambda: [thread.join(5) for thread in threads]  # none needs the lead to end
    node.progress.close()
    assert all(isinstance(thread.ended(), UsageError) for thread in threads)
    assert all(operation.cancelled for operation in operations)
    assert node.transport.closed


def test_closing_while_waits_begin_ends_them_all() -> None:
    for _ in range(20):
        node = Node()
        gate = threading.Barrier(21)

        def late(node: Node = node, gate: threading.Barrier = gate) -> None:
            gate.wait()
            with pytest.raises(UsageError):
                node.wait(node.post())

        threads = [threading.Thread(target=late, daemon=True) for _ in range(20)]
        for thread in threads:
            thread.start()
        gate.wait()
        node.progress.close()
        for thread in threads:
            thread.join(10)
        assert not any(thread.is_alive() for thread in threads)


def test_a_wait_on_a_closed_node_raises_and_closing_again_does_nothing(node: Node) -> None:
    node.progress.close()
    with pytest.raises(UsageError, match="closed"):
        node.wait(node.post())
    node.progress.close()


def test_a_forked_child_is_notified_unless_it_was_unregistered(node: Node) -> None:
    reported: list[str] = []
    node.progress.when_forked(lambda: reported.append("first"))
    forget = node.progress.when_forked(lambda: reported.append("second"))
    forget()
    forget()
    child = os.fork()
    if not child:
        os._exit(0 if reported == ["first"] and node.transport.abandoned else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_was_unregistered_from_forks_is_not_kept_alive(node: Node) -> None:
    class Link:
        def forked(self) -> None: ...

    link = Link()
    forget = node.progress.when_forked(link.forked)
    known = weakref.ref(link)
    forget()
    del link, forget
    gc.collect()
    assert known() is None


def test_a_wait_in_a_forked_child_raises_whoever_led_in_the_parent(node: Node) -> None:
    leader = Waiting(node, [never := node.post()])
    assert node.sleep.begun.wait(10)
    child = os.fork()
    if not child:
        code = 1
        try:
            node.wait(node.post())
        except UsageError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    node.transport.execute(never.end)
    assert leader.ended() is None


def test_a_cancelled_operation_raises_that_it_was_cancelled(node: Node) -> None:
    operation = node.post()
    operation.cancel()
    with pytest.raises(Cancelled):
        node.progress.wait([operation], in_a_while())


def test_the_setting_for_spinning_is_in_microseconds_or_automatic() -> None:
    assert spin_of("auto") == DEFAULT_SPIN
    assert spin_of(0) == 0
    assert spin_of(50) == pytest.approx(50e-6)


def test_a_task_runs_whether_somebody_waits_or_not(node: Node) -> None:
    ran = threading.Event()
    node.progress.run_soon(ran.set)
    assert ran.wait(10)
    operation = node.post()
    waiting = Waiting(node, [operation])
    with node.progress.lock:  # allowed there
        node.progress.run_soon(operation.end)
    assert waiting.ended() is None


def test_a_task_that_raises_ends_every_wait(node: Node) -> None:
    first = Waiting(node, [node.post()])
    assert node.sleep.begun.wait(10)
    second = Waiting(node, [node.post()])
    node.progress.run_soon(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    assert all(isinstance(waiting.ended(), InternalError) for waiting in (first, second))
    with pytest.raises(InternalError):
        node.progress.check()


def foreign_node(reported: list[str]) -> Node:
    return Node(
        lambda inside: ThirdPartyTransport(
            inside, inside.capabilities, lambda error: f"the transport of somebody raised {error!r}"
        ),
        on_end=lambda: reported.append("ended"),
    )


def test_a_transport_of_others_that_raises_ends_all_waiting_with_its_name() -> None:
    reported: list[str] = []
    node = foreign_node(reported)
    first = Waiting(node, [node.post()])
    assert node.sleep.begun.wait(10)
    second = Waiting(node, [node.post()])
    node.transport.execute(lambda: 1 // 0)
    for waiting in (first, second):
        error = waiting.ended()
        assert isinstance(error, TransportFailed)
        assert "of somebody raised ZeroDivisionError" in str(error)
    with pytest.raises(TransportFailed):
        node.progress.check()
    assert reported
    node.progress.close()


def test_it_does_so_also_where_nobody_waits() -> None:
    reported: list[str] = []
    node = foreign_node(reported)
    assert node.sleep.begun.wait(10)
    node.transport.execute(lambda: 1 // 0)
    node.progress._progress_thread._thread.join(10)
    assert reported == ["ended"]
    with pytest.raises(TransportFailed, match="of somebody raised ZeroDivisionError"):
        node.wait(node.post())
    node.progress.close()


def test_pollers_are_driven(node: Node) -> None:
    class Poller:
        spins = False

        def __init__(self) -> None:
            self.operation: Posted | None = None

        def poll(self) -> bool:
            operation, self.operation = self.operation, None
            if operation is not None:
                operation.end()
            return operation is not None

        def prepare_sleep(self) -> bool:
            return self.operation is None

    poller, operation = Poller(), node.post()
    node.progress.add_poller(poller)
    poller.operation = operation
    node.wait(operation)
    node.progress.remove_poller(poller)
    poller.operation = second = node.post()
    node.transport.execute(lambda: None, second.end)
    node.wait(second)
    assert poller.operation is second


def test_an_attempt_runs_at_once_and_sends_the_progress_thread_away(node: Node) -> None:
    assert node.sleep.begun.wait(10)
    assert node.progress._progress_thread.is_driving

    def gone() -> bool:
        while node.progress._progress_thread.is_driving:
            time.sleep(0)
        return True

    assert node.progress.run_inline(gone)
    assert not node.progress._waiting_threads
    assert not node.progress.run_inline(lambda: False)
    node.progress.close()
    with pytest.raises(UsageError, match="closed"):
        node.progress.run_inline(gone)


def test_what_was_handed_over_is_run_when_the_node_closes() -> None:
    node = Node()
    node.progress._event_loop.stop()  # nobody gets to run it before
    ran: list[int] = []
    node.progress.run_soon(lambda: ran.append(1))
    node.progress.close()
    assert ran == [1]
