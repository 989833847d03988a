"""Where the payloads of a relayed carrier land. No I/O. Guarded by its station's lock, under which bytes are copied
too: who holds it knows that no memory is being written.
"""

from __future__ import annotations

from nexar.transport.base import Redirected
from nexar.transport.landed import Landed
from nexar.wire.frame import Frame


class Unexpected(Exception):
    """A chunk that nobody waits for: the peer broke the protocol."""


class _Place:
    """Of one payload."""

    __slots__ = ("arrived", "into")

    def __init__(self, into: memoryview) -> None:
        self.into = into
        self.arrived = 0


class Landings:
    """By transfer."""

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}
        self._landed = Landed()
        self._discarded = Landed()  # nobody wants the rest of these
        self.bytes = 0

    def expect(self, transfer: int, into: memoryview) -> None:
        """See Carrier."""
        if into.readonly:
            raise ValueError(f"payload {transfer} cannot land in memory that is read-only")
        if transfer in self._places:
            raise ValueError(f"payload {transfer} is expected already")
        self._places[transfer] = _Place(into)
        self._landed.forget(transfer)
        self._discarded.forget(transfer)

    def redirect(self, transfer: int, into: memoryview | None) -> Redirected:
        """See Carrier."""
        place = self._places.get(transfer)
        if place is None:
            return Redirected.LANDED if transfer in self._landed else Redirected.UNKNOWN
        if into is None:
            del self._places[transfer]
            self._discarded.add(transfer)
        else:
            into[: place.arrived] = place.into[: place.arrived]
            place.into = into
        return Redirected.MOVED

    def take(self, frame: Frame, piece: memoryview) -> bool:
        """A chunk. True: that was the last byte. Raises Unexpected."""
        place = self._places.get(frame.transfer)
        if place is None:
            if frame.transfer in self._discarded:
                return False
            raise Unexpected(f"payload {frame.transfer} came, but nobody expects it")
        stop = place.arrived + len(piece)
        if frame.count != place.arrived or stop > len(place.into):
            raise Unexpected(f"a chunk of payload {frame.transfer} at byte {frame.count} instead of {place.arrived}")
        place.into[place.arrived : stop] = piece
        place.arrived = stop
        self.bytes += len(piece)
        if stop < len(place.into):
            return False
        del self._places[frame.transfer]
        self._landed.add(frame.transfer)
        return True

    def stop(self) -> None:
        """No memory is written any more."""
        self._places.clear()
        self._landed.clear()
        self._discarded.clear()
