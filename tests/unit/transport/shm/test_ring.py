"""Sleeping and waking between two processes.

The frame ring: a FIFO of records, and what it does when the other side's counters lie.

Chunk slots and the payloads that pass through them.
"""

import os
import signal
import socket
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.transport.base import CarrierLost, Redirected
from nexar.transport.shm.ring import (
    LAST,
    MORE,
    PAD,
    CarrierLifetime,
    RingCorrupt,
    RingReader,
    RingWriter,
    SlotChunk,
    SlotReader,
    SlotWriter,
    WakeSocket,
)
from nexar.transport.shm.ring_frames import RingFrameReader
from nexar.transport.shm.ring_payloads import MOVED, NOTHING, PayloadReceiver, PayloadSender
from nexar.wire.frame import HEADER_BYTES, MAX_BODY_BYTES, Frame, encode
from tests.conformance.harness import quieten
from tests.unit.transport.shm.alternation import MESSAGES, alternate
from tests.unit.transport.shm.stage import RIGHT, connected, connected_process, make_node


def test_no_wake_up_is_lost_over_many_turns_although_nobody_looks_by_the_clock(tmp_path: Path) -> None:
    node = make_node(RIGHT, tmp_path)
    with connected_process(node, "alternate") as (side, child):
        alternate(side, seed=1, begins=True)
        assert len(side.received.frames) == MESSAGES // 2
        assert child.wait(20) == 0
    node.close()


def test_the_death_of_a_process_is_noticed_in_sleep_within_moments(tmp_path: Path) -> None:
    node = make_node(RIGHT, tmp_path)
    with connected_process(node, "hold") as (side, child):
        while not side.received.frames:
            if not node.poll():
                node.rest(1)
        while node.poll() or not node.transport.prepare_sleep():
            continue
        os.kill(child.pid, signal.SIGKILL)
        begin = time.monotonic()
        node.sleeper.sleep(20, 0)
        while not side.received.lost:
            node.poll()
        assert time.monotonic() - begin < 1.0  # milliseconds, on a machine with nothing else to do
        assert side.received.lost[0].kind == "peer"
    node.close()


def test_the_death_of_a_process_is_noticed_without_any_sleep(tmp_path: Path) -> None:
    node = make_node(RIGHT, tmp_path)
    with connected_process(node, "hold") as (side, child):
        while not side.received.frames:
            node.poll()
        child.kill()
        begin = time.monotonic()
        while not side.received.lost:
            node.poll()
        assert time.monotonic() - begin < 1.0
    node.close()


def test_what_a_process_sent_before_it_died_is_delivered_first(tmp_path: Path) -> None:
    node = make_node(RIGHT, tmp_path)
    with connected_process(node, "flood") as (side, child):
        child.wait()
        while not side.received.lost:
            node.poll()
        assert side.received.tags == list(range(20))
        assert [what for what, _ in side.received.received] == ["frame"] * 20 + ["lost"]
    node.close()


def test_a_byte_is_written_once_for_each_sleep_and_never_to_one_who_is_awake() -> None:
    ours, theirs = socket.socketpair()
    words = memoryview(bytearray(64)).cast("Q")
    wake_socket = WakeSocket(ours, words, 0, 1)
    for _ in range(5):
        wake_socket.signal(2)
    wake_socket.signal(4)
    assert theirs.recv(100) == b"\x01\x01"
    wake_socket.wake_peer()
    words[1] = 6
    wake_socket.wake_peer()
    wake_socket.wake_peer()
    assert theirs.recv(100) == b"\x01"
    words.release()
    wake_socket.wake_peer()
    wake_socket.close(None)
    assert theirs.recv(100) == b""
    theirs.close()


def test_an_awake_peer_costs_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(tmp_path) as pair:
        pair.quieten()
        for node in pair.nodes:
            node.poll()
        written: list[int] = []
        monkeypatch.setattr(WakeSocket, "signal", lambda _, sleep_number: written.append(sleep_number))
        for _ in range(100):
            pair.left.send(b"x")
            pair.right.node.poll()
        assert written == []


def test_an_idle_node_looks_ever_more_rarely(tmp_path: Path) -> None:
    with connected(tmp_path) as pair:
        transport = pair.left.node.transport
        quieten(pair.nodes)
        pauses = []
        for _ in range(10):
            assert not transport.poll()
            assert transport.prepare_sleep()
            due = transport.due()
            assert due is not None
            pauses.append(due - time.monotonic())
        assert 0.05 < pauses[-1] <= 0.1
        transport.poll()
        pair.right.send(b"news")
        pair.until(lambda: pair.left.received.frames, "the news")
        transport.poll()
        assert transport.prepare_sleep()
        assert (transport.due() or 0) - time.monotonic() <= 0.002
        transport.poll()


CAPACITY = 1 << 14
HEAD, TAIL = 0, 8


class Rings:
    """Both ends over one piece of ordinary memory."""

    def __init__(self, reader: type[RingReader] = RingReader) -> None:
        self.counters = memoryview(bytearray(128)).cast("Q")
        self.memory = memoryview(bytearray(CAPACITY))
        self.words = self.memory.cast("Q")
        self.writer = RingWriter(self.counters, HEAD, TAIL, self.memory)
        self.reader = reader(self.counters, HEAD, TAIL, self.memory)

    def write(self, record: bytes, mark: int = 0) -> bool:
        return self.writer.write(record[:3], (record[3:],), len(record), mark << 32)

    def read(self) -> bytes | None:
        while self.reader.tail != self.reader.head or self.reader.refresh():
            at = self.reader.next()
            found = bytes(self.reader.data[at : at + self.reader.size])
            self.reader.advance()
            if self.reader.mark != PAD:
                return found
        return None


def fill(rings: Rings) -> int:
    """Write until it refuses; how many records went in."""
    count = 0
    while rings.write(bytes(1000)):
        count += 1
    return count


steps = st.lists(st.one_of(st.none(), st.integers(0, CAPACITY // 4 - 8)), max_size=200)


@given(steps)
def test_any_sequence_of_writes_and_reads_equals_a_queue(steps: list[int | None]) -> None:
    rings, queue = Rings(), []
    for number, size in enumerate(steps):
        if size is None:
            assert rings.read() == (queue.pop(0) if queue else None)
        else:
            record = bytes((number + index) % 256 for index in range(size))
            if rings.write(record):
                queue.append(record)
    while queue:
        assert rings.read() == queue.pop(0)
    assert rings.read() is None


@given(st.lists(st.integers(0, CAPACITY // 4 - 8), min_size=1, max_size=60))
def test_an_empty_ring_takes_any_record_wherever_it_stands(sizes: list[int]) -> None:
    rings = Rings()
    for size in sizes:
        assert rings.write(bytes(size))
        assert rings.read() == bytes(size)


def test_a_full_ring_refuses_and_takes_again_after_a_read() -> None:
    rings = Rings()
    record = bytes(1000)
    assert fill(rings) == CAPACITY // 1024
    assert not rings.writer.room_grew()
    rings.read()
    assert rings.writer.room_grew()
    assert rings.write(record)
    assert not rings.write(record)


@given(st.lists(st.integers(0, CAPACITY // 4 - 8), min_size=40, max_size=120))
def test_a_refused_writer_is_looked_at_before_the_ring_is_empty(sizes: list[int]) -> None:
    rings = Rings()
    looked = True
    for size in sizes:
        if rings.write(bytes(size)):
            continue
        looked = False
        while rings.read() is not None:
            looked = looked or rings.reader.should_check_writer()
        assert looked


@pytest.mark.parametrize("head", [CAPACITY + 64, 2**64 - 64, 32, 1])
def test_a_head_that_runs_away_is_refused(head: int) -> None:
    rings = Rings()
    rings.counters[HEAD] = head
    with pytest.raises(RingCorrupt):
        rings.reader.refresh()


def test_a_head_that_moves_backwards_is_refused() -> None:
    rings = Rings()
    rings.write(bytes(500))
    rings.read()
    rings.counters[HEAD] = 64
    with pytest.raises(RingCorrupt):
        rings.reader.refresh()


@pytest.mark.parametrize("tail", [CAPACITY * 8, 2**64 - 64, 0])
def test_a_tail_that_runs_away_or_back_is_refused(tail: int) -> None:
    rings = Rings()
    for _ in range(20):
        rings.write(bytes(1000))
        rings.read()
    rings.counters[TAIL] = tail
    with pytest.raises(RingCorrupt):
        fill(rings)


@pytest.mark.parametrize("size", [200, 2**31, 0xFFFFFFFF])
def test_a_record_that_reaches_beyond_what_was_written_is_refused(size: int) -> None:
    rings = Rings()
    rings.write(bytes(50))
    rings.words[0] = size
    rings.reader.refresh()
    with pytest.raises(RingCorrupt):
        rings.reader.next()


def frame_rings(word: int, written: int = 1024) -> RingFrameReader:
    rings = Rings(RingFrameReader)
    rings.words[0] = word
    rings.counters[HEAD] = written
    assert isinstance(rings.reader, RingFrameReader)
    rings.reader.refresh()
    return rings.reader


@given(st.integers(0, 2**64 - 1))
def test_whatever_number_stands_before_a_record_it_is_a_frame_or_refused(word: int) -> None:
    reader = frame_rings(word)
    try:
        frame = reader.next_frame()
    except RingCorrupt:
        return
    assert frame is None
    assert word >> 32 & 0xFF == MORE


@pytest.mark.parametrize("size", [0, 8, HEADER_BYTES - 1])
def test_a_frame_shorter_than_its_header_is_refused_also_at_the_very_end_of_the_ring(size: int) -> None:
    rings = Rings(RingFrameReader)
    while rings.reader.tail < CAPACITY - 64:
        rings.write(bytes(50))
        rings.read()
    rings.write(bytes(size)[:50])
    rings.words[(CAPACITY - 64) // 8] = size
    rings.reader.refresh()
    assert isinstance(rings.reader, RingFrameReader)
    with pytest.raises(RingCorrupt):
        rings.reader.next_frame()


def test_padding_that_does_not_end_at_the_end_is_refused() -> None:
    with pytest.raises(RingCorrupt, match="padding"):
        frame_rings((64 - 8) | PAD << 32).next_frame()


def test_pieces_of_a_frame_are_joined_and_a_frame_of_another_lane_may_pass_between() -> None:
    rings = Rings(RingFrameReader)
    reader = rings.reader
    assert isinstance(reader, RingFrameReader)
    large = encode(Frame(kind=8, tag=1, body=6000)) + bytes(range(250)) * 24
    small = encode(Frame(kind=8, tag=2, body=3)) + b"abc"
    rings.write(large[:4000], MORE | 2 << 8)
    rings.write(small)
    rings.write(large[4000:], LAST | 2 << 8)
    reader.refresh()
    seen = []
    while reader.tail != reader.head:
        frame = reader.next_frame()
        if frame is not None:
            seen.append((frame.tag, bytes(reader.body)))
        reader.advance()
    assert seen == [(2, b"abc"), (1, large[HEADER_BYTES:])]


def test_pieces_without_end_are_refused_before_they_fill_the_memory() -> None:
    rings = Rings(RingFrameReader)
    with pytest.raises(RingCorrupt, match="pieces"):
        feed_pieces(rings, 2 * MAX_BODY_BYTES)
    assert rings.reader.tail <= 2 * (MAX_BODY_BYTES + HEADER_BYTES)


def feed_pieces(rings: Rings, total: int) -> None:
    reader = rings.reader
    assert isinstance(reader, RingFrameReader)
    for _ in range(total // 4000):
        rings.write(bytes(4000), MORE)
        reader.refresh()
        while reader.tail != reader.head:
            reader.next_frame()
            reader.advance()


CHUNK = 64


class Slots:
    def __init__(self, count: int = 3) -> None:
        self.counters = memoryview(bytearray(128)).cast("Q")
        descriptors = memoryview(bytearray(32 * count))
        memory = tuple(memoryview(bytearray(CHUNK)) for _ in range(count))
        self.writer = SlotWriter(self.counters, HEAD, TAIL, descriptors, memory)
        self.reader = SlotReader(self.counters, HEAD, TAIL, descriptors, memory)
        self.sender = PayloadSender(self.writer)
        self.life = CarrierLifetime()
        self.receiver = PayloadReceiver(self.reader, self.life)

    def move_all(self) -> list[int]:
        done = []
        while self.sender.pump(1) + (outcome := self.receiver.receive()) != NOTHING:
            if outcome >= 0:
                done.append(outcome)
        return done


@given(st.lists(st.integers(0, 5 * CHUNK), min_size=1, max_size=8))
def test_payloads_of_any_size_arrive_whole_side_by_side(sizes: list[int]) -> None:
    slots = Slots()
    data = [bytes((number + index) % 251 for index in range(size)) for number, size in enumerate(sizes)]
    into = [bytearray(size) for size in sizes]
    for transfer, (source, target) in enumerate(zip(data, into, strict=True)):
        slots.receiver.expect(transfer, memoryview(target))
        slots.sender.add(transfer, memoryview(source))
    assert sorted(slots.move_all()) == list(range(len(sizes)))
    assert [bytes(target) for target in into] == data


def test_a_small_payload_overtakes_a_large_one() -> None:
    slots = Slots()
    for transfer, size in ((1, 50 * CHUNK), (2, CHUNK)):
        slots.receiver.expect(transfer, memoryview(bytearray(size)))
        slots.sender.add(transfer, memoryview(bytes(size)))
    assert slots.move_all() == [2, 1]


def test_a_redirected_payload_continues_elsewhere_and_leaves_the_old_memory_alone() -> None:
    slots = Slots(1)
    data, old, new = bytes(range(128)), bytearray(128), bytearray(128)
    slots.receiver.expect(7, memoryview(old))
    slots.sender.add(7, memoryview(data))
    slots.sender.pump(1)
    assert slots.receiver.receive() == MOVED
    assert slots.receiver.redirect(7, memoryview(new)) is Redirected.MOVED
    old[:] = bytes(128)
    assert slots.move_all() == [7]
    assert new == data
    assert old == bytes(128)
    assert slots.receiver.redirect(7, None) is Redirected.COMPLETE


def test_from_the_moment_of_the_end_nothing_is_expected_moved_or_landed() -> None:
    slots = Slots(1)
    slots.receiver.expect(7, memoryview(bytearray(128)))
    slots.life.end(CarrierLost("closed", "the end"))  # whoever ends it clears only after that
    assert slots.receiver.redirect(7, memoryview(bytearray(128))) is None
    assert slots.receiver.redirect(7, None) is None
    assert not slots.receiver.expect(8, memoryview(bytearray(1)))


def test_a_discarded_payload_is_drained_and_not_reported() -> None:
    slots = Slots()
    slots.receiver.expect(7, memoryview(bytearray(200)))
    slots.sender.add(7, memoryview(bytes(200)))
    slots.receiver.redirect(7, None)
    assert slots.move_all() == []


@pytest.mark.parametrize("discard_first", [True, False])
def test_a_withdrawn_payload_is_forgotten_on_both_sides(discard_first: bool) -> None:
    slots = Slots(1)
    slots.receiver.expect(7, memoryview(bytearray(200)))
    slots.sender.add(7, memoryview(bytes(200)))
    slots.sender.pump(1)
    slots.sender.withdraw(7)
    if discard_first:
        slots.receiver.redirect(7, None)
    assert slots.move_all() == []
    if not discard_first:
        slots.receiver.redirect(7, None)
    assert not slots.sender.waiting
    assert slots.receiver.expect(7, memoryview(bytearray(1))), "its number is free again"


@pytest.mark.parametrize(
    "chunk",
    [
        SlotChunk(9, 0, 10, 100),  # nobody expects it
        SlotChunk(7, 10, 10, 100),  # not the next byte
        SlotChunk(7, 0, 10, 99),  # another size
        SlotChunk(7, 0, 0, 100),  # nothing in it
        SlotChunk(7, 0, CHUNK + 1, 100),  # more than a slot holds
        SlotChunk(7, 2**64 - 1, 10, 100),
        SlotChunk(9, 0, 0, 2**64 - 1),  # the end of what nobody expects
    ],
)
def test_a_chunk_that_does_not_fit_is_refused_and_touches_nothing(chunk: SlotChunk) -> None:
    slots = Slots()
    into = bytearray(100)
    slots.receiver.expect(7, memoryview(into))
    slots.writer.write(chunk._replace(length=min(chunk.length, CHUNK)), memoryview(b"x" * min(chunk.length, CHUNK)))
    if chunk.length > CHUNK:
        slots.reader._descriptors.cast("Q")[2] = chunk.length
    with pytest.raises(RingCorrupt):
        slots.receiver.receive()
    assert into == bytes(100)


@pytest.mark.parametrize("head", [4, 2**63])
def test_a_chunk_head_that_runs_away_is_refused(head: int) -> None:
    slots = Slots()
    slots.counters[HEAD] = head
    with pytest.raises(RingCorrupt):
        slots.receiver.receive()


def test_a_chunk_tail_that_runs_away_is_refused() -> None:
    slots = Slots()
    slots.sender.add(1, memoryview(bytes(10 * CHUNK)))
    slots.counters[TAIL] = 77
    with pytest.raises(RingCorrupt):
        slots.sender.pump(9)
