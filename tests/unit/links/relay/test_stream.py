"""What is sent over other nodes arrives once, whole and in order, whatever is lost, doubled or overtaken on the way."""

import random
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from nexar.links.relay.carrier import ACK_BYTES, CHUNK_BYTES, WINDOW_BYTES, ReceiveStream, RelaySegment, SendStream
from nexar.wire.frame import HEADER_BYTES, FrameKind, Lane, decode


def taken(outgoing: SendStream) -> list[RelaySegment]:
    found = []
    while (parcel := outgoing.take()) is not None:
        found.append(parcel)
    return found


def test_numbers_are_given_in_the_order_in_which_frames_leave_and_a_lower_lane_leaves_first() -> None:
    outgoing = SendStream()
    outgoing.put(Lane.DATA, b"data")
    outgoing.put(Lane.CONTROL, b"control")
    outgoing.put(Lane.DATA, b"more")
    assert taken(outgoing) == [(0, b"control"), (1, b"data"), (2, b"more")]
    assert outgoing.queued_bytes(Lane.DATA) == 0


def test_only_a_window_is_under_way_and_acknowledgements_open_it() -> None:
    outgoing = SendStream()
    for _ in range(20):
        outgoing.put(Lane.DATA, bytes(WINDOW_BYTES // 10))
    first = taken(outgoing)
    assert len(first) == 11  # the one that exceeds it may go
    assert outgoing.queued_bytes(Lane.DATA) == 9 * (WINDOW_BYTES // 10)
    assert outgoing.acked(5)
    assert not outgoing.acked(5)
    assert [parcel.sequence for parcel in taken(outgoing)] == [11, 12, 13, 14, 15]


def test_an_acknowledgement_of_what_was_never_sent_says_nothing() -> None:
    outgoing = SendStream()
    outgoing.put(Lane.DATA, b"x")
    taken(outgoing)
    assert not outgoing.acked(7)
    assert outgoing.unacked == 1


def test_what_was_not_acknowledged_is_sent_again_before_anything_new() -> None:
    outgoing = SendStream()
    for name in (b"a", b"b", b"c"):
        outgoing.put(Lane.DATA, name)
    taken(outgoing)
    outgoing.acked(1)
    outgoing.put(Lane.DATA, b"d")
    outgoing.send_again()
    assert taken(outgoing) == [(1, b"b"), (2, b"c"), (3, b"d")]
    outgoing.send_again(below=2)
    assert taken(outgoing) == [(1, b"b")]
    assert outgoing.resent == 3


def test_what_is_acknowledged_meanwhile_is_not_sent_again() -> None:
    outgoing = SendStream()
    for name in (b"a", b"b", b"c"):
        outgoing.put(Lane.DATA, name)
    taken(outgoing)
    outgoing.send_again()
    outgoing.acked(2)
    assert taken(outgoing) == [(2, b"c")]


def test_a_payload_leaves_behind_frames_in_chunks_and_is_free_when_withdrawn() -> None:
    outgoing = SendStream()
    outgoing.lend(7, memoryview(bytes(2 * CHUNK_BYTES + 5)))
    outgoing.put(Lane.DATA, b"frame")
    assert outgoing.take() == (0, b"frame")
    chunks = taken(outgoing)
    headers = [decode(chunk.data, 0) for chunk in chunks]
    assert [(frame.kind, frame.transfer, frame.count) for frame in headers] == [
        (FrameKind.CHUNK, 7, 0),
        (FrameKind.CHUNK, 7, CHUNK_BYTES),
        (FrameKind.CHUNK, 7, 2 * CHUNK_BYTES),
    ]
    assert outgoing.payload_bytes == 2 * CHUNK_BYTES + 5
    outgoing.lend(8, memoryview(bytes(3 * CHUNK_BYTES)))
    outgoing.take()
    outgoing.withdraw(8)
    assert taken(outgoing) == []


def test_an_empty_payload_is_one_chunk_of_nothing() -> None:
    outgoing = SendStream()
    outgoing.lend(1, memoryview(b""))
    (chunk,) = taken(outgoing)
    assert len(chunk.data) == HEADER_BYTES


def test_the_closing_message_leaves_behind_everything_and_once() -> None:
    outgoing = SendStream()
    outgoing.finish()
    outgoing.lend(1, memoryview(b"payload"))
    outgoing.put(Lane.DATA, b"frame")
    before = outgoing.finished, outgoing.has_finished
    kinds = [decode(parcel.data, 0).kind for parcel in taken(outgoing)[1:]]
    assert kinds == [FrameKind.CHUNK, FrameKind.FINISH]
    assert (before, outgoing.has_finished) == ((True, False), True)
    outgoing.finish()
    assert taken(outgoing) == []


def test_what_has_stopped_sends_nothing_and_reads_no_memory() -> None:
    outgoing = SendStream()
    outgoing.put(Lane.DATA, b"frame")
    outgoing.lend(1, memoryview(b"payload"))
    outgoing.take()
    outgoing.send_again()
    outgoing.stop()
    assert taken(outgoing) == []
    assert outgoing.unacked == 0


def test_what_comes_early_is_held_and_what_comes_twice_is_dropped() -> None:
    incoming = ReceiveStream()
    assert incoming.arrived(1, b"b") == []
    assert incoming.arrived(1, b"b") == []
    assert incoming.arrived(0, b"a") == [b"a", b"b"]
    assert incoming.arrived(0, b"a") == []
    assert incoming.duplicates == 2
    assert incoming.owes_ack  # the source does not know that it has arrived
    assert incoming.ack() == 2
    assert not incoming.owes_ack


def test_an_acknowledgement_is_owed_after_a_quarter_of_the_window() -> None:
    incoming = ReceiveStream()
    incoming.arrived(0, bytes(ACK_BYTES - 1))
    assert not incoming.owes_ack
    incoming.arrived(1, b"x")
    assert incoming.owes_ack


def test_what_comes_too_early_is_held_within_a_bound() -> None:
    incoming = ReceiveStream()
    for sequence in range(1, 100):
        incoming.arrived(sequence, bytes(WINDOW_BYTES // 10))
    ready = incoming.arrived(0, b"first")
    assert 20 <= len(ready) <= 22
    assert incoming.expected == len(ready)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60))
def test_everything_arrives_once_and_in_order_over_a_network_that_loses_doubles_and_reorders(
    seed: int, count: int
) -> None:
    chance = random.Random(seed)
    outgoing, incoming = SendStream(), ReceiveStream()
    sent = [bytes([number]) * chance.choice((1, 10, CHUNK_BYTES)) for number in range(count)]
    for data in sent:
        outgoing.put(Lane.DATA, data)
    network: deque[RelaySegment] = deque()
    got: list[bytes] = []
    for _ in range(10_000):
        network.extend(taken(outgoing))
        if not network:
            outgoing.acked(incoming.ack())
            if not outgoing.unacked and not outgoing.queued_bytes(Lane.DATA):
                break
            outgoing.send_again()  # as after a probe
            continue
        if chance.random() < 0.3:
            network.rotate(chance.randrange(len(network)))
        parcel = network.popleft()
        outcome = chance.random()
        if outcome > 0.2:
            got.extend(bytes(each) for each in incoming.arrived(parcel.sequence, parcel.data))
        if outcome > 0.9:
            network.append(parcel)
    assert got == sent
