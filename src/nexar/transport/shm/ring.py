"""One direction of frames: a byte ring with one writer process and one reader process.

Law     `head` counts the bytes ever written, `tail` the bytes ever read; both only grow. The writer alone stores
        `head`, the reader alone stores `tail`, and 0 <= head - tail <= capacity at every moment. Position = counter
        mod capacity.
Record  one word (size | kind << 32 | lane << 40), then `size` bytes, then nothing up to the next multiple of 64, so
        that two records never share a cache line. No record is larger than a quarter of the ring: a larger frame
        travels as MORE … MORE LAST records of its lane and is joined by the reader. A record is contiguous: where it
        would cross the end, a PAD fills the rest. (Splitting it instead would cost the reader a copy, and the sink
        could not read straight from the ring.)

Why plain stores are enough: x86 is a total-store-order machine. A core's stores become visible to others in program
order, and loads are not reordered with other loads. So a reader that sees the new `head` sees every byte stored before
it, and a writer that sees the new `tail` knows that the reader's loads were done. A counter is one aligned 8-byte word,
which `memoryview` of format Q stores and loads by a single move: it is never seen half written. On CPUs with weaker
order both statements are false, and `support.py` refuses them.

The other process is not believed. Each side keeps its own counter in its own memory and only *publishes* it; a word
from the segment is loaded once, then checked, then used, because it may change between two looks.
"""

from __future__ import annotations

from typing import Final

from nexar.transport.base import Buffer

WHOLE: Final = 0
MORE: Final = 1
LAST: Final = 2
PAD: Final = 3

PREFIX_BYTES: Final = 8
_ALIGN: Final = 64

# A record of n bytes takes (n + UP) & DOWN: its word and itself, rounded up to whole lines. (Two constants, and not a
# function or their terms: this is computed four times for every frame there and back.)
UP: Final = PREFIX_BYTES + _ALIGN - 1
DOWN: Final = -_ALIGN


class Corrupt(Exception):
    """The segment holds what no correct peer writes."""


def largest_record(capacity: int) -> int:
    """The most bytes that one record of a ring may have."""
    return capacity // 4 - PREFIX_BYTES


class RingWriter:
    """The end that appends. Whoever calls `write` holds the lock of its FrameSender."""

    __slots__ = (
        "_capacity",
        "_counters",
        "_data",
        "_head",
        "_head_word",
        "_mask",
        "_tail",
        "_tail_word",
        "_words",
        "largest",
    )

    def __init__(self, counters: memoryview, head_word: int, tail_word: int, data: memoryview) -> None:
        self._counters = counters
        self._head_word = head_word
        self._tail_word = tail_word
        self._data = data
        self._words = data.cast("Q")
        self._capacity = len(data)
        self._mask = self._capacity - 1
        self._head = 0  # the truth; the word in the segment is its copy
        self._tail = 0  # the last value seen there: looked at again only when the ring seems full
        self.largest = largest_record(self._capacity)

    def write(self, first: Buffer, rest: tuple[Buffer, ...], size: int, mark: int = 0) -> bool:
        """Append one record, the parts joined, `size` bytes (at most `largest`); False if it does not fit now.

        `mark` is ready for the word: kind << 32 | lane << 40.
        """
        span = (size + UP) & DOWN
        after = self._head + span
        at = self._head & self._mask
        if at + span > self._capacity or after - self._tail > self._capacity:
            after, at = self._make_room(at, span)
            if at < 0:
                return False
        self._words[at >> 3] = size | mark
        data = self._data
        at += PREFIX_BYTES
        end = at + len(first)
        data[at:end] = first
        for part in rest:
            at, end = end, end + len(part)
            data[at:end] = part
        self._head = after
        self._counters[self._head_word] = after  # publishes: after every byte, see the module's law
        return True

    def _make_room(self, at: int, span: int) -> tuple[int, int]:
        """The head after a record of `span` bytes and where it goes (-1: nowhere now); writes the PAD if it must
        wrap.
        """
        rest = self._capacity - at
        skip = rest if span > rest else 0
        after = self._head + skip + span
        if after - self._tail > self._capacity and after - self._look_at_tail() > self._capacity:
            return after, -1
        if skip:
            self._words[at >> 3] = (skip - PREFIX_BYTES) | PAD << 32
            at = 0
        return after, at

    def _look_at_tail(self) -> int:
        tail: int = self._counters[self._tail_word]
        if not self._tail <= tail <= self._head:
            raise Corrupt(f"ring tail {tail} is outside {self._tail}..{self._head}")
        self._tail = tail
        return tail

    @property
    def written(self) -> int:
        """Bytes ever appended, padding included."""
        return self._head

    def room_grew(self) -> bool:
        """Whether the reader has moved since the writer last looked."""
        return bool(self._counters[self._tail_word] != self._tail)

    def release(self) -> None:
        """Let go of the memory."""
        self._words.release()


class RingReader:
    """The end that takes away; used by the driving thread only. While `tail` differs from `head`: `next`, `advance`."""

    __slots__ = (
        "_asked",
        "_capacity",
        "_counters",
        "_head_word",
        "_mask",
        "_span",
        "_tail_word",
        "_words",
        "data",
        "head",
        "mark",
        "size",
        "tail",
    )

    def __init__(self, counters: memoryview, head_word: int, tail_word: int, data: memoryview) -> None:
        self._counters = counters
        self._head_word = head_word
        self._tail_word = tail_word
        self.data = data
        self._words = data.cast("Q")
        self._capacity = len(data)
        self._mask = self._capacity - 1
        self.tail = 0  # the truth; the word in the segment is its copy
        self.head = 0  # what the last refresh saw, already checked
        self._span = 0  # what `advance` gives back
        self._asked = 0  # the tail when `owes_a_look` was last true
        self.size = 0
        self.mark = 0  # kind | lane << 8 of the record `next` found

    def refresh(self) -> bool:
        """Look at the writer's head; True if there is something. What is written later waits for the next look, so that
        a fast writer cannot hold the reader for ever."""
        head: int = self._counters[self._head_word]
        if not self.head <= head <= self.tail + self._capacity or head % _ALIGN:
            raise Corrupt(f"ring head {head} is outside {self.head}..{self.tail + self._capacity}")
        self.head = head
        return head != self.tail

    def next(self) -> int:
        """Where the bytes of the oldest record start; `size` and `mark` describe it. It stays until `advance`."""
        at = self.tail & self._mask
        word: int = self._words[at >> 3]  # one load: what is checked below is what is used
        self.size = word & 0xFFFFFFFF
        self.mark = word >> 32
        self._span = self._checked_span(at, self.size)
        return at + PREFIX_BYTES

    def _checked_span(self, at: int, size: int) -> int:
        span = (size + UP) & DOWN
        if at + span > self._capacity or self.tail + span > self.head:
            raise Corrupt(f"record of {size} bytes at {at} reaches beyond what was written")
        return span

    def advance(self) -> None:
        """Give the record's bytes back to the writer."""
        self.tail = tail = self.tail + self._span
        self._counters[self._tail_word] = tail

    def owes_a_look(self) -> bool:
        """Whether enough was read to ask if the writer sleeps for want of room; asking every time would cost a fence.

        A writer is refused only when more than half the ring is full: a record and its padding take a quarter each at
        most. So before the ring is empty, a quarter has been read since, and this has been true after a later tail.
        """
        if self.tail - self._asked < self._capacity // 4:
            return False
        self._asked = self.tail
        return True

    def release(self) -> None:
        """Let go of the memory."""
        self._words.release()
