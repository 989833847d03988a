"""Rings and slots in shared memory, the wakeup socket, and the lifetime of a carrier.

Ring: `head` counts the bytes written (only the writer stores it), `tail` the bytes read (only the reader stores it); 0
<= head - tail <= capacity. A record is a word (size | kind << 32 | lane << 40) and `size` bytes, padded to a cache
line. It is contiguous (PAD fills the end of the ring) and at most a quarter of the ring; larger frames are split into
MORE … LAST records.

Slots: payload chunks use a few fixed slots with the same counters, so a frame waits for at most one chunk. Slice
assignment holds the GIL for 25 µs per chunk; NumPy would release it and could wait 5 ms to get it back.

Memory order: on x86 (total store order) a reader that sees the new `head` sees all bytes stored before it, and a writer
that sees the new `tail` knows that the loads are done. Other CPUs are refused.

Trust: each side keeps its own counter privately. A word of the segment is loaded once, checked, then used.

Sleep: a side's sleep word is 0 while it is awake, else the number of its sleep; the lowest bit means that it also waits
for room. The sleeper stores its word, then checks the rings. The other side stores its head, then checks the word and
sends one byte per sleep. Both fence in between, because a load may overtake an earlier store.

Lifetime: the driver stores "inside", then checks "ended"; the ending thread does the reverse, so one sees the other. A
driver that was inside frees the memory when it leaves; otherwise the ending thread frees it.
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
    """Return why this machine cannot use shared memory, or None."""
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

# A record of n bytes takes (n + UP) & DOWN bytes. Constants, because it is computed four times per frame.
UP: Final = PREFIX_BYTES + _ALIGN - 1
DOWN: Final = -_ALIGN


class RingCorrupt(Exception):
    """The segment contains data that no correct peer writes."""


def largest_record(capacity: int) -> int:
    """Return the size limit of a record."""
    return capacity // 4 - PREFIX_BYTES


class RingWriter:
    """The writing end. Callers hold the lock of RingFrameSender."""

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
        self._head = 0  # authoritative; the segment holds a copy
        self._tail = 0  # last value seen; read again only when the ring seems full
        self.largest = largest_record(self._capacity)

    def write(self, first: Buffer, rest: tuple[Buffer, ...], size: int, mark: int = 0) -> bool:
        """Append one record; False if it does not fit now. `mark` is kind << 32 | lane << 40."""
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
        self._counters[self._head_word] = after  # publish after all bytes
        return True

    def _make_room(self, at: int, span: int) -> tuple[int, int]:
        """Return the new head and the position (-1: no room). Writes a PAD to wrap."""
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
        return self._head

    def room_grew(self) -> bool:
        return bool(self._counters[self._tail_word] != self._tail)

    def release(self) -> None:
        self._words.release()


class RingReader:
    """The reading end; driver only. While `tail` differs from `head`, call `next` and `advance`."""

    __slots__ = (
        "_capacity",
        "_checked_at",
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
        self.tail = 0  # authoritative; the segment holds a copy
        self.head = 0  # checked value of the last refresh
        self._span = 0  # bytes that `advance` frees
        self._checked_at = 0  # tail when `should_check_writer` was last true
        self.size = 0
        self.mark = 0  # kind | lane << 8 of the current record

    def refresh(self) -> bool:
        """Read the head; True if there are records. Later records wait, so a fast writer cannot hold the reader."""
        head: int = self._counters[self._head_word]
        if not self.head <= head <= self.tail + self._capacity or head % _ALIGN:
            raise RingCorrupt(f"ring head {head} is outside {self.head}..{self.tail + self._capacity}")
        self.head = head
        return head != self.tail

    def next(self) -> int:
        at = self.tail & self._mask
        word: int = self._words[at >> 3]  # one load: the checked value is the used value
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
        self.tail = tail = self.tail + self._span
        self._counters[self._tail_word] = tail

    def should_check_writer(self) -> bool:
        """Whether to check if the writer waits for room, which costs a fence. True once per quarter ring: a writer is
        refused only above half of the ring, so a quarter is read before the ring is empty.
        """
        if self.tail - self._checked_at < self._capacity // 4:
            return False
        self._checked_at = self.tail
        return True

    def release(self) -> None:
        self._words.release()


_DESCRIPTOR: Final = struct.Struct("<QQQQ")
DESCRIPTOR_BYTES: Final = _DESCRIPTOR.size
WITHDRAWN: Final = 2**64 - 1  # as `total`: no further chunk follows


class SlotChunk(NamedTuple):
    """`length` bytes of payload `transfer` (of `total` bytes), from byte `offset`."""

    transfer: int
    offset: int
    length: int
    total: int


class SlotWriter:
    """The writing end of the slots. Callers hold the lock of PayloadSender."""

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
        self.head = 0  # authoritative; the segment holds a copy
        self._tail = 0  # last value seen

    def has_room(self) -> bool:
        return self.head - self._tail < len(self._slots) or self.head - self._look_at_tail() < len(self._slots)

    def write(self, chunk: SlotChunk, data: memoryview) -> None:
        index = self.head % len(self._slots)
        _DESCRIPTOR.pack_into(self._descriptors, index * DESCRIPTOR_BYTES, *chunk)
        self._slots[index][: chunk.length] = data
        self.head += 1
        self._counters[self._head_word] = self.head  # publish after all bytes

    def _look_at_tail(self) -> int:
        tail: int = self._counters[self._tail_word]
        if not self._tail <= tail <= self.head:
            raise RingCorrupt(f"chunk tail {tail} is outside {self._tail}..{self.head}")
        self._tail = tail
        return tail

    def may_have_room(self) -> bool:
        """Like `has_room`, but never raises."""
        return self.head - self._tail < len(self._slots) or bool(self._counters[self._tail_word] != self._tail)


class SlotReader:
    """The reading end of the slots; driver only."""

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
        self.tail = 0  # authoritative; the segment holds a copy

    def next(self) -> SlotChunk | None:
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
        into[:] = self._slots[self.tail % len(self._slots)][: chunk.length]

    def advance(self) -> None:
        self.tail += 1
        self._counters[self._tail_word] = self.tail


_BYTE: Final = b"\x01"
_NOTE: Final = b"\x00"  # the reason of an abort follows
_NOTE_BYTES: Final = 200

_fence_lock: Final = threading.Lock()


def fence() -> None:
    """Make all earlier stores visible to other processes before later loads, as a lock does."""
    _fence_lock.acquire()
    _fence_lock.release()


class WakeSocket:
    """This side's end of the Unix socket and its sleep word."""

    __slots__ = ("_lock", "_mine", "_note", "_signalled", "_socket", "_theirs", "_words", "peer_closed")

    def __init__(self, connection: socket.socket, words: memoryview, mine: int, theirs: int) -> None:
        self._socket = connection
        self._words = words
        self._mine = mine
        self._theirs = theirs
        self._lock = threading.Lock()  # for closing while another thread signals
        self._signalled = 0  # the sleep last signalled; a race costs one needless byte
        self._note = b""  # reason of the peer's abort; written by the driver
        self.peer_closed = False  # the peer is gone; written by the driver

    def fileno(self) -> int:
        return self._socket.fileno()

    def fall_asleep(self, sleep_number: int, wants_room: bool) -> None:
        """The caller then fences and checks the rings. `sleep_number` is even and new."""
        self._words[self._mine] = sleep_number | wants_room

    def wake(self) -> None:
        self._words[self._mine] = 0

    def wake_peer(self) -> None:
        """The caller has fenced. Any thread."""
        try:
            sleep_number = self._words[self._theirs]
        except ValueError:
            return  # the segment is gone; the peer is notified of that
        if sleep_number:
            self.signal(sleep_number)

    def signal(self, sleep_number: int) -> None:
        """Send one byte per sleep. Any thread."""
        if sleep_number == self._signalled:
            return
        self._signalled = sleep_number
        with self._lock:
            if self._socket.fileno() >= 0:
                self._send(_BYTE)

    def _send(self, data: bytes) -> None:
        try:
            self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return  # full of unread bytes: the peer wakes anyway
        except OSError:
            return  # the peer is gone: the socket is readable, and `drain` notices it

    def drain(self) -> None:
        """Read pending bytes and detect a close. Driver only."""
        with self._lock:
            data = _BYTE if self._socket.fileno() < 0 else self._receive()
        self.peer_closed = self.peer_closed or not data
        if self._note or _NOTE in data:
            self._note = (self._note + data[data.find(_NOTE) if not self._note else 0 :])[: _NOTE_BYTES + 1]

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(4096, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return _BYTE  # nothing there: as good as a byte
        except OSError:
            return b""  # reset: the peer died with unread bytes

    def close_reason(self) -> str:
        if not self._note:
            return "the peer's process ended or closed the connection"
        return "the peer ended it: " + self._note[1:].decode(errors="replace")

    def close(self, reason: str | None) -> None:
        """Idempotent."""
        with self._lock:
            if self._socket.fileno() < 0:
                return
            if reason is not None:
                self._send(_NOTE + reason.encode()[:_NOTE_BYTES])
            self._hang_up()
            self._socket.close()

    def _hang_up(self) -> None:
        # Closing alone is not enough while a forked child holds the descriptor.
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer was first

    def abandon(self) -> None:
        self._socket.close()


class CarrierLifetime:
    """Open until `end`. The driver calls `enter` and `leave`, any thread the rest."""

    __slots__ = ("_lock", "_quiet", "driver", "ended")

    def __init__(self) -> None:
        self.driver = 0  # the thread inside, 0 for none; written by the driver
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
        """True if the carrier has ended: the caller frees and calls `settle`."""
        self.driver = 0
        return self.ended is not None

    def settle(self) -> None:
        with self._lock:
            quiet = self._quiet
        if quiet is not None:
            quiet.set()

    def end(self, error: CarrierLost) -> bool:
        """False if it had already ended."""
        with self._lock:
            if self.ended is not None:
                return False
            self.ended = error
            return True

    def wait_outside(self) -> None:
        """Wait until the driver has left; returns at once in the driver."""
        if self.driver in (0, threading.get_ident()):
            return
        with self._lock:
            self._quiet = quiet = self._quiet or threading.Event()
        if self.driver:  # otherwise it may have left before there was an event to set
            quiet.wait()
