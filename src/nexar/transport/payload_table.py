"""The expected payloads of one carrier. No I/O.

Invariant: a chunk is accepted only for an expected payload, at exactly the next byte, and not beyond its end. A
discarded payload is still counted, so that its remaining chunks are recognised.

Completed payloads are remembered so that a late redirect reports COMPLETE. Few suffice, because the caller has not seen
`payload_arrived` return. No caller treats a forgotten one (UNKNOWN) as complete.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from nexar.transport.base import CarrierLost, Redirected
from nexar.wire.frame import MAX_CHUNK_BYTES, Frame

REMEMBERED: Final = 4096


class RecentTransfers:
    """The newest complete transfers. The owner's lock guards it."""

    __slots__ = ("_transfers",)

    def __init__(self) -> None:
        self._transfers: dict[int, None] = {}  # oldest first

    def add(self, transfer: int) -> None:
        self._transfers[transfer] = None
        if len(self._transfers) > REMEMBERED:
            del self._transfers[next(iter(self._transfers))]

    def forget(self, transfer: int) -> None:
        self._transfers.pop(transfer, None)

    def clear(self) -> None:
        self._transfers.clear()

    def __contains__(self, transfer: int) -> bool:
        return transfer in self._transfers


# A payload withdrawn by the peer never completes. Its number is kept until this many newer ones were discarded.
MAX_DISCARDED: Final = 1 << 16


@dataclass(slots=True)
class _ExpectedPayload:
    size: int
    into: memoryview | None
    received: int = 0


class PayloadTable:
    """Expected payloads and the chunk being received. The data connection's lock guards it."""

    def __init__(self) -> None:
        self._expected: dict[int, _ExpectedPayload] = {}
        self._discarded: OrderedDict[int, _ExpectedPayload] = OrderedDict()
        self._recent_transfers = RecentTransfers()
        self._current: _ExpectedPayload | None = None
        self._transfer = 0
        self.missing = 0  # remaining bytes of the current chunk

    def expect(self, transfer: int, into: memoryview) -> None:
        """Raises ValueError for read-only memory or a number in use."""
        if into.readonly:
            raise ValueError(f"payload {transfer} cannot be received into read-only memory")
        if transfer in self._expected or transfer in self._discarded:
            raise ValueError(f"payload {transfer} is expected already")
        self._expected[transfer] = _ExpectedPayload(len(into), into)
        self._recent_transfers.forget(transfer)

    def redirect(self, transfer: int, into: memoryview | None) -> Redirected:
        payload = self._expected.get(transfer)
        if payload is None:
            return Redirected.COMPLETE if transfer in self._recent_transfers else Redirected.UNKNOWN
        if into is None:
            self._discard(transfer)
        elif payload.into is not None:
            into[: payload.received] = payload.into[: payload.received]
        payload.into = into
        return Redirected.MOVED

    def begin(self, frame: Frame, arrived: memoryview) -> int | None:
        """Start a chunk of which `arrived` was read. Returns the transfer if it is complete."""
        payload = self._expected.get(frame.transfer) or self._discarded.get(frame.transfer)
        _check_size(frame, payload)
        self._current, self._transfer, self.missing = payload, frame.transfer, frame.body
        if payload is not None and payload.into is not None and len(arrived):
            payload.into[payload.received : payload.received + len(arrived)] = arrived
        return self.took(len(arrived))

    def destination(self) -> memoryview | None:
        """Return the memory for the rest of the chunk, None to discard it."""
        payload = self._current
        if payload is None or payload.into is None:
            return None
        return payload.into[payload.received : payload.received + self.missing]

    def took(self, count: int) -> int | None:
        """Count received bytes. Returns the transfer if it is complete and wanted."""
        self.missing -= count
        payload = self._current
        if payload is None:
            return None
        payload.received += count
        return None if self.missing or payload.received < payload.size else self._complete()

    def clear(self) -> None:
        self._expected.clear()
        self._discarded.clear()
        self._recent_transfers.clear()
        self._current = None
        self.missing = 0

    def _complete(self) -> int | None:
        self._current = None
        self._discarded.pop(self._transfer, None)
        if self._expected.pop(self._transfer, None) is None:
            return None
        self._recent_transfers.add(self._transfer)
        return self._transfer

    def _discard(self, transfer: int) -> None:
        self._discarded[transfer] = self._expected.pop(transfer)
        if len(self._discarded) > MAX_DISCARDED:
            self._discarded.popitem(last=False)


def _check_size(frame: Frame, payload: _ExpectedPayload | None) -> None:
    if payload is None:
        raise CarrierLost("misbehaved", f"a chunk of payload {frame.transfer}, which was not expected")
    if frame.count != payload.received:
        raise CarrierLost(
            "misbehaved", f"payload {frame.transfer}: a chunk at byte {frame.count}, expected {payload.received}"
        )
    if frame.body > min(MAX_CHUNK_BYTES, payload.size - payload.received) or (payload.size and not frame.body):
        raise CarrierLost("misbehaved", f"payload {frame.transfer}: a chunk of {frame.body} bytes does not fit")
