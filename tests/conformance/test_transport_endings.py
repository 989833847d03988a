"""How a carrier ends: politely on both sides, or once and for all."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import ref

import pytest

from nexar.transport.base import Carrier, CarrierLost, Redirected
from nexar.wire.frame import Frame, FrameKind, Lane, encode
from tests.conformance.conftest import MakeNode
from tests.conformance.harness import Pair, Recorder, Side, dial, pattern, pump, wait_for
from tests.conformance.transports import LEFT, RIGHT, Case


def test_a_half_close_comes_after_everything_sent_before_it(pair: Pair) -> None:
    into = bytearray(3_000_000)
    pair.right.carrier.expect_payload(1, memoryview(into))
    for tag in range(50):
        pair.left.send(pattern(10_000), tag=tag)
    pair.left.carrier.send_payload(1, memoryview(pattern(len(into))))
    pair.left.carrier.finish()
    pair.until(lambda: pair.right.received.finished, "the half-close")
    assert pair.right.received.tags == list(range(50))
    assert pair.right.received.payloads == [1]
    assert into == pattern(len(into))
    assert pair.right.received.received[-1][0] == "finished"


LOCAL = ("shm", "memory")


class Owner(Recorder):
    """A sink that holds its carrier, as every sink outside of tests does."""

    def __init__(self, carrier: Carrier) -> None:
        super().__init__()
        self.carrier = carrier


@contextmanager
def without_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("politely", [False, True])
def test_an_ended_carrier_and_its_sink_are_freed_without_the_collector(
    make_node: MakeNode, case: Case, politely: bool
) -> None:
    """Unauthenticated peers can make many carriers: those that have ended must not wait for the collector."""
    if case.name in LOCAL:
        pytest.skip(f"{case.name} has no carriers of strangers")
    left, right = make_node(LEFT), make_node(RIGHT)
    with without_collector():
        sinks = [Owner(carrier) for carrier in dial(left, right)]
        for sink in sinks:
            sink.carrier.attach(sink)
        sinks[0].carrier.send_frame(Lane.CONTROL, 0, encode(Frame(kind=FrameKind.CONTROL)))
        pump([left, right], lambda: sinks[1].frames, "a frame")
        if politely:
            for sink in sinks:
                sink.carrier.finish()
            pump([left, right], lambda: all(sink.finished for sink in sinks), "both half-closes")
        else:
            sinks[0].carrier.abort("it is over")
            pump([left, right], lambda: sinks[1].lost, "the loss")
        kept = [ref(thing) for sink in sinks for thing in (sink, sink.carrier)]
        right.accepted.clear()
        sinks.clear()
        del sink
        pump([left, right], lambda: not any(each() for each in kept), "all of it is freed")


def test_the_other_direction_goes_on_after_a_half_close(pair: Pair) -> None:
    pair.left.carrier.finish()
    pair.until(lambda: pair.right.received.finished, "the half-close")
    pair.check_way(pair.right, pair.left)
    with pytest.raises(CarrierLost) as lost:
        pair.left.send(b"after the end")
    assert lost.value.kind == "closed"


def test_a_carrier_that_both_sides_finished_ends_without_a_loss(pair: Pair) -> None:
    pair.left.carrier.finish()
    pair.right.carrier.finish()
    pair.left.carrier.finish()
    pair.until(lambda: pair.left.received.finished and pair.right.received.finished, "both half-closes")
    pair.until(lambda: _ended(pair.left) and _ended(pair.right), "the end")
    pair.quieten()
    for side in (pair.left, pair.right):
        assert side.received.finished == 1
        assert side.received.lost == []
        ends = {(lost.kind, lost.reason) for lost in _refusals(side.carrier)}
        assert ends == {("closed", "both sides have finished")}
        side.carrier.abort("nothing left to abort")
        assert {(lost.kind, lost.reason) for lost in _refusals(side.carrier)} == ends
    assert not pair.left.received.lost + pair.right.received.lost


def test_a_sink_may_finish_when_its_peer_has(pair: Pair) -> None:
    pair.right.received.on_frame = lambda carrier, _frame: carrier.finish()
    pair.left.send(b"last words")
    pair.left.carrier.finish()
    pair.until(lambda: pair.left.received.finished and pair.right.received.finished, "both half-closes")
    assert not pair.left.received.lost + pair.right.received.lost


def test_both_sides_finishing_frees_what_the_carrier_held(make_node: MakeNode) -> None:
    left, right = make_node(LEFT), make_node(RIGHT)
    _finish_politely(left, right, dial(left, right))  # whatever is opened once per node is open now
    for node in (left, right):
        while not node.rest(0.001):  # what it sleeps on is opened when it sleeps first
            node.poll()
    before = _open_descriptors()
    for _ in range(10):
        _finish_politely(left, right, dial(left, right))
    # A QUIC endpoint keeps an eventfd for each thread that slept beside another: here the dialing one, once per node.
    most = before + 2
    pump([left, right], lambda: _open_descriptors() <= most, f"at most {most} open descriptors")


def test_an_abort_is_a_loss_to_the_peer_and_silence_to_oneself(pair: Pair) -> None:
    pair.left.carrier.abort("had enough")
    pair.left.received.silenced = True
    pair.left.carrier.abort("again")
    pair.until(lambda: pair.right.received.lost, "the loss")
    pair.quieten()
    assert [error.kind for error in pair.right.received.lost] == ["peer"]
    assert pair.left.received.received == []


def test_every_verb_reports_who_aborted_and_why(pair: Pair) -> None:
    pair.left.carrier.abort("had enough")
    assert {(lost.kind, lost.reason) for lost in _refusals(pair.left.carrier)} == {("closed", "had enough")}


def test_every_verb_raises_the_loss_that_was_reported_to_the_sink(pair: Pair) -> None:
    pair.left.carrier.abort("had enough")
    pair.until(lambda: pair.right.received.lost, "the loss")
    reported = pair.right.received.lost[0]
    assert {(lost.kind, lost.reason) for lost in _refusals(pair.right.carrier)} == {(reported.kind, reported.reason)}
    pair.right.carrier.abort("does nothing now")
    assert {(lost.kind, lost.reason) for lost in _refusals(pair.right.carrier)} == {(reported.kind, reported.reason)}


def test_every_verb_of_a_carrier_that_had_finished_reports_its_loss_all_the_same(pair: Pair) -> None:
    pair.right.carrier.finish()
    pair.until(lambda: pair.left.received.finished, "the half-close")
    pair.left.carrier.abort("had enough")
    pair.until(lambda: pair.right.received.lost, "the loss")
    reported = pair.right.received.lost[0]
    assert {(lost.kind, lost.reason) for lost in _refusals(pair.right.carrier)} == {(reported.kind, reported.reason)}


def test_a_payload_that_was_taken_back_does_not_stand_in_the_way_of_a_half_close(pair: Pair) -> None:
    into = bytearray(64 << 20)
    pair.right.carrier.expect_payload(1, memoryview(into))
    pair.left.carrier.send_payload(1, memoryview(b"\x01" * len(into)))
    pair.until(lambda: into[0], "the first bytes")
    pair.left.carrier.withdraw_payload(1)
    pair.left.send(b"it was taken back")
    pair.left.carrier.finish()
    pair.until(lambda: pair.right.received.finished or pair.right.received.lost, "the half-close")
    assert pair.right.received.lost == []
    pair.right.carrier.finish()
    pair.until(lambda: _ended(pair.left) and _ended(pair.right), "the end")
    pair.quieten()
    assert pair.left.received.lost + pair.right.received.lost == []
    assert pair.right.received.payloads == []
    assert pair.right.received.finished == 1


def test_a_payload_that_was_taken_back_before_a_half_close_can_still_be_given_up(pair: Pair) -> None:
    into = bytearray(64 << 20)
    pair.right.carrier.expect_payload(1, memoryview(into))
    pair.left.carrier.send_payload(1, memoryview(b"\x01" * len(into)))
    pair.until(lambda: into[0], "the first bytes")
    pair.left.carrier.withdraw_payload(1)
    pair.left.carrier.finish()
    pair.until(lambda: pair.right.received.finished or pair.right.received.lost, "the half-close")
    assert pair.right.carrier.redirect_payload(1, None) is Redirected.MOVED
    into[:] = bytes(len(into))
    pair.check_way(pair.right, pair.left)
    assert not any(into)


def test_a_loss_in_mid_payload_frees_the_memory_of_both_sides(pair: Pair) -> None:
    data, into = bytearray(pattern(64 << 20)), bytearray(64 << 20)
    pair.right.carrier.expect_payload(1, memoryview(into))
    pair.left.carrier.send_payload(1, memoryview(data))
    pair.until(lambda: into[0], "the first bytes")
    pair.left.carrier.abort("in the middle")
    data[:] = bytes(len(data))
    pair.until(lambda: pair.right.received.lost, "the loss")
    into[:] = b"\xaa" * len(into)
    pair.quieten()
    assert into == b"\xaa" * len(into)
    assert pair.right.received.payloads == []


def test_a_sink_that_aborts_receives_nothing_more(pair: Pair) -> None:
    def abort(carrier: Carrier, frame: Frame) -> None:
        carrier.abort("from inside")

    pair.right.received.on_frame = abort
    for tag in range(100):
        pair.left.send(b"more", tag=tag)
    pair.until(lambda: pair.left.received.lost, "the loss")
    pair.quieten()
    assert [what for what, _ in pair.right.received.received] == ["frame"]


@pytest.mark.parametrize("attempt", range(5))
def test_no_sink_is_called_after_abort_returned_to_another_thread(pair: Pair, attempt: int) -> None:
    with pair.driving():
        for tag in range(2000):
            pair.left.send(b"flood", tag=tag)
        wait_for(lambda: len(pair.right.received.frames) > 20 * attempt, "the flood")
        pair.right.carrier.abort("enough")
        pair.right.received.silenced = True  # from here on every call is written down as a fault
        wait_for(lambda: pair.left.received.lost, "the loss at the other side")


def _refusals(carrier: Carrier) -> list[CarrierLost]:
    """What each verb raises, of a carrier that has ended."""
    return [_refusal(verb) for verb in _verbs(carrier) for _ in range(2)]


def _refusal(verb: Callable[[], object]) -> CarrierLost:
    with pytest.raises(CarrierLost) as lost:
        verb()
    return lost.value


def _verbs(carrier: Carrier) -> list[Callable[[], object]]:
    header = encode(Frame(kind=FrameKind.CONTROL))
    return [
        lambda: carrier.send_frame(Lane.CONTROL, 0, header),
        lambda: carrier.send_frame(Lane.DATA, 0, header),
        lambda: carrier.send_frame(Lane.DATA, 77, header),
        lambda: carrier.queued_bytes(Lane.CONTROL),
        lambda: carrier.queued_bytes(Lane.DATA),
        lambda: carrier.send_payload(1, memoryview(b"data")),
        lambda: carrier.withdraw_payload(1),
        lambda: carrier.expect_payload(1, memoryview(bytearray(4))),
        lambda: carrier.redirect_payload(1, memoryview(bytearray(4))),
        lambda: carrier.redirect_payload(1, None),
        carrier.finish,
    ]


def _ended(side: Side) -> bool:
    try:
        side.carrier.queued_bytes(Lane.DATA)
    except CarrierLost:
        return True
    return False


def _finish_politely(left: object, right: object, ends: tuple[Carrier, Carrier]) -> None:
    pair = Pair(Side(left, ends[0]), Side(right, ends[1]))  # type: ignore[arg-type]
    for side in (pair.left, pair.right):
        side.carrier.attach(side.received)
        side.carrier.finish()
    pair.until(lambda: pair.left.received.finished and pair.right.received.finished, "both half-closes")


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
