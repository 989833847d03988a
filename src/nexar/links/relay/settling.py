"""What a node that is about to close still owes: its own frames must have arrived, those of others must have gone on.

Afterwards nothing depends on it: whatever reaches it then, its source still has, and sends along another way. No I/O,
guarded by the station's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nexar.links.relay.carrier import RelayedCarrier
from nexar.links.relay.ways import Ways
from nexar.types import NodeId


class Settling:
    """Of one station, once."""

    def __init__(
        self, carriers: Mapping[NodeId, RelayedCarrier], ways: Ways, needless: Callable[[NodeId], bool]
    ) -> None:
        """`carriers` and `ways` are the station's. `needless`: what is for this node need not arrive."""
        self._carriers = carriers
        self._ways = ways
        self._needless = needless
        self._asked: dict[RelayedCarrier, tuple[int, tuple[NodeId, ...]]] = {}  # up to which number, and on which way

    def moves(self) -> bool:
        """Whether all is done, or somebody is to be asked."""
        owed = self._owed()
        return any(map(self._is_unasked, owed)) or not (owed or self._ways.hold_something)

    def questions(self) -> list[RelayedCarrier]:
        """Those whose peers are to be asked now what they have: they would say so of themselves, but not at once."""
        found = [carrier for carrier in self._owed() if self._is_unasked(carrier)]
        self._asked.update((carrier, _place(carrier)) for carrier in found)
        return found

    def _owed(self) -> list[RelayedCarrier]:
        return [
            each
            for each in self._carriers.values()
            if not each.outgoing.is_settled and not self._needless(each.peer_id)
        ]

    def _is_unasked(self, carrier: RelayedCarrier) -> bool:
        sent = carrier.stranded is None and carrier.outgoing.unacked
        return bool(sent) and self._asked.get(carrier) != _place(carrier)


def _place(carrier: RelayedCarrier) -> tuple[int, tuple[NodeId, ...]]:
    return carrier.outgoing.next, carrier.route
