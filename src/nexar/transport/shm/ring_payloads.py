"""Payloads on their way in: straight from the slots into the memory that was named for them beforehand.

Payloads on their way out: each borrowed until its last byte is in a slot, or until it is withdrawn.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Final

from nexar.transport.base import Redirected
from nexar.transport.payload_table import RecentTransfers
from nexar.transport.shm.ring import WITHDRAWN, CarrierLifetime, RingCorrupt, SlotChunk, SlotReader, SlotWriter

NOTHING: Final = -2
"""No chunk was there."""
MOVED: Final = -1
"""A chunk was taken, no payload is complete by it."""


@dataclass(slots=True)
class _Incoming:
    into: memoryview | None  # None: discarded
    total: int
    received: int = 0
    withdrawn: bool = False  # the sender let go of it; only a discarded one may be forgotten then


class PayloadReceiver:
    """`receive` is the driving thread's; the rest is called from any thread. Whether the carrier has ended is asked
    under the lock, which `clear` takes after the end: so nothing is moved, or said to have landed, behind it.
    """

    __slots__ = ("_expected", "_life", "_lock", "_recent_transfers", "_slots", "bytes_received")

    def __init__(self, slots: SlotReader, life: CarrierLifetime) -> None:
        self._lock = threading.Lock()  # over the table; a chunk is copied under it, so redirect can wait for that
        self._expected: dict[int, _Incoming] = {}
        self._recent_transfers = RecentTransfers()
        self._slots = slots
        self._life = life
        self.bytes_received = 0  # the driving thread writes

    def expect(self, transfer: int, into: memoryview) -> bool:
        """Name the memory for a payload. False after the end."""
        with self._lock:
            if self._life.ended is not None:
                return False
            if transfer in self._expected:
                raise ValueError(f"payload {transfer} is expected already")
            self._expected[transfer] = _Incoming(into, len(into))
            self._recent_transfers.forget(transfer)
            return True

    def redirect(self, transfer: int, into: memoryview | None) -> Redirected | None:
        """Continue elsewhere, or nowhere; the old memory is free on return. None after the end."""
        with self._lock:
            if self._life.ended is not None:
                return None
            incoming = self._expected.get(transfer)
            if incoming is None or incoming.into is None:
                return Redirected.LANDED if transfer in self._recent_transfers else Redirected.UNKNOWN
            if into is None:
                self._discard(transfer, incoming)
            else:
                self._move(incoming, incoming.into, into)
            return Redirected.MOVED

    def _discard(self, transfer: int, incoming: _Incoming) -> None:
        # Chunks of it may be under way, so it stays known until they came or the sender let go.
        incoming.into = None
        if incoming.withdrawn:
            del self._expected[transfer]

    def _move(self, incoming: _Incoming, old: memoryview, into: memoryview) -> None:
        if len(into) != incoming.total:
            raise ValueError(f"a payload of {incoming.total} bytes cannot go on in {len(into)}")
        into[: incoming.received] = old[: incoming.received]
        incoming.into = into

    def receive(self) -> int:
        """Take one chunk: NOTHING, MOVED, or the number of the payload it completed. Corrupt."""
        chunk = self._slots.next()
        if chunk is None:
            return NOTHING
        with self._lock:
            outcome = self._withdraw(chunk) if chunk.total == WITHDRAWN else self._take(chunk)
        self._slots.advance()
        return outcome

    def _take(self, chunk: SlotChunk) -> int:
        incoming = self._expected.get(chunk.transfer)
        if incoming is None:
            raise RingCorrupt(f"a chunk of payload {chunk.transfer}, which nobody expects")
        self._check(chunk, incoming)
        if incoming.into is not None:
            self._slots.copy(chunk, incoming.into[chunk.offset : chunk.offset + chunk.length])
        self.bytes_received += chunk.length
        incoming.received += chunk.length
        if incoming.received < incoming.total:
            return MOVED
        del self._expected[chunk.transfer]
        if incoming.into is None:
            return MOVED
        self._recent_transfers.add(chunk.transfer)
        return chunk.transfer

    def _check(self, chunk: SlotChunk, incoming: _Incoming) -> None:
        if (
            chunk.total != incoming.total
            or chunk.offset != incoming.received
            or chunk.offset + chunk.length > chunk.total
        ):
            raise RingCorrupt(f"{chunk} where byte {incoming.received} of {incoming.total} was next")
        if incoming.withdrawn or (chunk.length == 0 and chunk.total):
            raise RingCorrupt(f"{chunk} brings nothing, or comes after its end")

    def _withdraw(self, chunk: SlotChunk) -> int:
        incoming = self._expected.get(chunk.transfer)
        if incoming is None:
            raise RingCorrupt(f"the end of payload {chunk.transfer}, which nobody expects")
        incoming.withdrawn = True
        if incoming.into is None:
            del self._expected[chunk.transfer]
        return MOVED

    def chunks_received(self) -> int:
        """How many chunks were taken out of the slots."""
        return self._slots.tail

    def clear(self) -> None:
        """It has ended: let go of all memory."""
        with self._lock:
            self._expected.clear()
            self._recent_transfers.clear()


@dataclass(slots=True)
class _Outgoing:
    transfer: int
    data: memoryview
    total: int
    sent: int = 0


class PayloadSender:
    """Called from any thread. Payloads take turns, a chunk each, so a small one does not wait for a large one."""

    __slots__ = ("_closed", "_lock", "_queue", "_slots", "bytes_sent", "waiting")

    def __init__(self, slots: SlotWriter) -> None:
        self._lock = (
            threading.Lock()
        )  # over the queue and the slots: a chunk is copied under it, so withdraw can wait for that
        self._queue: deque[_Outgoing] = deque()
        self._slots = slots
        self._closed = False
        self.waiting = False  # the queue is not empty; written under the lock, read without it
        self.bytes_sent = 0

    def add(self, transfer: int, data: memoryview) -> bool:
        """Queue a payload; `pump` moves it. False after seal or close."""
        with self._lock:
            if self._closed:
                return False
            self._queue.append(_Outgoing(transfer, data, len(data)))
            self.waiting = True
            return True

    def pump(self, limit: int) -> int:
        """Fill at most `limit` slots, one lock hold each; returns how many. Corrupt."""
        for filled in range(limit):
            if not self._fill():
                return filled
        return limit

    def _fill(self) -> bool:
        with self._lock:
            if not self._queue or not self._slots.has_room():
                return False
            outgoing = self._queue.popleft()
            if not self._send_chunk(outgoing):
                self._queue.append(outgoing)
            self.waiting = bool(self._queue)
            return True

    def _send_chunk(self, outgoing: _Outgoing) -> bool:
        """True if it was the last one."""
        start = outgoing.sent
        piece = outgoing.data[start : start + self._slots.chunk_bytes]
        self._slots.write(SlotChunk(outgoing.transfer, start, len(piece), outgoing.total), piece)
        outgoing.sent += len(piece)
        self.bytes_sent += len(piece)
        return outgoing.sent >= outgoing.total or outgoing.total == WITHDRAWN

    def withdraw(self, transfer: int) -> None:
        """Let go of a payload's memory; what is not sent yet never is, and the peer's carrier learns that no more
        comes.
        """
        with self._lock:
            for outgoing in self._queue:
                if outgoing.transfer == transfer:
                    outgoing.data = memoryview(b"")
                    outgoing.sent, outgoing.total = 0, WITHDRAWN

    def seal(self) -> int | None:
        """Take no more payloads and tell how many chunks were sent; None if some still wait."""
        with self._lock:
            if self._queue:
                return None
            self._closed = True
            return self._slots.head

    def can_move(self) -> bool:
        """Whether `pump` may get further than the last time."""
        return self.waiting and self._slots.may_have_room()

    def close(self) -> None:
        """Let go of all payloads."""
        with self._lock:
            self._closed = True
            self._queue.clear()
            self.waiting = False
