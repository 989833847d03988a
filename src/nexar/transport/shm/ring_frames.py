"""Sending and receiving frames through the rings, and the shared memory segment.

The dialer creates the segment with memfd_create, so nothing remains after a crash. The segment is sealed against
resizing, because a truncated mapping would raise SIGBUS. It is allocated at once, so that lack of memory is an error at
connect.

    page 0    geometry, nonces, counters (those of one writer on their own cache line pair), words that the kernel
              marks when a process ends, descriptors
    then      the frame ring of each direction, then the chunk slots of each direction
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import sys
import threading
from collections import deque
from dataclasses import dataclass
from typing import Final

from nexar.transport.base import Buffer
from nexar.transport.shm.ring import (
    DESCRIPTOR_BYTES,
    DOWN,
    LAST,
    MORE,
    PAD,
    PREFIX_BYTES,
    UP,
    RingCorrupt,
    RingReader,
    RingWriter,
    SlotReader,
    SlotWriter,
    largest_record,
)
from nexar.wire.frame import HEADER_BYTES, MAX_BODY_BYTES, Frame, FrameError, Lane, decode

FINAL: Final = len(Lane)  # the queue after all lanes, for FINISH


def flat(part: Buffer) -> Buffer:
    """Return a flat view of bytes."""
    if not isinstance(part, memoryview) or (part.format == "B" and part.ndim == 1):
        return part
    return part.cast("B") if part.nbytes else b""


class RingFrameSender:
    """Sends frames, lower lanes first; queues them while the ring is full. Any thread."""

    __slots__ = (
        "_acquire",
        "_largest",
        "_limit",
        "_positions",
        "_queued",
        "_queues",
        "_release",
        "_ring",
        "frames_sent",
        "waiting",
    )

    def __init__(self, ring: RingWriter) -> None:
        # guards everything below and the ring; bound methods, because it is taken for every frame
        lock = threading.Lock()
        self._acquire = lock.acquire
        self._release = lock.release
        self._ring = ring
        self._largest = ring.largest
        self._limit = ring.largest  # -1 after send_last or close: nothing fits
        self._queues: tuple[deque[bytes], ...] = tuple(deque() for _ in range(FINAL + 1))
        self._queued = [0] * (FINAL + 1)  # bytes per queue
        self._positions = [0] * (FINAL + 1)  # sent bytes of the first frame of each queue
        self.waiting = False  # a queue is not empty; written under the lock, read without it
        self.frames_sent = 0

    def send(self, lane: int, header: bytes, body: tuple[Buffer, ...], size: int) -> bool:
        """Copy a frame; False if it is queued. Raises RingCorrupt; ValueError after send_last or close."""
        self._acquire()
        try:
            self.frames_sent += 1
            if not self.waiting and size <= self._limit and self._ring.write(header, body, size):
                return True
            if self._limit < 0:
                raise ValueError("nothing more can be sent")
            self._queues[lane].append(b"".join((header, *body)))
            self._queued[lane] += size
            self.waiting = True
            return self._flush()
        finally:
            self._release()  # also the fence between the new head and the peer's sleep word

    def send_last(self, header: bytes) -> None:
        """Raises RingCorrupt."""
        self._acquire()
        try:
            self._limit = -1
            self._queues[FINAL].append(header)
            self._queued[FINAL] += len(header)
            self.waiting = True
            self._flush()
        finally:
            self._release()

    def flush(self) -> bool:
        """Returns whether anything moved. Raises RingCorrupt."""
        self._acquire()
        try:
            before = sum(self._queued)
            self._flush()
            return sum(self._queued) != before
        finally:
            self._release()

    def _flush(self) -> bool:
        for lane, queue in enumerate(self._queues):
            while queue:
                if not self._write(lane, queue[0]):
                    return False  # lower lanes must not starve the rest, so none overtakes
                queue.popleft()
                self._positions[lane] = 0
        self.waiting = False
        return True

    def _write(self, lane: int, frame: bytes) -> bool:
        if len(frame) > self._largest:
            return self._write_pieces(lane, frame)
        if not self._ring.write(frame, (), len(frame)):
            return False
        self._queued[lane] -= len(frame)
        return True

    def _write_pieces(self, lane: int, frame: bytes) -> bool:
        start = self._positions[lane]
        while start < len(frame):
            end = min(start + self._largest, len(frame))
            kind = LAST if end == len(frame) else MORE
            if not self._ring.write(memoryview(frame)[start:end], (), end - start, kind << 32 | lane << 40):
                return False
            self._queued[lane] -= end - start
            self._positions[lane] = start = end
        return True

    @property
    def bytes_sent(self) -> int:
        return self._ring.written

    def queued_bytes(self, lane: int) -> int:
        return self._queued[lane]

    def can_move(self) -> bool:
        return self.waiting and self._ring.room_grew()

    def close(self) -> None:
        """On return no thread uses the ring; `send` raises ValueError."""
        self._acquire()
        try:
            self._limit = -1
            for queue in self._queues:
                queue.clear()
            self._queued = [0] * (FINAL + 1)
            self.waiting = False
        finally:
            self._release()


_MAX_FRAME_BYTES: Final = HEADER_BYTES + MAX_BODY_BYTES
_NO_BODY: Final = memoryview(b"")


class RingFrameReader(RingReader):
    """Reads frames from a ring: `next_frame`, deliver, `advance`."""

    __slots__ = ("_joining", "_largest", "body", "frames_received")

    def __init__(self, counters: memoryview, head_word: int, tail_word: int, data: memoryview) -> None:
        super().__init__(counters, head_word, tail_word, data)
        self._largest = largest_record(len(data))
        self._joining: dict[int, bytearray] = {}  # lane → received pieces
        self.body = _NO_BODY
        self.frames_received = 0

    def next_frame(self) -> Frame | None:
        """Return the next frame, None if incomplete; its body is in `body`. Raises RingCorrupt."""
        at = self.tail & self._mask
        size: int = self._words[at >> 3]
        if size > self._largest:
            return self._unusual()
        self._span = span = (size + UP) & DOWN
        if at + span > self._capacity or self.tail + span > self.head:
            raise RingCorrupt(f"record of {size} bytes at {at} reaches beyond what was written")
        return self._decode(self.data, at + PREFIX_BYTES, size)

    def _decode(self, data: memoryview, at: int, size: int) -> Frame:
        try:
            frame = decode(data, at)  # copies the header before checking it: the peer may still write
        except (FrameError, struct.error) as error:
            raise RingCorrupt(f"a record of {size} bytes that is no frame: {error}") from error
        if frame.body != size - HEADER_BYTES:
            raise RingCorrupt(f"a frame with a body of {frame.body} bytes in a record of {size}")
        self.frames_received += 1
        self.body = data[at + HEADER_BYTES : at + size]
        return frame

    def _unusual(self) -> Frame | None:
        at = self.next()
        self.body = _NO_BODY
        if self.mark == PAD:
            self._check_padding(at - PREFIX_BYTES)
            return None
        kind, lane = self.mark & 0xFF, self.mark >> 8
        if kind not in (MORE, LAST) or lane > FINAL or self.size > self._largest:
            raise RingCorrupt(f"a record of kind {kind}, lane {lane} and {self.size} bytes")
        return self._join(lane, self.data[at : at + self.size], last=kind == LAST)

    def _check_padding(self, at: int) -> None:
        if at == 0 or at + self._span != self._capacity:
            raise RingCorrupt(f"padding of {self._span} bytes at {at}")

    def _join(self, lane: int, piece: memoryview, *, last: bool) -> Frame | None:
        pieces = self._joining.setdefault(lane, bytearray())
        pieces += piece
        if len(pieces) > _MAX_FRAME_BYTES:
            raise RingCorrupt(f"pieces of more than {_MAX_FRAME_BYTES} bytes")
        if not last:
            return None
        del self._joining[lane]
        return self._decode(memoryview(pieces), 0, len(pieces))

    def release(self) -> None:
        self.body = _NO_BODY
        self._joining.clear()
        super().release()


NONCE_BYTES: Final = 32
DIALER: Final = 0
LISTENER: Final = 1

_PAGE: Final = 4096
_MAX_SLOTS: Final = 16
_GEOMETRY_WORDS: Final = 3
_NONCES_AT: Final = 64  # the dialer's, then the listener's
_DESCRIPTORS_AT: Final = 2048
_SEALS: Final = getattr(fcntl, "F_SEAL_SHRINK", 2) | getattr(fcntl, "F_SEAL_GROW", 4) | getattr(fcntl, "F_SEAL_SEAL", 1)
_ADD_SEALS: Final = getattr(fcntl, "F_ADD_SEALS", 1033)
_GET_SEALS: Final = getattr(fcntl, "F_GET_SEALS", 1034)
_NOEXEC_SEAL: Final = 0x0008  # MFD_NOEXEC_SEAL, which Python does not name; Linux 6.3 warns or refuses without it

# Words of page 0. Direction d carries what side d writes. The two heads of a direction share a line pair (128 bytes,
# because CPUs fetch lines in pairs), so one look finds frames and chunks; so do the two tails.
_LINE: Final = 16


def _head_word(direction: int) -> int:
    return (2 + 2 * direction) * _LINE


def _tail_word(direction: int) -> int:
    return (3 + 2 * direction) * _LINE


def sleep_word(side: int) -> int:
    """Return the index of this side's sleep word."""
    return (6 + side) * _LINE


def exit_word(side: int) -> int:
    """Return the index of this side's word that the kernel marks when its process ends; 0 if this side uses none."""
    return (8 + side) * _LINE


@dataclass(frozen=True, slots=True)
class SegmentGeometry:
    """The layout of a segment, chosen by the dialer.

    Measured with 16 MB payloads on two cores: 64 KiB chunks 8 GB/s, 4 × 256 KiB 10-14 GB/s, 4 × 1 MiB 20 GB/s, but four
    times the memory and the longest wait of a frame.
    """

    ring_bytes: int = 1 << 20
    chunk_bytes: int = 256 << 10
    slots: int = 4

    def __post_init__(self) -> None:
        if not 1 << 14 <= self.ring_bytes <= 1 << 28 or self.ring_bytes & (self.ring_bytes - 1):
            raise ValueError(f"ring_bytes {self.ring_bytes}; allowed: powers of two from 16 KiB to 256 MiB")
        if not _PAGE <= self.chunk_bytes <= 1 << 24 or self.chunk_bytes % _PAGE:
            raise ValueError(f"chunk_bytes {self.chunk_bytes}; allowed: multiples of 4096 up to 16 MiB")
        if not 1 <= self.slots <= _MAX_SLOTS:
            raise ValueError(f"slots {self.slots}; allowed: 1..{_MAX_SLOTS}")

    @property
    def total_bytes(self) -> int:
        return _PAGE + 2 * (self.ring_bytes + self.slots * self.chunk_bytes)


class ShmSegment:
    """One side's mapping of the segment."""

    def __init__(self, mapping: mmap.mmap, geometry: SegmentGeometry, side: int) -> None:
        self._mapping: mmap.mmap | None = mapping
        self._geometry = geometry
        self._views: list[memoryview] = []
        self._view = self._keep(memoryview(mapping))
        self.side = side
        self.words = self._keep(self._keep(self._view[:_PAGE]).cast("Q"))
        self.writer, self.reader = self._rings()
        self.slot_writer, self.slot_reader = self._slots()

    def _keep(self, view: memoryview) -> memoryview:
        self._views.append(view)
        return view

    def _rings(self) -> tuple[RingWriter, RingFrameReader]:
        return RingWriter(*self._ring(self.side)), RingFrameReader(*self._ring(1 - self.side))

    def _ring(self, direction: int) -> tuple[memoryview, int, int, memoryview]:
        size = self._geometry.ring_bytes
        start = _PAGE + direction * size
        return self.words, _head_word(direction), _tail_word(direction), self._keep(self._view[start : start + size])

    def _slots(self) -> tuple[SlotWriter, SlotReader]:
        return SlotWriter(*self._slot_memory(self.side)), SlotReader(*self._slot_memory(1 - self.side))

    def _slot_memory(self, direction: int) -> tuple[memoryview, int, int, memoryview, tuple[memoryview, ...]]:
        size, count = self._geometry.chunk_bytes, self._geometry.slots
        first = _PAGE + 2 * self._geometry.ring_bytes + direction * count * size
        slots = tuple(self._keep(self._view[first + i * size : first + (i + 1) * size]) for i in range(count))
        at = _DESCRIPTORS_AT + direction * _MAX_SLOTS * DESCRIPTOR_BYTES
        descriptors = self._keep(self._view[at : at + _MAX_SLOTS * DESCRIPTOR_BYTES])
        return self.words, _head_word(direction) + 1, _tail_word(direction) + 1, descriptors, slots

    @property
    def news_words(self) -> tuple[int, int]:
        return _head_word(1 - self.side), _head_word(1 - self.side) + 1

    def write_nonce(self, nonce: bytes) -> None:
        at = _NONCES_AT + self.side * NONCE_BYTES
        self._view[at : at + NONCE_BYTES] = nonce

    def read_nonce(self) -> bytes:
        at = _NONCES_AT + (1 - self.side) * NONCE_BYTES
        return bytes(self._view[at : at + NONCE_BYTES])

    def release(self) -> None:
        """Idempotent. A sink that kept a frame's body keeps the mapping."""
        self.writer.release()
        self.reader.release()
        while self._views:
            self._views.pop().release()  # newest first: a cast before its source
        mapping, self._mapping = self._mapping, None
        if mapping is None:
            return
        try:
            mapping.close()
        except BufferError:
            return  # a view outside is alive and keeps the mapping


def create_segment(geometry: SegmentGeometry) -> tuple[ShmSegment, int]:
    """Return a new segment and its descriptor, which the caller closes. Raises OSError."""
    descriptor = _anonymous_file()
    try:
        os.posix_fallocate(descriptor, 0, geometry.total_bytes)
        fcntl.fcntl(descriptor, _ADD_SEALS, _SEALS)
        segment = ShmSegment(_map(descriptor, geometry.total_bytes), geometry, DIALER)
    except BaseException:
        os.close(descriptor)
        raise
    words = (geometry.ring_bytes, geometry.chunk_bytes, geometry.slots)
    for index, word in enumerate(words):
        segment.words[index] = word
    return segment, descriptor


def attach_segment(descriptor: int) -> ShmSegment:
    """Map a segment for the listener. Raises OSError, RingCorrupt."""
    size = _checked_size(descriptor)
    with _map(descriptor, _PAGE) as page:
        words = memoryview(bytes(page[: 8 * _GEOMETRY_WORDS])).cast("Q")
    try:
        geometry = SegmentGeometry(*words)
    except ValueError as error:
        raise RingCorrupt(f"segment with {error}") from error
    if geometry.total_bytes != size:
        raise RingCorrupt(f"segment of {size} bytes, its geometry needs {geometry.total_bytes}")
    return ShmSegment(_map(descriptor, size), geometry, LISTENER)


def _checked_size(descriptor: int) -> int:
    try:
        seals = fcntl.fcntl(descriptor, _GET_SEALS)
    except OSError as error:
        raise RingCorrupt("the descriptor is not a memory segment") from error
    if seals & _SEALS != _SEALS:
        raise RingCorrupt(f"segment with seals {seals:#x}, it could be truncated under us")
    facts = os.fstat(descriptor)
    if facts.st_size < _PAGE or facts.st_blocks * 512 < facts.st_size:
        raise RingCorrupt(f"segment of {facts.st_size} bytes with {facts.st_blocks * 512} allocated")
    return facts.st_size


def _anonymous_file() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("nexar", flags | _NOEXEC_SEAL)
    except OSError:
        return os.memfd_create("nexar", flags)  # before Linux 6.3


def _map(descriptor: int, size: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        return mmap.mmap(descriptor, size, trackfd=False)
    return mmap.mmap(descriptor, size)
