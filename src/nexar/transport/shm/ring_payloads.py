"""Sending and receiving payloads through the slots."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Final

from nexar.transport.base import Redirected
from nexar.transport.payload_table import RecentTransfers
from nexar.transport.shm.ring import WITHDRAWN, CarrierLifetime, RingCorrupt, SlotChunk, SlotReader, SlotWriter

NOTHING: Final = -2  # no chunk was there
MOVED: Final = -1  # a chunk was taken; no payload is complete


@dataclass(slots=True)
class _Incoming:
    into: memoryview | None  # None: discarded
    total: int
    received: int = 0
    withdrawn: bool = False  # the sender cancelled it; forgotten only if discarded


class PayloadReceiver:
    """The driver calls `receive`, any thread the rest. After `clear` nothing changes."""

    __slots__ = ("_expected", "_life", "_lock", "_recent_transfers", "_slots", "bytes_received")

    def __init__(self, slots: SlotReader, life: CarrierLifetime) -> None:
        self._lock = threading.Lock()  # guards the table; held during a copy, so redirect waits for it
        self._expected: dict[int, _Incoming] = {}
        self._recent_transfers = RecentTransfers()
        self._slots = slots
        self._life = life
        self.bytes_received = 0  # written by the driver

    def expect(self, transfer: int, into: memoryview) -> bool:
        """Returns False after the carrier has ended."""
        with self._lock:
            if self._life.ended is not None:
                return False
            if transfer in self._expected:
                raise ValueError(f"payload {transfer} is expected already")
            self._expected[transfer] = _Incoming(into, len(into))
            self._recent_transfers.forget(transfer)
            return True

    def redirect(self, transfer: int, into: memoryview | None) -> Redirected | None:
        """Returns None after the carrier has ended."""
        with self._lock:
            if self._life.ended is not None:
                return None
            incoming = self._expected.get(transfer)
            if incoming is None or incoming.into is None:
                return Redirected.COMPLETE if transfer in self._recent_transfers else Redirected.UNKNOWN
            if into is None:
                self._discard(transfer, incoming)
            else:
                self._move(incoming, incoming.into, into)
            return Redirected.MOVED

    def _discard(self, transfer: int, incoming: _Incoming) -> None:
        # Chunks may be in flight, so it stays known until they came or the sender withdrew it.
        incoming.into = None
        if incoming.withdrawn:
            del self._expected[transfer]

    def _move(self, incoming: _Incoming, old: memoryview, into: memoryview) -> None:
        if len(into) != incoming.total:
            raise ValueError(f"a payload of {incoming.total} bytes cannot go on in {len(into)}")
        into[: incoming.received] = old[: incoming.received]
        incoming.into = into

    def receive(self) -> int:
        """Return NOTHING, MOVED, or the completed transfer. Raises RingCorrupt."""
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
        return self._slots.tail

    def clear(self) -> None:
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
    """Sends payloads, one chunk of each in turn. Any thread."""

    __slots__ = ("_closed", "_lock", "_queue", "_slots", "bytes_sent", "waiting")

    def __init__(self, slots: SlotWriter) -> None:
        self._lock = threading.Lock()  # guards queue and slots; held during a copy, so withdraw waits for it
        self._queue: deque[_Outgoing] = deque()
        self._slots = slots
        self._closed = False
        self.waiting = False  # the queue is not empty; written under the lock, read without it
        self.bytes_sent = 0

    def add(self, transfer: int, data: memoryview) -> bool:
        """Returns False after seal or close."""
        with self._lock:
            if self._closed:
                return False
            self._queue.append(_Outgoing(transfer, data, len(data)))
            self.waiting = True
            return True

    def pump(self, limit: int) -> int:
        """Return how many slots were filled. Raises RingCorrupt."""
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
        """Returns True for the last chunk."""
        start = outgoing.sent
        piece = outgoing.data[start : start + self._slots.chunk_bytes]
        self._slots.write(SlotChunk(outgoing.transfer, start, len(piece), outgoing.total), piece)
        outgoing.sent += len(piece)
        self.bytes_sent += len(piece)
        return outgoing.sent >= outgoing.total or outgoing.total == WITHDRAWN

    def withdraw(self, transfer: int) -> None:
        with self._lock:
            for outgoing in self._queue:
                if outgoing.transfer == transfer:
                    outgoing.data = memoryview(b"")
                    outgoing.sent, outgoing.total = 0, WITHDRAWN

    def seal(self) -> int | None:
        """Refuse further payloads and return the number of chunks sent; None, without effect, if payloads wait."""
        with self._lock:
            if self._queue:
                return None
            self._closed = True
            return self._slots.head

    def can_move(self) -> bool:
        return self.waiting and self._slots.may_have_room()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._queue.clear()
            self.waiting = False
