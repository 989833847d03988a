"""A carrier between two nodes: what the conformance suite cannot see from outside."""

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nexar.native import native_problem
from nexar.transport.base import CarrierLost, ConnectRefused, Expected
from nexar.transport.shm.ring_frames import _head_word, _tail_word
from nexar.wire.frame import HEADER_BYTES, Frame, FrameKind, Lane, encode
from tests.conformance.harness import Pair, pump, wait_for
from tests.unit.transport.shm.stage import LEFT, RIGHT, connected, connected_process, inside, make_node

SMALL_RING = 1 << 14


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def memory_maps() -> int:
    """Of whole segments."""
    return len(mapped_sizes()) - mapped_pages()


def mapped_pages() -> int:
    """Header pages that are mapped once more, to notice the end of a process."""
    return mapped_sizes().count(4096)


def mapped_sizes() -> list[int]:
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:nexar" in line]
    spans = [line.split()[0].split("-") for line in lines]
    return [int(end, 16) - int(begin, 16) for begin, end in spans]


def test_frames_that_found_no_room_leave_by_lane_and_in_order(tmp_path: Path) -> None:
    with connected(tmp_path, SMALL_RING) as pair:
        for tag in range(100):
            pair.left.send(bytes(1000), tag=tag, lane=Lane.BULK)
        for tag in range(100, 110):
            pair.left.send(b"urgent", tag=tag, lane=Lane.CONTROL)
        assert pair.left.carrier.queued_bytes(Lane.BULK) > 80_000
        pair.until(lambda: len(pair.right.received.frames) == 110, "all frames")
        tags = pair.right.received.tags
        assert [tag for tag in tags if tag < 100] == list(range(100))
        assert [tag for tag in tags if tag >= 100] == list(range(100, 110))
        assert tags.index(109) < 30, "what was urgent waited only for what was in the ring already"
        assert pair.left.carrier.queued_bytes(Lane.BULK) == 0


def test_a_frame_larger_than_the_ring_arrives_and_urgent_ones_pass_it(tmp_path: Path) -> None:
    with connected(tmp_path, SMALL_RING) as pair:
        large = os.urandom(1 << 20)
        pair.left.send(large, tag=1, lane=Lane.BULK)
        pair.left.send(b"urgent", tag=2, lane=Lane.CONTROL)
        pair.until(lambda: len(pair.right.received.frames) == 2, "both frames")
        assert pair.right.received.tags == [2, 1]
        assert pair.right.received.frames[1][1] == large


def test_frames_are_not_delayed_by_a_payload_under_way(tmp_path: Path) -> None:
    with connected(tmp_path) as pair:
        pair.right.carrier.expect_payload(1, memoryview(bytearray(64 << 20)))
        pair.left.carrier.send_payload(1, memoryview(bytes(64 << 20)))
        pair.left.send(b"small")
        pair.right.node.poll()
        assert [what for what, _ in pair.right.received.received] == ["frame"]


def test_bodies_of_any_shape_and_format_are_sent_as_their_bytes(tmp_path: Path) -> None:
    with connected(tmp_path) as pair:
        floats = memoryview(bytearray(range(48))).cast("d")
        matrix = memoryview(bytearray(range(24))).cast("B", (4, 6))
        header = encode(Frame(kind=FrameKind.CONTROL, body=48 + 24 + 3))
        pair.left.carrier.send_frame(Lane.DATA, 0, header, floats, matrix, memoryview(b"").cast("B"), b"end")
        pair.until(lambda: pair.right.received.frames, "the frame")
        assert pair.right.received.frames[0][1] == bytes(range(48)) + bytes(range(24)) + b"end"


# ------------------------------------------------------------------------------------------------ hostile peers
def run_head_away(pair: Pair) -> None:
    inside(pair.left)._words[_head_word(0)] = 1 << 40


def move_head_back(pair: Pair) -> None:
    pair.left.send(b"something")
    pair.until(lambda: pair.right.received.frames, "the frame")
    inside(pair.left)._words[_head_word(0)] = 0


def write_garbage(pair: Pair) -> None:
    ring = inside(pair.left)._segment.writer
    ring.write(os.urandom(1000), (), 1000)


def write_a_lying_body(pair: Pair) -> None:
    inside(pair.left)._segment.writer.write(encode(Frame(kind=8, body=5000)), (), 104)


def write_a_private_kind(pair: Pair) -> None:
    pair.left.send(kind=FrameKind.CHUNK)


def speak_after_finish(pair: Pair) -> None:
    pair.left.carrier.finish()
    pair.until(lambda: pair.right.received.finished, "the finish")
    inside(pair.left)._segment.writer.write(encode(Frame(kind=8)), (), HEADER_BYTES)


def send_what_nobody_expects(pair: Pair) -> None:
    pair.left.carrier.send_payload(9, memoryview(b"x" * 100))


def run_chunk_head_away(pair: Pair) -> None:
    inside(pair.left)._words[_head_word(0) + 1] = 99


def run_tail_away(pair: Pair) -> None:
    inside(pair.left)._words[_tail_word(1)] = 1 << 40
    for _ in range(3000):
        pair.right.send(bytes(1000))


@pytest.mark.parametrize(
    "misbehave",
    [
        run_head_away,
        move_head_back,
        write_garbage,
        write_a_lying_body,
        write_a_private_kind,
        speak_after_finish,
        send_what_nobody_expects,
        run_chunk_head_away,
        run_tail_away,
    ],
)
def test_a_peer_that_breaks_the_rules_is_lost_as_misbehaved(tmp_path: Path, misbehave: Callable[[Pair], None]) -> None:
    with connected(tmp_path) as pair:
        misbehave(pair)
        pair.until(lambda: pair.right.received.lost, "the loss of a peer that misbehaved")
        assert pair.right.received.lost[0].misbehaved, pair.right.received.lost
        pair.until(lambda: pair.left.received.lost, "the other side's loss")
        with pytest.raises(CarrierLost):
            pair.right.send(b"more")


# ------------------------------------------------------------------------------------------------ the end
def test_nothing_of_a_carrier_stays_however_it_ends(tmp_path: Path) -> None:
    with connected(tmp_path) as pair:
        open_before, maps_before = descriptors(), memory_maps()
        assert maps_before == 2
        pair.left.carrier.finish()
        pair.right.carrier.finish()
        pair.until(lambda: memory_maps() == mapped_pages() == 0, "the freeing of a finished carrier")
        assert descriptors() < open_before
        assert not pair.left.received.lost
        assert not pair.right.received.lost
    assert list(tmp_path.iterdir()) == []


def test_the_reason_of_an_abort_reaches_the_peer(tmp_path: Path) -> None:
    with connected(tmp_path) as pair:
        pair.left.carrier.abort("out of patience")
        pair.until(lambda: pair.right.received.lost, "the loss")
        assert "out of patience" in pair.right.received.lost[0].reason
        assert pair.right.received.lost[0].kind == "peer"
        assert memory_maps() == mapped_pages() == 0


def test_an_abort_from_another_thread_waits_for_the_sink_and_then_frees(tmp_path: Path) -> None:
    with connected(tmp_path) as pair:
        entered, go_on, returned = threading.Event(), threading.Event(), threading.Event()

        def block(*_: object) -> None:
            entered.set()
            assert go_on.wait(20)
            assert not returned.is_set()

        def abort() -> None:
            pair.right.carrier.abort("now")
            returned.set()

        pair.right.received.on_frame = block
        with pair.right.node.driving():
            pair.left.send(b"hold it")
            assert entered.wait(20)
            thread = threading.Thread(target=abort)
            thread.start()
            wait_for(lambda: inside(pair.right)._life.ended is not None, "the abort")
            assert not returned.is_set()
            go_on.set()
            thread.join()
        assert memory_maps() == 1
        assert pair.right.received.lost == []


def test_senders_in_other_threads_survive_an_abort_under_their_feet(tmp_path: Path) -> None:
    with connected(tmp_path, SMALL_RING) as pair:
        ended: list[CarrierLost] = []

        def chatter() -> None:
            try:
                while True:
                    pair.left.send(bytes(500))
            except CarrierLost as error:
                ended.append(error)

        threads = [threading.Thread(target=chatter) for _ in range(3)]
        with pair.driving():
            for thread in threads:
                thread.start()
            wait_for(lambda: len(pair.right.received.frames) > 500, "traffic")
            pair.left.carrier.abort("enough")
            for thread in threads:
                thread.join()
        assert [error.reason for error in ended] == ["enough"] * 3


def test_senders_in_other_threads_survive_a_finish_under_their_feet(tmp_path: Path) -> None:
    with connected(tmp_path, SMALL_RING) as pair:
        refused: list[CarrierLost] = []
        sent = [0, 0, 0]

        def chatter(number: int) -> None:
            try:
                while True:
                    pair.left.send(bytes(500), tag=number)
                    sent[number] += 1
            except CarrierLost as error:
                refused.append(error)

        threads = [threading.Thread(target=chatter, args=(number,)) for number in range(3)]
        with pair.driving():
            for thread in threads:
                thread.start()
            wait_for(lambda: len(pair.right.received.frames) > 500, "traffic")
            pair.left.carrier.finish()
            for thread in threads:
                thread.join()
            wait_for(lambda: pair.right.received.finished, "the finish")
        assert [error.kind for error in refused] == ["closed"] * 3
        assert [pair.right.received.tags.count(number) for number in range(3)] == sent
        assert pair.right.received.lost == []


def test_a_forked_child_lets_go_without_a_trace(tmp_path: Path) -> None:
    with connected(tmp_path) as pair:
        child = os.fork()
        if child == 0:
            before = descriptors()
            pair.left.node.transport.abandon()
            gone = before - descriptors() >= 4 and memory_maps() == 1 and mapped_pages() == 0
            os._exit(0 if gone else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert len(list(tmp_path.iterdir())) == 2
        pair.check_usable()


# ------------------------------------------------------------------------------------------------ ended processes
needs_native = pytest.mark.skipif(native_problem() is not None, reason="needs nexar-native")


@needs_native
def test_an_ended_process_is_lost_before_its_socket_closes(tmp_path: Path) -> None:
    node = make_node(RIGHT, tmp_path)
    node.transport.lose_at_exit(True)
    try:
        with connected_process(node, "hold") as (side, child):
            pump([node], lambda: side.received.frames, "its frame")
            child.kill()
            pump([node], lambda: side.received.lost, "the loss")
        assert (side.received.lost[0].kind, side.received.lost[0].reason) == ("ended", "its process has ended")
        assert mapped_pages() == 0
    finally:
        node.close()


@needs_native
def test_all_that_an_ended_process_sent_is_delivered_first(tmp_path: Path) -> None:
    node = make_node(RIGHT, tmp_path)
    node.transport.lose_at_exit(True)
    try:
        with connected_process(node, "flood") as (side, child):
            child.wait()
            pump([node], lambda: side.received.lost, "the loss")
        assert side.received.tags == list(range(20))
        assert side.received.lost[0].kind == "ended"
    finally:
        node.close()


def test_the_end_of_a_process_shows_when_its_socket_closes_unless_asked_for(tmp_path: Path) -> None:
    node = make_node(RIGHT, tmp_path)
    try:
        with connected_process(node, "hold") as (side, child):
            pump([node], lambda: side.received.frames, "its frame")
            child.kill()
            pump([node], lambda: side.received.lost, "the loss")
        assert side.received.lost[0].kind == "peer"
    finally:
        node.close()


def test_without_the_native_package_only_the_socket_shows_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nexar_native", None)
    with connected(tmp_path) as pair:
        assert mapped_pages() == 0
        pair.right.node.transport.lose_at_exit(True)
        pair.check_usable()


def test_other_processors_are_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(tmp_path) as pair:
        transport = pair.left.node.transport
        address = pair.right.node.transport.address_for(LEFT)
        assert address is not None
        monkeypatch.setattr("platform.machine", lambda: "aarch64")
        with pytest.raises(OSError, match="aarch64"):
            transport.listen("", pair.left.node)
        with pytest.raises(ConnectRefused, match="aarch64"):
            transport.connect(address, Expected(RIGHT), time.monotonic() + 5)
