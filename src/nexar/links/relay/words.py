"""What a node itself says to the others about relaying: what has arrived, what it asks, what is broken or over.

A word may be lost: whoever needs an answer asks again. So for a neighbour that gives no room a few wait, and no more.
No I/O, guarded by the station's lock.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from nexar.links.relay.carrier import RelayedCarrier
from nexar.links.relay.hop import Waiting
from nexar.links.relay.surroundings import Surroundings
from nexar.links.relay.ways import Ways
from nexar.types import NodeId
from nexar.wire.relay import RelayHeader, RelayKind, encode_node, encode_relay

Route: TypeAlias = tuple[NodeId, ...]

_LONGEST_REASON: Final = 1000  # bytes


class Words:
    """Of one station."""

    def __init__(self, surroundings: Surroundings, ways: Ways) -> None:
        """`ways` are the station's."""
        self._around = surroundings
        self._ways = ways

    def say(self, carrier: RelayedCarrier, kind: RelayKind, *, sequence: int = 0, route: Route = ()) -> None:
        """To the peer of a carrier. `route`: instead of the one that the carrier takes."""
        self._post(self.header(carrier, kind, sequence, route or carrier.route), b"")

    def header(self, carrier: RelayedCarrier, kind: RelayKind, sequence: int, route: Route) -> RelayHeader:
        """Of what goes to the peer of a carrier: it says as well what has arrived."""
        ack = carrier.incoming.ack()
        return RelayHeader(kind, 1, carrier.number, self._around.epoch(), sequence, ack, route)

    def tell_broken(self, back: Route, beyond: NodeId) -> None:
        """To the last of this route: it cannot go from here to that node."""
        self._post(RelayHeader(RelayKind.BROKEN, 1, 0, self._around.epoch(), 0, 0, back), encode_node(beyond))

    def tell_over(self, number: int, route: Route, reason: str) -> None:
        """To the last of this route: the link of this number is over here, or never was any."""
        header = RelayHeader(RelayKind.RESET, 1, number, self._around.epoch(), 0, 0, route)
        self._post(header, reason.encode()[:_LONGEST_REASON])

    def show_way(self, number: int, source: NodeId, node: NodeId) -> None:
        """To a source whose frames came over others, if there is a connection to it: this is the way. It says that
        nothing has arrived; who has no such link does not mind.
        """
        if self._around.link(source) is not None:
            self._post(RelayHeader(RelayKind.ACK, 1, number, self._around.epoch(), 0, 0, (node, source)), b"")

    def _post(self, header: RelayHeader, body: bytes) -> None:
        hop = self._ways.over(header.route[1])
        if hop is not None and hop.takes_words:
            self._ways.put(hop, Waiting(1, encode_relay(header) + body, None))
