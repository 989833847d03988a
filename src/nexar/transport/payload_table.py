"""Which payloads of a carrier landed lately: a redirect that comes too late must hear that it did.

Only so many are remembered, because a carrier moves payloads without end. It is enough: who asks does not know yet that
the payload landed, so its `payload_arrived` has not returned, and few can be in that state at a time. One that was
forgotten counts as unknown, which no one takes for a whole payload.

Where the payloads of one carrier land. No I/O.

Law: a chunk is accepted only for a payload that was expected, at exactly the byte that is next, and not beyond its end.
A discarded payload goes on being counted, so that what was on its way is recognised, but has no memory.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from nexar.transport.base import CarrierLost, Redirected
from nexar.wire.frame import MAX_CHUNK_BYTES, Frame

REMEMBERED: Final = 4096


class RecentTransfers:
    """Numbers of transfers, the newest ones. Guarded by its owner's lock."""

    __slots__ = ("_transfers",)

    def __init__(self) -> None:
        self._transfers: dict[int, None] = {}  # oldest first

    def add(self, transfer: int) -> None:
        """Every byte of it is in its place."""
        self._transfers[transfer] = None
        if len(self._transfers) > REMEMBERED:
            del self._transfers[next(iter(self._transfers))]

    def forget(self, transfer: int) -> None:
        """Its number is used again."""
        self._transfers.pop(transfer, None)

    def clear(self) -> None:
        """The carrier has ended."""
        self._transfers.clear()

    def __contains__(self, transfer: int) -> bool:
        return transfer in self._transfers


MAX_DISCARDED: Final = 1 << 16
"""A payload that the peer withdrew half-way never ends. Its number is kept until so many newer ones were discarded."""


@dataclass(slots=True)
class _ExpectedPayload:
    size: int
    into: memoryview | None
    received: int = 0


class PayloadTable:
    """Expected payloads, and the chunk that is arriving. Guarded by the data connection's lock."""

    def __init__(self) -> None:
        self._expected: dict[int, _ExpectedPayload] = {}
        self._discarded: OrderedDict[int, _ExpectedPayload] = OrderedDict()
        self._recent_transfers = RecentTransfers()
        self._current: _ExpectedPayload | None = None
        self._transfer = 0
        self.missing = 0
        """Bytes of the current chunk that are still to come."""

    def expect(self, transfer: int, into: memoryview) -> None:
        """From now on chunks of this payload are accepted. ValueError if that cannot be."""
        if into.readonly:
            raise ValueError(f"payload {transfer} cannot land in memory that is read-only")
        if transfer in self._expected or transfer in self._discarded:
            raise ValueError(f"payload {transfer} is expected already")
        self._expected[transfer] = _ExpectedPayload(len(into), into)
        self._recent_transfers.forget(transfer)

    def redirect(self, transfer: int, into: memoryview | None) -> Redirected:
        """See Carrier.redirect_payload."""
        payload = self._expected.get(transfer)
        if payload is None:
            return Redirected.LANDED if transfer in self._recent_transfers else Redirected.UNKNOWN
        if into is None:
            self._discard(transfer)
        elif payload.into is not None:
            into[: payload.received] = payload.into[: payload.received]
        payload.into = into
        return Redirected.MOVED

    def begin(self, frame: Frame, arrived: memoryview) -> int | None:
        """A chunk's header, and the part of its body that came along. The payload's number if this completes it."""
        payload = self._expected.get(frame.transfer) or self._discarded.get(frame.transfer)
        _check_size(frame, payload)
        self._current, self._transfer, self.missing = payload, frame.transfer, frame.body
        if payload is not None and payload.into is not None and len(arrived):
            payload.into[payload.received : payload.received + len(arrived)] = arrived
        return self.took(len(arrived))

    def destination(self) -> memoryview | None:
        """Where the rest of the chunk goes; None: nowhere."""
        payload = self._current
        if payload is None or payload.into is None:
            return None
        return payload.into[payload.received : payload.received + self.missing]

    def took(self, count: int) -> int | None:
        """`count` bytes came. The payload's number if it is complete and still wanted."""
        self.missing -= count
        payload = self._current
        if payload is None:
            return None
        payload.received += count
        return None if self.missing or payload.received < payload.size else self._complete()

    def clear(self) -> None:
        """Forget everything; no memory of anybody is held any more."""
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
        raise CarrierLost("misbehaved", f"a chunk of payload {frame.transfer}, which nobody expects")
    if frame.count != payload.received:
        raise CarrierLost(
            "misbehaved", f"payload {frame.transfer}: a chunk at byte {frame.count}, expected {payload.received}"
        )
    if frame.body > min(MAX_CHUNK_BYTES, payload.size - payload.received) or (payload.size and not frame.body):
        raise CarrierLost("misbehaved", f"payload {frame.transfer}: a chunk of {frame.body} bytes does not fit")
