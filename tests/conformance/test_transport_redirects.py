"""Redirecting a payload: moved, landed or unknown, and never anything after the end."""

import threading

import pytest

from nexar.transport.base import Carrier, CarrierLost, Redirected
from tests.conformance.harness import Pair, pattern, wait_for

MIB = 1 << 20


@pytest.mark.parametrize("size", [0, 1, 5 * MIB])
def test_a_payload_that_was_discarded_is_unknown_from_then_on(pair: Pair, size: int) -> None:
    carrier, into, other = pair.right.carrier, bytearray(size), bytearray(size)
    carrier.expect_payload(1, memoryview(into))
    assert carrier.redirect_payload(1, None) is Redirected.MOVED
    assert carrier.redirect_payload(1, memoryview(other)) is Redirected.UNKNOWN
    pair.left.carrier.send_payload(1, memoryview(pattern(size)))
    pair.check_usable()
    pair.quieten()
    assert carrier.redirect_payload(1, memoryview(other)) is Redirected.UNKNOWN
    assert carrier.redirect_payload(1, None) is Redirected.UNKNOWN
    assert 1 not in pair.right.received.payloads
    assert not any(into)
    assert not any(other)


def test_a_payload_discarded_half_way_is_never_taken_up_again(pair: Pair) -> None:
    carrier, into, other = pair.right.carrier, bytearray(64 * MIB), bytearray(64 * MIB)
    carrier.expect_payload(1, memoryview(into))
    pair.left.carrier.send_payload(1, memoryview(pattern(len(into))))
    pair.until(lambda: into[0], "the first bytes")
    assert carrier.redirect_payload(1, None) is Redirected.MOVED
    assert carrier.redirect_payload(1, memoryview(other)) is Redirected.UNKNOWN
    into[:] = bytes(len(into))
    pair.check_usable()
    pair.quieten()
    assert 1 not in pair.right.received.payloads
    assert not any(into)
    assert not any(other)


def test_a_payload_that_is_withdrawn_and_discarded_is_unknown(pair: Pair) -> None:
    carrier = pair.right.carrier
    carrier.expect_payload(1, memoryview(bytearray(64 * MIB)))
    pair.left.carrier.send_payload(1, memoryview(bytearray(64 * MIB)))
    pair.left.carrier.withdraw_payload(1)
    pair.check_usable()
    assert carrier.redirect_payload(1, None) is Redirected.MOVED
    assert carrier.redirect_payload(1, memoryview(bytearray(64 * MIB))) is Redirected.UNKNOWN


@pytest.mark.parametrize("size", [0, 1, 3 * MIB])
def test_a_payload_that_landed_stays_where_it_is(pair: Pair, size: int) -> None:
    into, other = bytearray(size), bytearray(size)
    answers: list[Redirected] = []
    pair.right.received.on_payload = lambda carrier, transfer: answers.extend(
        [carrier.redirect_payload(transfer, memoryview(other)), carrier.redirect_payload(transfer, None)]
    )
    pair.right.carrier.expect_payload(1, memoryview(into))
    pair.left.carrier.send_payload(1, memoryview(pattern(size)))
    pair.until(lambda: pair.right.received.payloads, "a payload")
    answers.append(pair.right.carrier.redirect_payload(1, memoryview(other)))
    assert answers == [Redirected.COMPLETE] * 3
    assert into == pattern(size)
    assert not any(other)


def test_a_number_that_is_expected_again_is_a_new_payload(pair: Pair) -> None:
    carrier, into = pair.right.carrier, bytearray(10)
    for _ in range(2):
        carrier.expect_payload(1, memoryview(bytearray(10)))
        assert carrier.redirect_payload(1, memoryview(into)) is Redirected.MOVED
        pair.left.carrier.send_payload(1, memoryview(pattern(10)))
        pair.until(lambda: pair.right.received.payloads, "a payload")
        assert carrier.redirect_payload(1, None) is Redirected.COMPLETE
        pair.right.received.payloads.clear()
    assert into == pattern(10)


def test_nothing_is_moved_and_nothing_has_landed_once_the_carrier_is_lost(pair: Pair) -> None:
    carrier, into, other = pair.right.carrier, bytearray(64 * MIB), bytearray(64 * MIB)
    for transfer, memory in ((1, bytearray(3)), (2, into), (3, bytearray(3))):
        carrier.expect_payload(transfer, memoryview(memory))
    carrier.redirect_payload(3, None)
    pair.left.carrier.send_payload(1, memoryview(b"abc"))
    pair.until(lambda: pair.right.received.payloads, "a small payload")
    pair.left.carrier.send_payload(2, memoryview(pattern(len(into))))
    pair.until(lambda: into[0], "the first bytes")
    pair.left.carrier.abort("in the middle")
    pair.until(lambda: pair.right.received.lost, "the loss")
    for transfer in (1, 2, 3, 404):
        for place in (None, memoryview(other)):
            with pytest.raises(CarrierLost):
                carrier.redirect_payload(transfer, place)
    assert not any(other)


@pytest.mark.parametrize("ends", ["abort", "loss"])
@pytest.mark.parametrize("attempt", range(3))
def test_a_redirect_that_meets_the_end_moves_the_payload_or_raises(pair: Pair, ends: str, attempt: int) -> None:
    """Whatever happens first, no half payload passes for a whole one, and after the first refusal there is no other
    answer."""
    size = 8 * MIB
    places = [bytearray(size) for _ in range(2)]
    answers: list[Redirected | CarrierLost] = []
    begun = threading.Event()

    def redirect() -> None:
        for turn in range(100_000):
            answers.append(_redirect(pair.right.carrier, memoryview(places[turn % 2])))
            begun.set()
            if isinstance(answers[-1], CarrierLost) and len(answers) > 3 and isinstance(answers[-3], CarrierLost):
                return

    pair.right.carrier.expect_payload(1, memoryview(bytearray(size)))  # its sender takes it back half-way
    pair.left.carrier.send_payload(1, memoryview(pattern(size)))
    pair.left.carrier.withdraw_payload(1)
    thread = threading.Thread(target=redirect)
    with pair.driving():
        thread.start()
        begun.wait()
        (pair.right if ends == "abort" else pair.left).carrier.abort("in the middle")
        if ends == "loss":
            wait_for(lambda: pair.right.received.lost, "the loss")
        thread.join()
    landed = 1 in pair.right.received.payloads  # a fast carrier may have had all of it before it was taken back
    refused = next(index for index, answer in enumerate(answers) if isinstance(answer, CarrierLost))
    allowed = {Redirected.MOVED, Redirected.COMPLETE} if landed else {Redirected.MOVED}
    assert set(answers[:refused]) <= allowed
    assert all(isinstance(answer, CarrierLost) for answer in answers[refused:])


def _redirect(carrier: Carrier, into: memoryview) -> Redirected | CarrierLost:
    try:
        return carrier.redirect_payload(1, into)
    except CarrierLost as lost:
        return lost
