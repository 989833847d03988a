"""Payloads on their way out: each borrowed until its last byte is in a slot, or until it is withdrawn."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from nexar.transport.shm.slots import WITHDRAWN, Chunk, SlotWriter


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
        self._slots.write(Chunk(outgoing.transfer, start, len(piece), outgoing.total), piece)
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
