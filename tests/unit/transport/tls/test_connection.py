import pytest

from nexar.transport.base import CarrierLost
from nexar.transport.tls.connection import CarrierEnd, SendQueue
from nexar.wire.frame import HEADER_BYTES, FrameKind, Lane, decode

PEER, OURS = CarrierLost("peer", "gone"), CarrierLost("closed", "had enough")


def test_who_notices_first_decides_why() -> None:
    ending = CarrierEnd()
    assert ending.lose(PEER) is PEER
    assert ending.lose(OURS) is PEER


def test_the_sink_is_notified_once() -> None:
    ending = CarrierEnd()
    assert ending.take_report() is None
    ending.lose(PEER)
    assert ending.take_report() is PEER
    assert ending.take_report() is None


def test_a_silent_end_is_never_reported() -> None:
    ending = CarrierEnd()
    assert ending.lose_silently(OURS) is OURS
    assert ending.take_report() is None


def test_an_abort_silences_a_loss_that_was_not_reported_yet() -> None:
    ending = CarrierEnd()
    ending.lose(PEER)
    assert ending.lose_silently(OURS) is PEER
    assert ending.take_report() is None


def test_a_broken_carrier_is_not_lost_before_the_rest_was_taken_in_and_then_for_the_same_reason() -> None:
    ending = CarrierEnd()
    assert ending.break_off(PEER) == (PEER, True)
    assert ending.break_off(OURS) == (PEER, False)
    assert ending.is_broken
    assert ending.lost is None
    assert ending.lose(OURS) is PEER
    assert ending.take_report() is PEER


def test_breaking_after_the_loss_repeats_its_reason() -> None:
    ending = CarrierEnd()
    ending.lose(PEER)
    assert ending.break_off(OURS)[0] is PEER


CHUNK_BYTES = 512 << 10


def drain(outbox: SendQueue, step: int = 1 << 30) -> bytes:
    """Everything that leaves, `step` bytes at a time."""
    left = bytearray()
    while (part := outbox.next()) is not None:
        piece = part[0][:step]
        left += piece
        outbox.taken(len(piece))
    return bytes(left)


def frames(stream: bytes) -> list[tuple[int, int, int]]:
    """(transfer, offset, size) of the chunks in a stream."""
    found, start = [], 0
    while start < len(stream):
        frame = decode(stream, start)
        assert frame.kind == FrameKind.CHUNK
        found.append((frame.transfer, frame.count, frame.body))
        start += HEADER_BYTES + frame.body
    return found


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_the_lowest_lane_leaves_first_and_each_lane_in_order(step: int) -> None:
    outbox = SendQueue(CHUNK_BYTES)
    for lane, frame in (
        (Lane.BULK, b"b1"),
        (Lane.DATA, b"d1"),
        (Lane.BULK, b"b2"),
        (Lane.RPC, b"r1"),
        (Lane.DATA, b"d2"),
    ):
        outbox.push(lane, frame)
    assert drain(outbox, step) == b"r1d1d2b1b2"
    assert outbox.empty


def test_what_has_begun_is_finished_before_a_lower_lane_leaves() -> None:
    outbox = SendQueue(CHUNK_BYTES)
    outbox.push(Lane.BULK, b"bulk")
    assert outbox.next() is not None
    outbox.taken(1)
    outbox.push(Lane.CONTROL, b"control")
    assert drain(outbox) == b"ulkcontrol"


def test_the_rest_of_a_frame_that_was_sent_directly_comes_first() -> None:
    outbox = SendQueue(CHUNK_BYTES)
    outbox.resume(Lane.DATA, memoryview(b"rest"))
    outbox.push(Lane.CONTROL, b"next")
    assert outbox.queued_bytes(Lane.DATA) == 4
    assert drain(outbox) == b"restnext"
    assert outbox.queued_bytes(Lane.DATA) == 0


def test_queued_bytes_count_what_has_not_left() -> None:
    outbox = SendQueue(CHUNK_BYTES)
    outbox.push(Lane.DATA, b"12345")
    outbox.push(Lane.DATA, b"678")
    assert outbox.next() is not None
    outbox.taken(2)
    assert outbox.queued_bytes(Lane.DATA) == 6
    assert outbox.queued_bytes(Lane.BULK) == 0
    drain(outbox)
    assert outbox.queued_bytes(Lane.DATA) == 0


def test_a_payload_leaves_in_chunks_that_tile_it() -> None:
    outbox = SendQueue(CHUNK_BYTES)
    size = 2 * CHUNK_BYTES + 5
    outbox.push_payload(7, memoryview(bytes(size)))
    assert frames(drain(outbox)) == [(7, 0, CHUNK_BYTES), (7, CHUNK_BYTES, CHUNK_BYTES), (7, 2 * CHUNK_BYTES, 5)]


def test_an_empty_payload_is_one_empty_chunk() -> None:
    outbox = SendQueue(CHUNK_BYTES)
    outbox.push_payload(7, memoryview(b""))
    assert frames(drain(outbox)) == [(7, 0, 0)]


def test_payloads_take_turns() -> None:
    outbox = SendQueue(CHUNK_BYTES)
    outbox.push_payload(1, memoryview(bytes(3 * CHUNK_BYTES)))
    outbox.push_payload(2, memoryview(bytes(2 * CHUNK_BYTES)))
    assert [transfer for transfer, _, _ in frames(drain(outbox))] == [1, 2, 1, 2, 1]


def test_a_frame_waits_for_one_chunk_at_most() -> None:
    outbox = SendQueue(CHUNK_BYTES)
    outbox.push_payload(1, memoryview(bytes(3 * CHUNK_BYTES)))
    assert outbox.next() is not None
    outbox.taken(1)
    outbox.push(Lane.BULK, b"frame")
    assert drain(outbox).index(b"frame") == HEADER_BYTES - 1 + CHUNK_BYTES


def test_a_payload_is_sent_once() -> None:
    outbox = SendQueue(CHUNK_BYTES)
    outbox.push_payload(1, memoryview(b"x"))
    with pytest.raises(ValueError, match="payload 1 is being sent already"):
        outbox.push_payload(1, memoryview(b"x"))


def test_a_withdrawn_payload_finishes_its_chunk_from_a_copy() -> None:
    outbox = SendQueue(CHUNK_BYTES)
    memory = bytearray(b"a" * 2 * CHUNK_BYTES)
    outbox.push_payload(1, memoryview(memory))
    assert outbox.next() is not None
    outbox.taken(HEADER_BYTES)
    assert outbox.next() is not None
    outbox.taken(10)
    outbox.withdraw(1)
    memory[:] = b"b" * len(memory)
    memory.clear()  # BufferError if anybody still held it
    assert drain(outbox) == b"a" * (CHUNK_BYTES - 10)


def test_withdrawing_what_has_not_begun_leaves_the_others_alone() -> None:
    outbox = SendQueue(CHUNK_BYTES)
    outbox.push_payload(1, memoryview(b"one"))
    outbox.push_payload(2, memoryview(b"two"))
    outbox.withdraw(1)
    outbox.withdraw(99)
    assert [transfer for transfer, _, _ in frames(drain(outbox))] == [2]


def test_the_closing_message_leaves_last() -> None:
    outbox = SendQueue(CHUNK_BYTES)
    outbox.send_close_notice(b"bye")
    outbox.push_payload(1, memoryview(b""))
    outbox.push(Lane.RELAY, b"frame")
    left = drain(outbox)
    assert left.startswith(b"frame")
    assert left.endswith(b"bye")
    assert outbox.empty


def test_clearing_lets_all_memory_go() -> None:
    outbox = SendQueue(CHUNK_BYTES)
    memory = bytearray(2 * CHUNK_BYTES)
    outbox.push_payload(1, memoryview(memory))
    outbox.next()
    outbox.clear()
    memory.clear()
    assert outbox.empty
