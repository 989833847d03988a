"""One direction of frames: a byte ring with one writer process and one reader process.

Law     `head` counts the bytes ever written, `tail` the bytes ever read; both only grow. The writer alone stores `head`,
        the reader alone stores `tail`, and 0 <= head - tail <= capacity at every moment. Position = counter mod capacity.
Record  one word (size | kind << 32 | lane << 40), then `size` bytes, then nothing up to the next multiple of 64, so two
        records never share a cache line. A record is contiguous: where it would cross the end, a PAD fills the rest.
        (Splitting it instead would cost the reader a copy, and the sink could not read straight from the ring.)
        A frame above a quarter of the ring travels as MORE … MORE LAST records of its lane and is joined by the reader.

Why plain stores are enough: x86 is a total-store-order machine. A core's stores become visible to others in program
order, and loads are not reordered with other loads. So a reader that sees the new `head` sees every byte stored before
it, and a writer that sees the new `tail` knows that the reader's loads were done. A counter is one aligned 8-byte word,
which `memoryview` of format Q stores and loads by a single move: it is never seen half written. On CPUs with weaker
order both statements are false, and `support.py` refuses them.

The other process is not believed. Each side keeps its own counter in its own memory and only *publishes* it; a word from
the segment is loaded once, then checked, then used, because it may change between two looks.
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


class Corrupt(Exception):
    """The segment holds what no correct peer writes."""


class RingWriter:
    """The end that appends. Whoever calls `write` holds the lock of its FrameSender."""

    __slots__ = ("_capacity", "_counters", "_data", "_head", "_head_word", "_tail", "_tail_word", "_words", "largest")

    def __init__(self, counters: memoryview, head_word: int, tail_word: int, data: memoryview) -> None:
        self._counters = counters
        self._head_word = head_word
        self._tail_word = tail_word
        self._data = data
        self._words = data.cast("Q")
        self._capacity = len(data)
        self._head = 0  # the truth; the word in the segment is its copy
        self._tail = 0  # the last value seen there: looked at again only when the ring seems full
        self.largest = self._capacity // 4 - PREFIX_BYTES

    def write(self, parts: tuple[Buffer, ...], mark: int = 0) -> bool:
        """Append one record, the parts joined; False (nothing changed) when it does not fit now. At most `largest` bytes."""
        size = 0
        for part in parts:
            size += len(part)
        head, at = self._place(size)
        if at < 0:
            return False
        self._words[at >> 3] = size | mark << 32
        data = self._data
        at += PREFIX_BYTES
        for part in parts:
            end = at + len(part)
            data[at:end] = part
            at = end
        self._head = head
        self._counters[self._head_word] = head  # publishes: after every byte, see the module's law
        return True

    def _place(self, size: int) -> tuple[int, int]:
        """The head after a record of `size` bytes, and where it goes (-1: no room), with a PAD written if it must wrap."""
        span = (size + PREFIX_BYTES + _ALIGN - 1) & -_ALIGN
        head = self._head
        capacity = self._capacity
        at = head & (capacity - 1)
        rest = capacity - at
        skip = rest if span > rest else 0
        if head + skip + span - self._tail > capacity and head + skip + span - self._look_at_tail() > capacity:
            return head, -1
        if skip:
            self._words[at >> 3] = (skip - PREFIX_BYTES) | PAD << 32
            at = 0
        return head + skip + span, at

    def _look_at_tail(self) -> int:
        tail: int = self._counters[self._tail_word]
        if not self._tail <= tail <= self._head:
            raise Corrupt(f"ring tail {tail} is outside {self._tail}..{self._head}")
        self._tail = tail
        return tail

    def room_grew(self) -> bool:
        """Whether the reader has moved since the writer last looked."""
        return bool(self._counters[self._tail_word] != self._tail)

    def release(self) -> None:
        """Let go of the memory."""
        self._words.release()


class RingReader:
    """The end that takes away; used by the driving thread only."""

    __slots__ = (
        "_capacity",
        "_counters",
        "_head",
        "_head_word",
        "_span",
        "_tail_word",
        "_words",
        "data",
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
        self.tail = 0  # the truth; the word in the segment is its copy
        self._head = 0  # what the last refresh saw, already checked
        self._span = 0
        self.size = 0
        self.mark = 0  # kind | lane << 8 of the record `next` found

    def refresh(self) -> bool:
        """Look at the writer's head. `next` reads up to what was seen here, so a fast writer cannot hold the reader forever."""
        head: int = self._counters[self._head_word]
        if not self._head <= head <= self.tail + self._capacity or head % _ALIGN:
            raise Corrupt(f"ring head {head} is outside {self._head}..{self.tail + self._capacity}")
        self._head = head
        return head != self.tail

    def next(self) -> int:
        """Where the oldest record's bytes start (`size` and `mark` describe it), or -1. It stays until `advance`."""
        tail = self.tail
        if tail == self._head:
            return -1
        at = tail & (self._capacity - 1)
        word: int = self._words[at >> 3]  # one load: what is checked below is what is used
        self.size = size = word & 0xFFFFFFFF
        self.mark = word >> 32
        self._span = span = (size + PREFIX_BYTES + _ALIGN - 1) & -_ALIGN
        if at + span > self._capacity or tail + span > self._head:
            raise Corrupt(f"record of {size} bytes at {at} reaches beyond what was written")
        if self.mark == PAD:
            return self._skip(at, span)
        return at + PREFIX_BYTES

    def _skip(self, at: int, span: int) -> int:
        # A correct writer pads once, exactly to the end, and goes on at 0; so this calls `next` at most once in a row.
        if at == 0 or at + span != self._capacity:
            raise Corrupt(f"padding of {span} bytes at {at}")
        self.advance()
        return self.next()

    def advance(self) -> None:
        """Give the record's bytes back to the writer."""
        self.tail = tail = self.tail + self._span
        self._counters[self._tail_word] = tail

    def release(self) -> None:
        """Let go of the memory."""
        self._words.release()
