"""The frame ring: a FIFO of records, and what it does when the other side's counters lie."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.transport.shm.frames_in import FrameReader
from nexar.transport.shm.ring import LAST, MORE, PAD, Corrupt, RingReader, RingWriter
from nexar.wire.frame import HEADER_BYTES, MAX_BODY_BYTES, Frame, encode

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
            looked = looked or rings.reader.owes_a_look()
        assert looked


@pytest.mark.parametrize("head", [CAPACITY + 64, 2**64 - 64, 32, 1])
def test_a_head_that_runs_away_is_refused(head: int) -> None:
    rings = Rings()
    rings.counters[HEAD] = head
    with pytest.raises(Corrupt):
        rings.reader.refresh()


def test_a_head_that_moves_backwards_is_refused() -> None:
    rings = Rings()
    rings.write(bytes(500))
    rings.read()
    rings.counters[HEAD] = 64
    with pytest.raises(Corrupt):
        rings.reader.refresh()


@pytest.mark.parametrize("tail", [CAPACITY * 8, 2**64 - 64, 0])
def test_a_tail_that_runs_away_or_back_is_refused(tail: int) -> None:
    rings = Rings()
    for _ in range(20):
        rings.write(bytes(1000))
        rings.read()
    rings.counters[TAIL] = tail
    with pytest.raises(Corrupt):
        fill(rings)


@pytest.mark.parametrize("size", [200, 2**31, 0xFFFFFFFF])
def test_a_record_that_reaches_beyond_what_was_written_is_refused(size: int) -> None:
    rings = Rings()
    rings.write(bytes(50))
    rings.words[0] = size
    rings.reader.refresh()
    with pytest.raises(Corrupt):
        rings.reader.next()


def frame_rings(word: int, written: int = 1024) -> FrameReader:
    rings = Rings(FrameReader)
    rings.words[0] = word
    rings.counters[HEAD] = written
    assert isinstance(rings.reader, FrameReader)
    rings.reader.refresh()
    return rings.reader


@given(st.integers(0, 2**64 - 1))
def test_whatever_word_stands_before_a_record_it_is_a_frame_or_refused(word: int) -> None:
    reader = frame_rings(word)
    try:
        frame = reader.next_frame()
    except Corrupt:
        return
    assert frame is None
    assert word >> 32 & 0xFF == MORE


@pytest.mark.parametrize("size", [0, 8, HEADER_BYTES - 1])
def test_a_frame_shorter_than_its_header_is_refused_also_at_the_very_end_of_the_ring(size: int) -> None:
    rings = Rings(FrameReader)
    while rings.reader.tail < CAPACITY - 64:
        rings.write(bytes(50))
        rings.read()
    rings.write(bytes(size)[:50])
    rings.words[(CAPACITY - 64) // 8] = size
    rings.reader.refresh()
    assert isinstance(rings.reader, FrameReader)
    with pytest.raises(Corrupt):
        rings.reader.next_frame()


def test_padding_that_does_not_end_at_the_end_is_refused() -> None:
    with pytest.raises(Corrupt, match="padding"):
        frame_rings((64 - 8) | PAD << 32).next_frame()


def test_pieces_of_a_frame_are_joined_and_a_frame_of_another_lane_may_pass_between() -> None:
    rings = Rings(FrameReader)
    reader = rings.reader
    assert isinstance(reader, FrameReader)
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
    rings = Rings(FrameReader)
    with pytest.raises(Corrupt, match="pieces"):
        feed_pieces(rings, 2 * MAX_BODY_BYTES)
    assert rings.reader.tail <= 2 * (MAX_BODY_BYTES + HEADER_BYTES)


def feed_pieces(rings: Rings, total: int) -> None:
    reader = rings.reader
    assert isinstance(reader, FrameReader)
    for _ in range(total // 4000):
        rings.write(bytes(4000), MORE)
        reader.refresh()
        while reader.tail != reader.head:
            reader.next_frame()
            reader.advance()
