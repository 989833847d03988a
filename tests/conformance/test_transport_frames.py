"""Frames: whole, copied when sent, in order per (lane, communicator), low lanes first."""

import random

import pytest

from nexar.wire.frame import MAX_BODY_BYTES, Frame, FrameKind, Lane, encode
from tests.conformance.harness import Pair, pattern, wait_for


def test_frames_arrive_whole_and_in_order_per_lane_and_communicator(pair: Pair) -> None:
    chance = random.Random(3)
    sent: dict[tuple[int, int], list[tuple[int, bytes]]] = {}
    for tag in range(600):
        lane, communicator = chance.choice(list(Lane)), chance.randrange(3)
        body = pattern(chance.choice([0, 1, 8, 100, 5000]), tag + 1)
        pair.left.send(body, tag=tag, lane=lane, communicator=communicator)
        sent.setdefault((lane, communicator), []).append((tag, body))
    pair.until(lambda: len(pair.right.received.frames) == 600, "600 frames")
    received: dict[tuple[int, int], list[tuple[int, bytes]]] = {}
    for frame, body in pair.right.received.frames:
        received.setdefault((frame.lane, frame.communicator), []).append((frame.tag, body))
    assert received == sent


def test_both_sides_send_at_the_same_time(pair: Pair) -> None:
    for tag in range(200):
        pair.left.send(b"to the right", tag=tag)
        pair.right.send(b"to the left", tag=tag)
    pair.until(lambda: len(pair.left.received.frames) == len(pair.right.received.frames) == 200, "200 frames each way")
    assert pair.left.received.tags == pair.right.received.tags == list(range(200))


@pytest.mark.parametrize("size", [0, 1, 65_537, MAX_BODY_BYTES])
def test_a_body_of_any_permitted_size_arrives(pair: Pair, size: int) -> None:
    pair.left.send(pattern(size))
    pair.until(lambda: pair.right.received.frames, f"a frame of {size} bytes")
    assert pair.right.received.frames[0][1] == pattern(size)


def test_every_field_of_the_header_arrives(pair: Pair) -> None:
    values = {name: index + 1 for index, name in enumerate(Frame.__struct_fields__)}
    frame = Frame(**{**values, "version": 1, "kind": FrameKind.ENVELOPE, "lane": Lane.DATA, "dimensions": 1, "body": 8})
    pair.left.carrier.send_frame(Lane.DATA, frame.communicator, encode(frame), b"12345678")
    pair.until(lambda: pair.right.received.frames, "a frame")
    assert pair.right.received.frames == [(frame, b"12345678")]


def test_the_pieces_of_a_body_are_joined(pair: Pair) -> None:
    header = encode(Frame(kind=FrameKind.CONTROL, body=9))
    pair.left.carrier.send_frame(Lane.CONTROL, 0, header, b"abc", bytearray(b"def"), memoryview(b"xghix")[1:4])
    pair.until(lambda: pair.right.received.frames, "a frame")
    assert pair.right.received.frames[0][1] == b"abcdefghi"


def test_a_frame_is_copied_when_it_is_sent(pair: Pair) -> None:
    body = bytearray(pattern(20_000))
    header = encode(Frame(kind=FrameKind.CONTROL, body=len(body)))
    for _ in range(100):
        pair.left.carrier.send_frame(Lane.DATA, 0, header, body)
    body[:] = bytes(len(body))
    pair.until(lambda: len(pair.right.received.frames) == 100, "100 frames")
    assert {body for _, body in pair.right.received.frames} == {pattern(20_000)}


def test_a_low_lane_overtakes_a_backlog_of_higher_ones(pair: Pair) -> None:
    for _ in range(400):
        pair.left.send(bytes(65_536), lane=Lane.RELAY)
    for lane in (Lane.DATA, Lane.RPC, Lane.CONTROL):
        pair.left.send(b"first", lane=lane)
    pair.until(lambda: len(pair.right.received.frames) == 403, "403 frames")
    lanes = [frame.lane for frame, _ in pair.right.received.frames]
    for lane in (Lane.DATA, Lane.RPC, Lane.CONTROL):
        assert lanes.index(lane) < 300, f"{lane.name} waited behind the backlog"


def test_frames_overtake_a_payload_that_flows(pair: Pair) -> None:
    size = 64 << 20
    pair.right.carrier.expect_payload(1, memoryview(bytearray(size)))
    pair.left.carrier.send_payload(1, memoryview(bytearray(size)))
    for tag in range(20):
        pair.left.send(b"urgent", tag=tag, lane=Lane.CONTROL)
        pair.left.send(b"small data", tag=100 + tag, lane=Lane.DATA)
        for node in pair.nodes:
            node.poll()
    pair.until(
        lambda: pair.right.received.payloads and len(pair.right.received.frames) == 40, "a payload and 40 frames"
    )
    kinds = [what for what, _ in pair.right.received.received]
    assert kinds.index("payload") == 40


def test_a_frame_of_an_unknown_kind_is_delivered_for_the_link_to_drop(pair: Pair) -> None:
    pair.left.send(b"from the future", kind=200)
    pair.until(lambda: pair.right.received.frames, "a frame")
    assert pair.right.received.frames[0][0].kind == 200
    pair.check_usable()


def test_queued_bytes_count_what_has_not_left_and_return_to_zero(pair: Pair) -> None:
    """More than any transport takes in for a peer that does not poll: QUIC has a window of 32 MiB for each stream."""
    for _ in range(800):
        pair.left.send(bytes(65_536), lane=Lane.BULK)
    assert pair.left.carrier.queued_bytes(Lane.BULK) > 0
    assert pair.left.carrier.queued_bytes(Lane.CONTROL) == 0
    pair.until(lambda: len(pair.right.received.frames) == 800, "800 frames")
    pair.until(lambda: pair.left.carrier.queued_bytes(Lane.BULK) == 0, "an empty queue")


def test_the_counters_report_what_passed(pair: Pair) -> None:
    before = pair.right.carrier.stats()
    for _ in range(10):
        pair.left.send(bytes(1000))
    pair.until(lambda: len(pair.right.received.frames) == 10, "10 frames")
    sent, after = pair.left.carrier.stats(), pair.right.carrier.stats()
    assert sent["frames_sent"] >= 10
    assert sent["bytes_sent"] >= 10_000
    assert after["frames_received"] - before["frames_received"] == 10
    assert after["bytes_received"] - before["bytes_received"] >= 10_000


def test_a_sink_may_send(pair: Pair) -> None:
    pair.right.received.on_frame = lambda _carrier, frame: pair.right.send(b"echo", tag=frame.tag)
    for tag in range(50):
        pair.left.send(b"call", tag=tag)
    pair.until(lambda: len(pair.left.received.frames) == 50, "50 echoes")
    assert pair.left.received.tags == list(range(50))


def test_a_frame_wakes_a_node_that_sleeps(pair: Pair) -> None:
    pair.right.received.on_frame = lambda _carrier, frame: pair.right.send(tag=frame.tag)
    with pair.driving():
        for tag in range(100):
            pair.left.send(tag=tag)
            wait_for(lambda: len(pair.left.received.frames) == tag + 1, f"echo {tag}")  # noqa: B023
