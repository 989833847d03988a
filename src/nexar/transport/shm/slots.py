"""One direction of payload chunks: a few fixed slots used in turn, with the same law as the ring.

`head` counts the chunks ever written, `tail` those ever taken out; slot = counter mod number of slots. Chunks have a
place of their own, beside the frame ring and not in it, so that a frame never stands behind more than the one chunk
that the reader is copying, and so that a payload never takes the room of frames. The same few slots are used again
and again, so the bytes pass from one core to the other through the cache.

Copies are slice assignments between memoryviews: one memcpy, as fast as NumPy's (measured). They hold the
interpreter's lock for about 25 µs per chunk; NumPy would release it, and could then wait a whole switch interval (5
ms) to get it back from a thread that computes.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from nexar.transport.shm.ring import Corrupt

_DESCRIPTOR: Final = struct.Struct("<QQQQ")
DESCRIPTOR_BYTES: Final = _DESCRIPTOR.size
WITHDRAWN: Final = 2**64 - 1
"""As `total`: no further chunk of this transfer follows."""


class Chunk(NamedTuple):
    """What a slot holds: `length` bytes of payload `transfer`, which has `total`, starting at byte `offset`."""

    transfer: int
    offset: int
    length: int
    total: int


class SlotWriter:
    """The end that fills slots. Whoever calls holds the lock of its PayloadSender."""

    __slots__ = ("_counters", "_descriptors", "_head_word", "_slots", "_tail", "_tail_word", "chunk_bytes", "head")

    def __init__(
        self,
        counters: memoryview,
        head_word: int,
        tail_word: int,
        descriptors: memoryview,
        slots: tuple[memoryview, ...],
    ) -> None:
        self._counters = counters
        self._head_word = head_word
        self._tail_word = tail_word
        self._descriptors = descriptors
        self._slots = slots
        self.chunk_bytes = len(slots[0])
        self.head = 0  # the truth; the word in the segment is its copy
        self._tail = 0  # the last value seen there

    def has_room(self) -> bool:
        """Whether `write` may be called."""
        return self.head - self._tail < len(self._slots) or self.head - self._look_at_tail() < len(self._slots)

    def write(self, chunk: Chunk, data: memoryview) -> None:
        """Fill the next slot; there is room."""
        index = self.head % len(self._slots)
        _DESCRIPTOR.pack_into(self._descriptors, index * DESCRIPTOR_BYTES, *chunk)
        self._slots[index][: chunk.length] = data
        self.head += 1
        self._counters[self._head_word] = self.head  # publishes: after every byte

    def _look_at_tail(self) -> int:
        tail: int = self._counters[self._tail_word]
        if not self._tail <= tail <= self.head:
            raise Corrupt(f"chunk tail {tail} is outside {self._tail}..{self.head}")
        self._tail = tail
        return tail

    def may_have_room(self) -> bool:
        """As `has_room`, but believing nothing, so it never raises."""
        return self.head - self._tail < len(self._slots) or bool(self._counters[self._tail_word] != self._tail)


class SlotReader:
    """The end that empties slots; used by the driving thread only."""

    __slots__ = ("_counters", "_descriptors", "_head_word", "_slots", "_tail_word", "tail")

    def __init__(
        self,
        counters: memoryview,
        head_word: int,
        tail_word: int,
        descriptors: memoryview,
        slots: tuple[memoryview, ...],
    ) -> None:
        self._counters = counters
        self._head_word = head_word
        self._tail_word = tail_word
        self._descriptors = descriptors
        self._slots = slots
        self.tail = 0  # the truth; the word in the segment is its copy

    def next(self) -> Chunk | None:
        """The oldest chunk, its description copied out of the segment; it stays until `advance`."""
        head: int = self._counters[self._head_word]
        if head == self.tail:
            return None
        if not 0 < head - self.tail <= len(self._slots):
            raise Corrupt(f"chunk head {head} is outside {self.tail}..{self.tail + len(self._slots)}")
        chunk = Chunk(*_DESCRIPTOR.unpack_from(self._descriptors, self.tail % len(self._slots) * DESCRIPTOR_BYTES))
        if chunk.length > len(self._slots[0]):
            raise Corrupt(f"chunk of {chunk.length} bytes in a slot of {len(self._slots[0])}")
        return chunk

    def copy(self, chunk: Chunk, into: memoryview) -> None:
        """Copy the chunk's bytes into `into`, which has exactly its length."""
        into[:] = self._slots[self.tail % len(self._slots)][: chunk.length]

    def advance(self) -> None:
        """Give the slot back to the writer."""
        self.tail += 1
        self._counters[self._tail_word] = self.tail
