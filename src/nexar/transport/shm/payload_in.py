"""Payloads on their way in: straight from the slots into the memory that was named for them beforehand."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

from nexar.transport.base import Redirected
from nexar.transport.landed import Landed
from nexar.transport.shm.lifetime import Lifetime
from nexar.transport.shm.ring import Corrupt
from nexar.transport.shm.slots import WITHDRAWN, Chunk, SlotReader

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

    __slots__ = ("_expected", "_landed", "_life", "_lock", "_slots", "bytes_received")

    def __init__(self, slots: SlotReader, life: Lifetime) -> None:
        self._lock = threading.Lock()  # over the table; a chunk is copied under it, so redirect can wait for that
        self._expected: dict[int, _Incoming] = {}
        self._landed = Landed()
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
            self._landed.forget(transfer)
            return True

    def redirect(self, transfer: int, into: memoryview | None) -> Redirected | None:
        """Continue elsewhere, or nowhere; the old memory is free on return. None after the end."""
        with self._lock:
            if self._life.ended is not None:
                return None
            incoming = self._expected.get(transfer)
            if incoming is None or incoming.into is None:
                return Redirected.LANDED if transfer in self._landed else Redirected.UNKNOWN
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

    def _take(self, chunk: Chunk) -> int:
        incoming = self._expected.get(chunk.transfer)
        if incoming is None:
            raise Corrupt(f"a chunk of payload {chunk.transfer}, which nobody expects")
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
        self._landed.add(chunk.transfer)
        return chunk.transfer

    def _check(self, chunk: Chunk, incoming: _Incoming) -> None:
        if (
            chunk.total != incoming.total
            or chunk.offset != incoming.received
            or chunk.offset + chunk.length > chunk.total
        ):
            raise Corrupt(f"{chunk} where byte {incoming.received} of {incoming.total} was next")
        if incoming.withdrawn or (chunk.length == 0 and chunk.total):
            raise Corrupt(f"{chunk} brings nothing, or comes after its end")

    def _withdraw(self, chunk: Chunk) -> int:
        incoming = self._expected.get(chunk.transfer)
        if incoming is None:
            raise Corrupt(f"the end of payload {chunk.transfer}, which nobody expects")
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
            self._landed.clear()
