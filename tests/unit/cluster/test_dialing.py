"""Schemes side by side, with transports that follow a script."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest

from nexar.cluster.control_loop import CancelToken, DialCancelled
from nexar.cluster.dialing import MAX_DIAL_THREADS, Dialer
from nexar.cluster.task_pool import Priority
from nexar.transport.base import Carrier, ConnectRefused, Expected, Transport
from tests.ranks import EVENT_TIMEOUT
from tests.unit.cluster.fake_carrier import FakeCarrier, as_carrier

WHERE = {"quick": ("q:1", "q:2"), "slow": ("s:1",)}
WHOM = Expected(7)
A_MOMENT = 0.02
LONG = 600.0


class ScriptedDialer:
    """A transport whose dials end as a test says."""

    def __init__(self, answer: Callable[[], FakeCarrier] | None = None) -> None:
        self.dialed: list[str] = []
        self.begun = threading.Event()
        self.go = threading.Event()
        self._answer = answer
        if answer is not None:
            self.go.set()

    def hangs_then(self, answer: Callable[[], FakeCarrier]) -> "ScriptedDialer":
        self._answer = answer
        return self

    def connect(self, address: str, expected: Expected, deadline: float) -> Carrier:
        assert expected is WHOM
        self.dialed.append(address)
        self.begun.set()
        if not self.go.wait(max(0.0, min(deadline - time.monotonic(), EVENT_TIMEOUT))):
            raise TimeoutError("nothing came back")
        assert self._answer is not None
        return as_carrier(self._answer())


def refuse(reason: str, *, verification: bool = False) -> Callable[[], FakeCarrier]:
    def raising() -> FakeCarrier:
        raise ConnectRefused("there", reason, verification=verification)

    return raising


class Scene:
    def __init__(self) -> None:
        self.cancel_token = CancelToken()
        self._dialers: list[tuple[Dialer, tuple[ScriptedDialer, ...]]] = []

    def dialer(self, quick: ScriptedDialer, slow: ScriptedDialer, stagger: float = LONG) -> Dialer:
        transports = cast(dict[str, Transport], {"quick": quick, "slow": slow})
        self._dialers.append((Dialer(transports, self.cancel_token, stagger), (quick, slow)))
        return self._dialers[-1][0]

    def close(self) -> None:
        for dialer, transports in self._dialers:
            for transport in transports:  # as transports do when they are closed
                if not transport.go.is_set():
                    transport.hangs_then(refuse("this side is closed")).go.set()
            dialer.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.close()


def soon(seconds: float = EVENT_TIMEOUT) -> float:
    return time.monotonic() + seconds


def test_the_preferred_scheme_wins_and_the_next_is_not_even_tried(scene: Scene) -> None:
    carrier, slow = FakeCarrier(), ScriptedDialer(FakeCarrier)
    quick = ScriptedDialer(lambda: carrier)
    assert scene.dialer(quick, slow).dial(WHERE, WHOM, soon()) is as_carrier(carrier)
    assert (quick.dialed, slow.dialed) == (["q:1,q:2"], [])
    assert carrier.aborted is None


def test_the_order_of_the_addresses_is_the_preference(scene: Scene) -> None:
    quick, slow = ScriptedDialer(FakeCarrier), ScriptedDialer(FakeCarrier)
    scene.dialer(quick, slow).dial({"slow": ("s:1",), "quick": ("q:1",)}, WHOM, soon())
    assert (quick.dialed, slow.dialed) == ([], ["s:1"])


def test_when_one_refuses_the_next_is_tried_at_once(scene: Scene) -> None:
    carrier = FakeCarrier()
    dialer = scene.dialer(ScriptedDialer(refuse("no")), ScriptedDialer(lambda: carrier), stagger=LONG)
    assert dialer.dial(WHERE, WHOM, soon()) is as_carrier(carrier)


def test_while_the_preferred_one_hangs_the_next_wins_and_the_late_winner_is_aborted(scene: Scene) -> None:
    winner, late, ended = FakeCarrier(), FakeCarrier(), threading.Event()
    late.abort = lambda _: ended.set()  # type: ignore[method-assign]
    hanging = ScriptedDialer().hangs_then(lambda: late)
    dialer = scene.dialer(hanging, ScriptedDialer(lambda: winner), stagger=A_MOMENT)
    assert dialer.dial(WHERE, WHOM, soon()) is as_carrier(winner)
    hanging.go.set()
    assert ended.wait(EVENT_TIMEOUT)
    assert winner.aborted is None


def test_the_preferred_one_may_still_win_after_the_next_has_begun(scene: Scene) -> None:
    winner = FakeCarrier()
    quick, slow = ScriptedDialer().hangs_then(lambda: winner), ScriptedDialer()
    dialer = scene.dialer(quick, slow, stagger=A_MOMENT)
    with ThreadPoolExecutor(1) as pool:
        dialing = pool.submit(dialer.dial, WHERE, WHOM, soon())
        assert slow.begun.wait(EVENT_TIMEOUT)
        quick.go.set()
        assert dialing.result(EVENT_TIMEOUT) is as_carrier(winner)


def test_when_all_refuse_every_reason_is_reported(scene: Scene) -> None:
    dialer = scene.dialer(ScriptedDialer(refuse("a firewall")), ScriptedDialer(refuse("nobody listens")))
    with pytest.raises(ConnectRefused) as raised:
        dialer.dial(WHERE, WHOM, soon())
    assert raised.value.reason == "quick: a firewall; slow: nobody listens"
    assert not raised.value.verification


def test_a_certificate_that_was_refused_by_one_is_not_forgotten_over_the_other(scene: Scene) -> None:
    dialer = scene.dialer(ScriptedDialer(refuse("who?", verification=True)), ScriptedDialer(refuse("nobody listens")))
    with pytest.raises(ConnectRefused) as raised:
        dialer.dial(WHERE, WHOM, soon())
    assert raised.value.verification


def test_who_hangs_is_named_beside_who_refused(scene: Scene) -> None:
    dialer = scene.dialer(ScriptedDialer(), ScriptedDialer(refuse("nobody listens")), stagger=0.001)
    with pytest.raises(ConnectRefused) as raised:
        dialer.dial(WHERE, WHOM, soon(A_MOMENT))
    assert "slow: nobody listens" in raised.value.reason
    assert raised.value.reason.startswith("quick: no")


def test_when_all_hang_it_is_a_timeout_that_names_them(scene: Scene) -> None:
    dialer = scene.dialer(ScriptedDialer(), ScriptedDialer(), stagger=0.001)
    with pytest.raises(TimeoutError, match=r"quick: .*; slow: "):
        dialer.dial(WHERE, WHOM, soon(A_MOMENT))


def test_what_is_our_own_fault_comes_out_as_it_is(scene: Scene) -> None:
    def fault() -> FakeCarrier:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        scene.dialer(ScriptedDialer(fault), ScriptedDialer(refuse("no"))).dial(WHERE, WHOM, soon())


@pytest.mark.parametrize("addresses", [{}, {"quick": ()}, {"carrier pigeon": ("north",)}])
def test_without_a_scheme_in_common_both_sides_are_named(scene: Scene, addresses: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(ConnectRefused, match="this node has quick, slow"):
        scene.dialer(ScriptedDialer(), ScriptedDialer()).dial(addresses, WHOM, soon())


def test_a_cancellation_ends_a_dial_that_hangs_and_what_it_still_brings_is_aborted(scene: Scene) -> None:
    late, ended = FakeCarrier(), threading.Event()
    late.abort = lambda _: ended.set()  # type: ignore[method-assign]
    hanging = ScriptedDialer().hangs_then(lambda: late)
    dialer = scene.dialer(hanging, ScriptedDialer())
    with ThreadPoolExecutor(1) as pool:
        dialing = pool.submit(dialer.dial, WHERE, WHOM, soon())
        assert hanging.begun.wait(EVENT_TIMEOUT)
        scene.cancel_token.cancel()
        with pytest.raises(DialCancelled):
            dialing.result(EVENT_TIMEOUT)
    hanging.go.set()
    assert ended.wait(EVENT_TIMEOUT)


def test_one_dial_can_be_recalled_and_the_others_go_on(scene: Scene) -> None:
    hanging, cancel_token = ScriptedDialer().hangs_then(FakeCarrier), CancelToken()
    dialer = scene.dialer(hanging, ScriptedDialer())
    with ThreadPoolExecutor(1) as pool:
        dialing = pool.submit(dialer.dial, WHERE, WHOM, soon(), cancel_token)
        assert hanging.begun.wait(EVENT_TIMEOUT)
        cancel_token.cancel()
        with pytest.raises(DialCancelled):
            dialing.result(EVENT_TIMEOUT)
    hanging.go.set()
    assert dialer.dial(WHERE, WHOM, soon()) is not None


def test_after_a_cancellation_nobody_gets_through(scene: Scene) -> None:
    scene.cancel_token.cancel()
    with pytest.raises(DialCancelled):
        scene.dialer(ScriptedDialer(), ScriptedDialer()).dial(WHERE, WHOM, soon())


def test_a_task_may_dial_while_all_threads_of_the_pool_do(scene: Scene) -> None:
    """The attempts that tasks wait for need no thread of the pool."""
    dialer = scene.dialer(ScriptedDialer(FakeCarrier), ScriptedDialer(FakeCarrier))
    together, done = threading.Barrier(MAX_DIAL_THREADS), threading.Semaphore(0)

    def task() -> None:
        together.wait(EVENT_TIMEOUT)
        dialer.dial(WHERE, WHOM, soon())
        done.release()

    for _ in range(MAX_DIAL_THREADS):
        dialer.run_in_thread(task, Priority.CONTROL)
    assert all(done.acquire(timeout=EVENT_TIMEOUT) for _ in range(MAX_DIAL_THREADS))


def test_closing_waits_for_the_threads(scene: Scene) -> None:
    hanging = ScriptedDialer().hangs_then(refuse("this side is closed"))
    dialer = scene.dialer(hanging, ScriptedDialer(FakeCarrier), stagger=0.001)
    dialer.dial(WHERE, WHOM, soon())
    threading.Timer(A_MOMENT, hanging.go.set).start()
    dialer.close()
    assert not dialer._threads
