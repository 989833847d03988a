import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from nexar.errors import InternalError
from nexar.transport import sleeper as sleep_module
from nexar.transport.sleeper import PollSleeper

LONG = 20.0
"""A sleep of this length that ends at its own time fails the test."""


@pytest.fixture(params=["eventfd", "socketpair"])
def sleeper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[PollSleeper]:
    if request.param == "eventfd" and not hasattr(os, "eventfd"):
        pytest.skip("no eventfd on this system")
    if request.param == "socketpair":
        monkeypatch.setattr(sleep_module, "_make_wakeup", sleep_module._SocketWakeup)
    made = PollSleeper()
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def asleep(sleeper: PollSleeper) -> bool:
    return sleeper._asleep


def while_asleep(sleeper: PollSleeper, act: Callable[[], object]) -> threading.Thread:
    """Run `act` in another thread as soon as this one sleeps."""

    def wait_and_act() -> None:
        while not asleep(sleeper):
            os.sched_yield()
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread


def slept(sleeper: PollSleeper, timeout: float = LONG, spin: float = 0.0) -> float:
    began = time.monotonic()
    sleeper.sleep(timeout, spin)
    return time.monotonic() - began


def test_a_sleep_without_news_lasts_its_timeout(sleeper: PollSleeper) -> None:
    assert slept(sleeper, 0.05) >= 0.05
    assert slept(sleeper, 0.05, spin=0.02) >= 0.045
    assert slept(sleeper, 0.02, spin=1.0) < 1.0


def test_a_timeout_that_is_over_does_not_sleep(sleeper: PollSleeper) -> None:
    assert slept(sleeper, 0.0) < 1.0
    assert slept(sleeper, -3.0) < 1.0


def test_an_endless_sleep_is_ended_by_a_kick(sleeper: PollSleeper) -> None:
    thread = while_asleep(sleeper, sleeper.wake)
    assert slept(sleeper, float("inf")) < LONG
    thread.join()


def test_a_kick_before_the_sleep_ends_it_at_once_and_only_once(sleeper: PollSleeper) -> None:
    sleeper.wake()
    sleeper.wake()
    assert slept(sleeper) < 1.0
    assert slept(sleeper, 0.05) >= 0.05


def test_a_kick_ends_a_spin(sleeper: PollSleeper) -> None:
    thread = while_asleep(sleeper, sleeper.wake)
    assert slept(sleeper, LONG, spin=LONG) < LONG / 2
    thread.join()


def test_a_readable_descriptor_ends_every_sleep_until_it_is_read(
    sleeper: PollSleeper, pair: tuple[socket.socket, socket.socket]
) -> None:
    left, right = pair
    sleeper.watch(left.fileno())
    right.send(b"x")
    assert slept(sleeper) < 1.0
    assert slept(sleeper) < 1.0
    left.recv(1)
    assert slept(sleeper, 0.05) >= 0.05


def test_a_descriptor_becoming_readable_ends_a_sleep_and_a_spin(
    sleeper: PollSleeper, pair: tuple[socket.socket, socket.socket]
) -> None:
    left, right = pair
    sleeper.watch(left.fileno())
    for spin in (0.0, LONG):
        thread = while_asleep(sleeper, lambda: right.send(b"x"))
        assert slept(sleeper, LONG, spin) < LONG / 2
        thread.join()
        left.recv(1)


def test_writability_is_watched_only_when_asked_for(
    sleeper: PollSleeper, pair: tuple[socket.socket, socket.socket]
) -> None:
    left, _ = pair
    sleeper.watch(left.fileno())
    assert slept(sleeper, 0.05) >= 0.05
    sleeper.watch(left.fileno(), writable=True)
    assert slept(sleeper) < 1.0
    sleeper.watch(left.fileno())
    assert slept(sleeper, 0.05) >= 0.05


def test_watching_during_a_sleep_takes_effect_in_the_next_one_at_the_latest(
    sleeper: PollSleeper, pair: tuple[socket.socket, socket.socket]
) -> None:
    left, right = pair
    right.send(b"x")
    thread = while_asleep(sleeper, lambda: sleeper.watch(left.fileno()))
    assert slept(sleeper) < LONG
    thread.join()
    assert slept(sleeper) < 1.0


def test_an_unwatched_descriptor_is_forgotten(sleeper: PollSleeper, pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    right.send(b"x")
    sleeper.watch(left.fileno())
    sleeper.unwatch(left.fileno())
    sleeper.unwatch(left.fileno())
    assert slept(sleeper, 0.05) >= 0.05
    sleeper.watch(left.fileno())
    sleeper.watch(left.fileno(), readable=False, writable=False)
    assert slept(sleeper, 0.05) >= 0.05


def test_the_peer_learns_at_once_of_a_socket_that_is_closed_during_a_sleep(sleeper: PollSleeper) -> None:
    """The system lets go of a descriptor only when no sleep holds it any more."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(10.0)
    sleeper.watch(ours.fileno())

    def close() -> None:
        sleeper.unwatch(ours.fileno())
        ours.close()

    thread = while_asleep(sleeper, close)
    sleeper.sleep(100.0, 0.0)
    assert theirs.recv(1) == b""
    thread.join()
    theirs.close()


def test_a_descriptor_closed_while_watched_is_reported_not_spun_on(sleeper: PollSleeper) -> None:
    left, right = socket.socketpair()
    with right:
        descriptor = left.fileno()
        sleeper.watch(descriptor)
        left.close()
        with pytest.raises(InternalError, match=f"descriptor {descriptor} was closed"):
            sleeper.sleep(LONG, 0.0)
        assert slept(sleeper, 0.02) >= 0.02


def interrupt_main() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], object]], None]]:
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda act: signal.signal(signal.SIGUSR1, lambda *_: act())
    signal.signal(signal.SIGUSR1, before)


def test_ctrl_c_ends_a_sleep(sleeper: PollSleeper) -> None:
    thread = while_asleep(sleeper, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        sleeper.sleep(LONG, 0.0)
    thread.join()
    assert slept(sleeper, 0.05) >= 0.05


def test_a_kick_is_kept_when_ctrl_c_ends_its_sleep(
    sleeper: PollSleeper, on_signal: Callable[[Callable[[], object]], None]
) -> None:
    def kick_and_raise() -> None:
        sleeper.wake()
        raise KeyboardInterrupt

    on_signal(kick_and_raise)
    thread = while_asleep(sleeper, interrupt_main)
    with pytest.raises(KeyboardInterrupt):
        sleeper.sleep(LONG, 0.0)
    thread.join()
    assert slept(sleeper) < 1.0


def test_a_signal_handler_that_kicks_ends_the_sleep_it_interrupted(
    sleeper: PollSleeper, on_signal: Callable[[Callable[[], object]], None]
) -> None:
    on_signal(sleeper.wake)
    thread = while_asleep(sleeper, interrupt_main)
    assert slept(sleeper) < LONG
    thread.join()


def test_no_kick_is_lost_in_ten_thousand_hand_overs(sleeper: PollSleeper) -> None:
    """Two threads hand a number back and forth; each hand-over is announced by a kick alone."""
    other = PollSleeper()
    rounds = 10_000
    place = [0, 0]

    def answer() -> None:
        for number in range(1, rounds + 1):
            while place[0] < number:
                other.sleep(LONG, 0.0)
            place[1] = number
            sleeper.wake()

    thread = threading.Thread(target=answer)
    thread.start()
    longest = 0.0
    for number in range(1, rounds + 1):
        began = time.monotonic()
        place[0] = number
        other.wake()
        while place[1] < number:
            sleeper.sleep(LONG, 0.0)
        longest = max(longest, time.monotonic() - began)
    thread.join()
    other.close()
    assert longest < LONG / 2


def test_kicks_from_many_threads_all_count(sleeper: PollSleeper) -> None:
    done = [0] * 4
    rounds = 500

    def work(mine: int) -> None:
        for _ in range(rounds):
            done[mine] += 1
            sleeper.wake()

    threads = [threading.Thread(target=work, args=(mine,)) for mine in range(4)]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    while sum(done) < 4 * rounds:
        sleeper.sleep(LONG, 0.0)
    assert time.monotonic() - began < LONG / 2
    for thread in threads:
        thread.join()


def test_descriptors_come_and_go_while_the_thread_sleeps(sleeper: PollSleeper) -> None:
    """Watch, use, unwatch and close from another thread, reusing numbers: never an error, never a missed byte."""
    rounds = 500
    seen: list[int] = []
    finished = threading.Event()

    def come_and_go() -> None:
        for number in range(rounds):
            left, right = socket.socketpair()
            sleeper.watch(left.fileno())
            right.send(b"x")
            sleeper.unwatch(left.fileno())
            left.close()
            right.close()
            seen.append(number)
        finished.set()
        sleeper.wake()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    while not finished.is_set():
        sleeper.sleep(LONG, 0.0)
    thread.join()
    assert len(seen) == rounds


def test_kicking_a_closed_sleeper_is_harmless(sleeper: PollSleeper) -> None:
    sleeper.close()
    sleeper.close()
    sleeper.wake()


def test_a_kick_without_a_sleeper_makes_no_system_call(sleeper: PollSleeper) -> None:
    rung: list[int] = []
    bell = sleeper._wakeup
    bell.signal = lambda: rung.append(1)  # type: ignore[method-assign]
    sleeper.wake()
    assert rung == []
