"""Whether this machine can have the shared-memory transport at all.

One direction of frames: a byte ring with one writer process and one reader process.

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

One direction of payload chunks: a few fixed slots used in turn, with the same law as the ring.

`head` counts the chunks ever written, `tail` those ever taken out; slot = counter mod number of slots. Chunks have a
place of their own, beside the frame ring and not in it, so that a frame never stands behind more than the one chunk
that the reader is copying, and so that a payload never takes the room of frames. The same few slots are used again
and again, so the bytes pass from one core to the other through the cache.

Copies are slice assignments between memoryviews: one memcpy, as fast as NumPy's (measured). They hold the
interpreter's lock for about 25 µs per chunk; NumPy would release it, and could then wait a whole switch interval (5
ms) to get it back from a thread that computes.

The Unix socket beside the rings: it ends the peer's sleep, and its hang-up tells of the peer's death.

Sleeping words: each side has one in the segment, which only it writes. 0: awake. Otherwise asleep, and the number of
the nap; its lowest bit says that the sleeper waits for room as well as for news. Who changed something for a sleeper
writes one byte, once per nap (`_rung` remembers which), so bytes never pile up in the socket.

The race, and where it is closed. The sleeper stores "asleep", then looks at the rings a last time; the other side
stores its new head, then looks whether somebody sleeps. Total store order allows one exception, a load overtaking an
*earlier store to another word*: each could miss the other's store, and the sleeper would sleep on. So both sides
execute an atomic read-modify-write between their store and their load, which on x86 is a full fence: every acquire
and release of a threading.Lock contains one. The sender releases the lock of its FrameSender or PayloadSender there,
the receiver and the sleeper call `fence()`, and so does who changed other memory that the sleeper looks at before it
calls `nudge`. The timed re-check of ShmTransport.due stands behind that as a second
line.

When a carrier ends, and who may then free what the driving thread might be using.

The driver says "inside", then looks whether the carrier has ended; who ends it says "ended", then looks whether the
driver is inside. Attributes of an object are stored and loaded one at a time, in one order for all threads of the
process, so at least one of the two sees the other, and no lock is needed on the way of every frame:
  the driver sees "ended"   it stays outside, and whoever ended the carrier frees
  it was inside before      whoever ended the carrier leaves the freeing to the driver, and may wait for it
"""

from __future__ import annotations

import os
import platform
import socket
import struct
import threading
from typing import Final, NamedTuple

from nexar.transport.base import Buffer, CarrierLost

_TOTAL_STORE_ORDER: Final = frozenset({"x86_64", "AMD64"})


def missing_support() -> str | None:
    """Why not, as a sentence; None if it can. Network carriers serve where it cannot."""
    machine = platform.machine()
    if machine not in _TOTAL_STORE_ORDER:
        return f"the rings need a CPU with total store order (x86-64), this one is {machine}"
    if not hasattr(os, "memfd_create") or not hasattr(socket, "SO_PEERCRED"):
        return f"memory passed by descriptor needs Linux, this is {platform.system()}"
    return None


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


class RingCorrupt(Exception):
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
            raise RingCorrupt(f"ring tail {tail} is outside {self._tail}..{self._head}")
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
            raise RingCorrupt(f"ring head {head} is outside {self.head}..{self.tail + self._capacity}")
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
            raise RingCorrupt(f"record of {size} bytes at {at} reaches beyond what was written")
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


_DESCRIPTOR: Final = struct.Struct("<QQQQ")
DESCRIPTOR_BYTES: Final = _DESCRIPTOR.size
WITHDRAWN: Final = 2**64 - 1
"""As `total`: no further chunk of this transfer follows."""


class SlotChunk(NamedTuple):
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

    def write(self, chunk: SlotChunk, data: memoryview) -> None:
        """Fill the next slot; there is room."""
        index = self.head % len(self._slots)
        _DESCRIPTOR.pack_into(self._descriptors, index * DESCRIPTOR_BYTES, *chunk)
        self._slots[index][: chunk.length] = data
        self.head += 1
        self._counters[self._head_word] = self.head  # publishes: after every byte

    def _look_at_tail(self) -> int:
        tail: int = self._counters[self._tail_word]
        if not self._tail <= tail <= self.head:
            raise RingCorrupt(f"chunk tail {tail} is outside {self._tail}..{self.head}")
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

    def next(self) -> SlotChunk | None:
        """The oldest chunk, its description copied out of the segment; it stays until `advance`."""
        head: int = self._counters[self._head_word]
        if head == self.tail:
            return None
        if not 0 < head - self.tail <= len(self._slots):
            raise RingCorrupt(f"chunk head {head} is outside {self.tail}..{self.tail + len(self._slots)}")
        chunk = SlotChunk(*_DESCRIPTOR.unpack_from(self._descriptors, self.tail % len(self._slots) * DESCRIPTOR_BYTES))
        if chunk.length > len(self._slots[0]):
            raise RingCorrupt(f"chunk of {chunk.length} bytes in a slot of {len(self._slots[0])}")
        return chunk

    def copy(self, chunk: SlotChunk, into: memoryview) -> None:
        """Copy the chunk's bytes into `into`, which has exactly its length."""
        into[:] = self._slots[self.tail % len(self._slots)][: chunk.length]

    def advance(self) -> None:
        """Give the slot back to the writer."""
        self.tail += 1
        self._counters[self._tail_word] = self.tail


_BYTE: Final = b"\x01"
_NOTE: Final = b"\x00"  # what follows is the reason of an abort
_NOTE_BYTES: Final = 200

_fence_lock: Final = threading.Lock()


def fence() -> None:
    """Everything stored before is visible to other processes before anything after is loaded."""
    _fence_lock.acquire()
    _fence_lock.release()


class WakeSocket:
    """This side's end of the socket, and its sleeping word."""

    __slots__ = ("_lock", "_mine", "_note", "_rung", "_socket", "_theirs", "_words", "hung_up")

    def __init__(self, connection: socket.socket, words: memoryview, mine: int, theirs: int) -> None:
        """`mine` and `theirs`: where in `words` each side's sleeping word is."""
        self._socket = connection
        self._words = words
        self._mine = mine
        self._theirs = theirs
        self._lock = threading.Lock()  # for closing while another thread rings
        self._rung = 0  # the nap we last rang for; any thread writes it, and a race costs one needless byte
        self._note = b""  # what the peer said of its abort; the driving thread writes
        self.hung_up = False  # the peer is gone; the driving thread writes

    def fileno(self) -> int:
        """The descriptor to watch."""
        return self._socket.fileno()

    def fall_asleep(self, nap: int, wants_room: bool) -> None:
        """Ask for a byte. The caller fences and looks at the rings again before it sleeps. `nap` is even and new."""
        self._words[self._mine] = nap | wants_room

    def wake(self) -> None:
        """Ask for no more bytes."""
        self._words[self._mine] = 0

    def wake_peer(self) -> None:
        """Wake the peer if it sleeps: something changed in memory outside this segment. The caller has fenced. From any
        thread; without effect once the carrier has ended.
        """
        try:
            nap = self._words[self._theirs]
        except ValueError:
            return  # the segment is gone, and the peer hears of that
        if nap:
            self.ring(nap)

    def ring(self, nap: int) -> None:
        """Wake the peer from that nap, unless we have done so. From any thread."""
        if nap == self._rung:
            return
        self._rung = nap
        with self._lock:
            if self._socket.fileno() >= 0:
                self._send(_BYTE)

    def _send(self, data: bytes) -> None:
        try:
            self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return  # full of bytes unread: the peer's sleep ends anyway
        except OSError:
            return  # the peer is gone: its hang-up is readable here, and `drain` tells

    def drain(self) -> None:
        """Take the bytes out, notice a hang-up. By the driving thread."""
        with self._lock:
            data = _BYTE if self._socket.fileno() < 0 else self._receive()
        self.hung_up = self.hung_up or not data
        if self._note or _NOTE in data:
            self._note = (self._note + data[data.find(_NOTE) if not self._note else 0 :])[: _NOTE_BYTES + 1]

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(4096, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return _BYTE  # nothing there: as good as a byte
        except OSError:
            return b""  # reset: the peer died with bytes of ours unread

    def farewell(self) -> str:
        """Why the peer is gone, as far as it said."""
        if not self._note:
            return "the peer's process ended or closed the connection"
        return "the peer ended it: " + self._note[1:].decode(errors="replace")

    def close(self, reason: str | None) -> None:
        """Hang up, with the reason of an abort if there is one. Idempotent."""
        with self._lock:
            if self._socket.fileno() < 0:
                return
            if reason is not None:
                self._send(_NOTE + reason.encode()[:_NOTE_BYTES])
            self._hang_up()
            self._socket.close()

    def _hang_up(self) -> None:
        # Closing alone would not do while a forked child holds a copy of the descriptor.
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer was first

    def abandon(self) -> None:
        """In a forked child: drop the descriptor, without a lock that some thread of the parent may hold for ever."""
        self._socket.close()


class CarrierLifetime:
    """Open until `end`. `enter` and `leave` are the driving thread's, the rest is for any thread."""

    __slots__ = ("_lock", "_quiet", "driver", "ended")

    def __init__(self) -> None:
        self.driver = 0  # the thread inside, 0 for none; the driving thread writes
        self.ended: CarrierLost | None = None  # written once, under the lock
        self._quiet: threading.Event | None = (
            None  # set when the driver has left an ended carrier; written under the lock
        )
        self._lock = threading.Lock()

    def enter(self) -> bool:
        """False if the carrier has ended; else nothing is freed before `leave`."""
        self.driver = threading.get_ident()
        if self.ended is None:
            return True
        self.leave()
        self.settle()
        return False

    def leave(self) -> bool:
        """True if the carrier has ended meanwhile: the caller frees, then calls `settle`."""
        self.driver = 0
        return self.ended is not None

    def settle(self) -> None:
        """Let those in `wait_outside` go."""
        with self._lock:
            quiet = self._quiet
        if quiet is not None:
            quiet.set()

    def end(self, error: CarrierLost) -> bool:
        """Mark it ended; False if it was."""
        with self._lock:
            if self.ended is not None:
                return False
            self.ended = error
            return True

    def wait_outside(self) -> None:
        """Of an ended carrier: return when the driving thread is outside, or at once if that is the caller."""
        if self.driver in (0, threading.get_ident()):
            return
        with self._lock:
            self._quiet = quiet = self._quiet or threading.Event()
        if self.driver:  # if not, it may have left before there was something to set
            quiet.wait()
