import threading
import time

import pytest

from nexar.links.event_loop import LONGEST_WAIT, EventLoop, TaskRaised
from nexar.links.operation import Waiter
from tests.unit.links.waiting import LONG, ScriptedTransport, Sleep, in_a_while


class CountedSleep(Sleep):
    """Never sleeps, but keeps how long it was asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[float] = []

    def sleep(self, timeout: float, spin: float) -> None:
        self.asked.append(timeout)


class Timed(ScriptedTransport):
    """Must be polled again soon, and may refuse the sleep."""

    until: float | None = None
    armed = True

    def due(self) -> float | None:
        return self.until

    def prepare_sleep(self) -> bool:
        return self.armed


@pytest.fixture
def sleep() -> CountedSleep:
    return CountedSleep()


@pytest.fixture
def transport(sleep: CountedSleep) -> Timed:
    return Timed(sleep)


@pytest.fixture
def drive(sleep: CountedSleep, transport: Timed) -> EventLoop:
    return EventLoop(sleep, [transport], 0.0)


def waiting() -> Waiter:
    waiter = Waiter()
    waiter.pending = 1
    return waiter


def test_it_leaves_as_soon_as_nothing_is_pending(drive: EventLoop, transport: Timed) -> None:
    waiter = waiting()
    transport.execute(lambda: waiter.count(None), lambda: pytest.fail("polled once too often"))
    drive.until_done(waiter, in_a_while())


def test_under_constant_news_it_leaves_at_the_deadline(drive: EventLoop, transport: Timed) -> None:
    transport.always = lambda: None
    drive.until_done(waiting(), time.monotonic())


def test_no_sleep_is_longer_than_a_missed_signal_may_take(
    drive: EventLoop, transport: Timed, sleep: CountedSleep, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiter = waiting()
    monkeypatch.setattr(transport, "prepare_sleep", lambda: len(sleep.asked) < 3 or (waiter.count(None) or False))
    drive.until_done(waiter, in_a_while())
    assert len(sleep.asked) == 3
    assert max(sleep.asked) <= LONGEST_WAIT


def test_it_sleeps_no_longer_than_a_transport_allows(drive: EventLoop, transport: Timed, sleep: CountedSleep) -> None:
    transport.until = time.monotonic() - 1
    drive._sleep(5.0, 0.0)
    assert sleep.asked == [0.0]


def test_it_does_not_sleep_when_a_transport_has_news(drive: EventLoop, transport: Timed, sleep: CountedSleep) -> None:
    transport.armed = False
    drive._sleep(5.0, 0.0)
    assert sleep.asked == []


def test_in_the_background_it_leaves_when_somebody_follows(drive: EventLoop, transport: Timed) -> None:
    followers: list[Waiter] = []
    transport.execute(lambda: followers.append(Waiter()))
    drive.until_thread_waits(followers)
    assert followers


def test_when_stopped_whoever_drives_leaves() -> None:
    sleep = Sleep()
    drive = EventLoop(sleep, [ScriptedTransport(sleep)], 0.0)
    thread = threading.Thread(target=drive.until_thread_waits, args=([],), daemon=True)
    thread.start()
    assert sleep.begun.wait(10)
    drive.stop()
    thread.join(10)
    assert not thread.is_alive()


class Native(Timed):
    """A transport that sleeps for all of them."""

    def watch(self, descriptor: int, *, readable: bool = True, writable: bool = False) -> None: ...

    def unwatch(self, descriptor: int) -> None: ...

    def wake(self) -> None: ...

    def sleep(self, timeout: float, spin: float) -> None: ...


class Memory(Timed):
    """Worth another look."""

    spins = True


def test_what_the_native_transport_raises_between_two_looks_at_memory_ends_no_wait(
    sleep: CountedSleep, caplog: pytest.LogCaptureFixture
) -> None:
    native, memory = Native(sleep), Memory(sleep)
    drive = EventLoop(native, [native, memory], LONG)
    native.execute(lambda: 1 / 0)
    assert drive._spin_again(rounds=1 << 10)
    assert not native.todo, "it was not asked"
    assert "ZeroDivisionError" in caplog.text


# -- pollers and tasks -----------------------------------------------------------------------------------------------


class Looked:
    """A poller that counts looks."""

    spins = False
    armed = True

    def __init__(self) -> None:
        self.looks = 0

    def poll(self) -> bool:
        self.looks += 1
        return False

    def prepare_sleep(self) -> bool:
        return self.armed


def test_a_poller_is_looked_at_until_it_is_removed(drive: EventLoop, transport: Timed) -> None:
    poller, waiter = Looked(), waiting()
    drive.add(poller)
    transport.execute(lambda: None, lambda: None, lambda: drive.remove(poller), lambda: waiter.count(None))
    drive.until_done(waiter, in_a_while())
    drive.remove(poller)
    assert poller.looks == 3  # the last one is the round in which it was removed


def test_it_does_not_sleep_when_a_poller_has_news(drive: EventLoop, sleep: CountedSleep) -> None:
    poller = Looked()
    drive.add(poller)
    poller.armed = False
    drive._sleep(5.0, 0.0)
    assert sleep.asked == []
    poller.armed = True
    drive._sleep(5.0, 0.0)
    assert len(sleep.asked) == 1


def test_it_looks_again_without_sleeping_while_a_poller_spins(
    sleep: CountedSleep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nexar.links.event_loop._SLOW_YIELD", LONG)  # others may need this core, and it would sleep
    drive, poller, waiter = EventLoop(sleep, [], 30.0), Looked(), waiting()
    poller.spins = True
    drive.add(poller)
    drive.run_soon(lambda: None)
    poller.poll = lambda: waiter.count(None) if poller.looks > 9 else Looked.poll(poller)  # type: ignore[assignment, method-assign, return-value]
    drive.until_done(waiter, in_a_while())
    assert sleep.asked == []


def test_tasks_run_in_their_order_and_before_it_sleeps(drive: EventLoop, sleep: CountedSleep) -> None:
    waiter, ran = waiting(), []
    drive.run_soon(lambda: ran.append("first"))
    drive.run_soon(lambda: drive.run_soon(lambda: waiter.count(None)))
    drive._sleep(5.0, 0.0)
    drive.until_done(waiter, in_a_while())
    assert ran == ["first"]
    assert sleep.asked == []


def test_in_the_background_tasks_run_too(drive: EventLoop) -> None:
    followers: list[Waiter] = []
    drive.run_soon(lambda: followers.append(Waiter()))
    drive.until_thread_waits(followers)
    assert followers


def test_a_task_ends_the_sleep_of_who_leads() -> None:
    sleep = Sleep()
    drive, waiter = EventLoop(sleep, [ScriptedTransport(sleep)], 0.0), waiting()
    thread = threading.Thread(target=drive.until_done, args=(waiter, in_a_while()), daemon=True)
    thread.start()
    assert sleep.begun.wait(10)
    drive.run_soon(lambda: waiter.count(None))
    thread.join(0.4)  # less than LONGEST_WAIT, after which it would look anyway
    assert not thread.is_alive()


def test_a_task_that_raises_is_our_bug(drive: EventLoop) -> None:
    drive.run_soon(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(TaskRaised, match="ZeroDivisionError"):
        drive.until_done(waiting(), in_a_while())


# -- the end ---------------------------------------------------------------------------------------------------------


def test_every_transport_is_closed_whatever_another_one_raises(sleep: CountedSleep) -> None:
    transports = [Timed(sleep) for _ in range(3)]
    transports[1].on_close = lambda: pytest.fail("it does not close")
    drive = EventLoop(sleep, transports, 0.0)
    with pytest.raises(pytest.fail.Exception, match="it does not close"):
        drive.close()
    assert [each.closed for each in transports] == [True, False, True]
