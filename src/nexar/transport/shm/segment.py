"""The memory that two processes share: its layout, how it is made, and what is checked before it is believed.

The dialer makes it with memfd_create and passes the descriptor, so it has no name: nothing is left behind whoever dies
how, and the size of /dev/shm does not matter. It is *sealed* against shrinking and growing: a peer that truncated it
could otherwise kill us with SIGBUS. Its pages are allocated when it is made, so a lack of memory is an error at connect
rather than that same SIGBUS later.

    page 0    geometry and nonces; the counters, those of one writer on a cache line pair of their own; descriptors
    then      for each direction: the frame ring; for each direction: the chunk slots
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from dataclasses import dataclass
from typing import Final

from nexar.transport.shm.frames_in import FrameReader
from nexar.transport.shm.ring import Corrupt, RingWriter
from nexar.transport.shm.slots import DESCRIPTOR_BYTES, SlotReader, SlotWriter

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
_NOEXEC_SEAL: Final = 0x0008  # MFD_NOEXEC_SEAL, which Python does not name; Linux 6.3 warns, or refuses, without it

# Words of page 0. Direction d carries what side d writes. One line pair (128 bytes: CPUs fetch lines in pairs) holds
# the two heads of a direction, so that its reader finds frames and chunks with one look; another holds the two tails.
_LINE: Final = 16


def _head_word(direction: int) -> int:
    return (2 + 2 * direction) * _LINE


def _tail_word(direction: int) -> int:
    return (3 + 2 * direction) * _LINE


def sleep_word(side: int) -> int:
    """Written by `side` only: see doorbell.py."""
    return (6 + side) * _LINE


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a segment is divided. The dialer chooses, the listener checks.

    Measured with 16 MB payloads on two cores: 64 KiB chunks 8 GB/s, 4 × 256 KiB 10-14 GB/s, 4 × 1 MiB 20 GB/s; the
    third would quadruple both the memory per pair and the longest wait of a frame behind a chunk.
    """

    ring_bytes: int = 1 << 20
    chunk_bytes: int = 256 << 10
    slots: int = 4

    def __post_init__(self) -> None:
        """Refuse what the arithmetic of ring and page cannot hold."""
        if not 1 << 14 <= self.ring_bytes <= 1 << 28 or self.ring_bytes & (self.ring_bytes - 1):
            raise ValueError(f"ring_bytes {self.ring_bytes}; allowed: powers of two from 16 KiB to 256 MiB")
        if not _PAGE <= self.chunk_bytes <= 1 << 24 or self.chunk_bytes % _PAGE:
            raise ValueError(f"chunk_bytes {self.chunk_bytes}; allowed: multiples of 4096 up to 16 MiB")
        if not 1 <= self.slots <= _MAX_SLOTS:
            raise ValueError(f"slots {self.slots}; allowed: 1..{_MAX_SLOTS}")

    @property
    def total_bytes(self) -> int:
        """Size of the whole segment."""
        return _PAGE + 2 * (self.ring_bytes + self.slots * self.chunk_bytes)


class Segment:
    """A mapping of the shared memory, seen from one `side`. Made by `create` or `attach`."""

    def __init__(self, mapping: mmap.mmap, geometry: Geometry, side: int) -> None:
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

    def _rings(self) -> tuple[RingWriter, FrameReader]:
        return RingWriter(*self._ring(self.side)), FrameReader(*self._ring(1 - self.side))

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
        """The words of `words` that tell of frames and of chunks for this side."""
        return _head_word(1 - self.side), _head_word(1 - self.side) + 1

    def write_nonce(self, nonce: bytes) -> None:
        """Leave this side's nonce where only a process with the same memory can read it."""
        at = _NONCES_AT + self.side * NONCE_BYTES
        self._view[at : at + NONCE_BYTES] = nonce

    def read_nonce(self) -> bytes:
        """The nonce that the other side left."""
        at = _NONCES_AT + (1 - self.side) * NONCE_BYTES
        return bytes(self._view[at : at + NONCE_BYTES])

    def release(self) -> None:
        """Unmap. Idempotent. A sink that kept a frame's body past its call keeps the mapping too, until it lets go."""
        self.writer.release()
        self.reader.release()
        while self._views:
            self._views.pop().release()  # newest first: a cast before what it was cast from
        mapping, self._mapping = self._mapping, None
        if mapping is None:
            return
        try:
            mapping.close()
        except BufferError:
            return  # a view outside is alive; the mapping goes with it, now that we hold neither


def create(geometry: Geometry) -> tuple[Segment, int]:
    """A new segment, seen by the dialer, and its descriptor, which the caller closes. OSError when memory is short."""
    descriptor = _anonymous_file()
    try:
        os.posix_fallocate(descriptor, 0, geometry.total_bytes)
        fcntl.fcntl(descriptor, _ADD_SEALS, _SEALS)
        segment = Segment(_map(descriptor, geometry.total_bytes), geometry, DIALER)
    except BaseException:
        os.close(descriptor)
        raise
    words = (geometry.ring_bytes, geometry.chunk_bytes, geometry.slots)
    for index, word in enumerate(words):
        segment.words[index] = word
    return segment, descriptor


def attach(descriptor: int) -> Segment:
    """The segment behind a descriptor that a peer passed, seen by the listener. OSError, Corrupt if it could harm."""
    size = _checked_size(descriptor)
    with _map(descriptor, _PAGE) as page:
        words = memoryview(bytes(page[: 8 * _GEOMETRY_WORDS])).cast("Q")
    try:
        geometry = Geometry(*words)
    except ValueError as error:
        raise Corrupt(f"segment with {error}") from error
    if geometry.total_bytes != size:
        raise Corrupt(f"segment of {size} bytes, its geometry needs {geometry.total_bytes}")
    return Segment(_map(descriptor, size), geometry, LISTENER)


def _checked_size(descriptor: int) -> int:
    try:
        seals = fcntl.fcntl(descriptor, _GET_SEALS)
    except OSError as error:
        raise Corrupt("the descriptor is not a memory segment") from error
    if seals & _SEALS != _SEALS:
        raise Corrupt(f"segment with seals {seals:#x}, it could be truncated under us")
    facts = os.fstat(descriptor)
    if facts.st_size < _PAGE or facts.st_blocks * 512 < facts.st_size:
        raise Corrupt(f"segment of {facts.st_size} bytes with {facts.st_blocks * 512} allocated")
    return facts.st_size


def _anonymous_file() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("nexar", flags | _NOEXEC_SEAL)
    except OSError:
        return os.memfd_create("nexar", flags)  # a kernel before 6.3


def _map(descriptor: int, size: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        return mmap.mmap(descriptor, size, trackfd=False)
    return mmap.mmap(descriptor, size)
