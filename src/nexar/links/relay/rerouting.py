"""Which way each relayed carrier takes, and what becomes of it when there is none. No I/O, guarded by the station's
lock.

Hops end long before the members have agreed on a world without them: a way that is broken is replaced by another. When
none is left, this node connects to the peer itself, neighbour or not, for nobody who lives may be lost because others
have gone. Meanwhile the carrier is stranded: what it has to send waits. Only if the peer cannot be reached so either,
the carrier is lost, and the hop is named that was missed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from nexar.links.relay.carrier import RelayedCarrier
from nexar.links.relay.surroundings import Surroundings
from nexar.transport.base import CarrierLost
from nexar.types import NodeId, format_node


class Rerouting:
    """Of one station."""

    def __init__(
        self,
        node: NodeId,
        surroundings: Surroundings,
        carriers: Mapping[NodeId, RelayedCarrier],
        *,
        has_news: Callable[[RelayedCarrier], None],
        run_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        """`carriers` are the station's, by peer. `run_soon` lets the driving thread tell a carrier that it is lost."""
        self._node = node
        self._around = surroundings
        self._carriers = carriers
        self._has_news = has_news
        self._run_soon = run_soon

    def avoid(self, before: NodeId, beyond: NodeId) -> None:
        """The hop from one node to another is broken: whatever of ours goes over it takes another way."""
        for carrier in list(self._carriers.values()):
            route = carrier.route
            if before in route[:-1] and route[route.index(before) + 1] == beyond:
                straight = before == self._node or beyond != route[-1]
                carrier.avoid |= {beyond} if straight else {before}
                where = f"{format_node(before)} cannot reach {format_node(beyond)}"
                self.reroute(
                    carrier, f"node {where}" if before != self._node else f"node {format_node(beyond)} is gone"
                )

    def reroute(self, carrier: RelayedCarrier, why: str) -> None:
        """Look for another way; `why` there is need of one."""
        route = self._around.route(carrier.peer_id, carrier.avoid)
        if route is None and carrier.heard_over != carrier.route:
            route = carrier.heard_over  # whatever is wrong elsewhere: the peer comes through there
        if route is not None:
            self._take(carrier, route)
        elif carrier.stranded is None:
            self._strand(carrier, why)

    def doubt(self, carrier: RelayedCarrier) -> None:
        """The peer was asked and does not answer: if it comes on another way, that one is taken. On the present one
        there may be somebody who takes everything and passes nothing on, and has not been missed yet.
        """
        if carrier.heard_over is not None and carrier.heard_over != carrier.route:
            self._take(carrier, carrier.heard_over)

    def straighten(self, carrier: RelayedCarrier) -> None:
        """The peer speaks over a connection of its own. There is no better way, and on no other may it believe this
        node: what is under way on others goes again.
        """
        straight = self._node, carrier.peer_id
        if carrier.route != straight or carrier.stranded is not None:
            self._take(carrier, straight)

    def opened(self, node: NodeId) -> None:
        """There is a connection to this node itself: whoever waited for that goes on."""
        carrier = self._carriers.get(node)
        if carrier is not None and carrier.stranded is not None:
            carrier.avoid -= {node}
            self.reroute(carrier, carrier.stranded)

    def unreachable(self, node: NodeId, cause: str) -> None:
        """No connection to this node itself came about."""
        carrier = self._carriers.get(node)
        if carrier is not None and carrier.stranded is not None:
            self._lose(carrier, f"{carrier.stranded}, and no connection of its own came about: {cause}")

    def removed(self, carrier: RelayedCarrier) -> None:
        """Its peer is no member any more."""
        self._run_soon(partial(carrier.fail, CarrierLost("peer", "it is no member any more")))

    def _take(self, carrier: RelayedCarrier, route: tuple[NodeId, ...]) -> None:
        """What may be lost on the old way goes again. One that was stranded has lost it there, whatever the new way."""
        if route != carrier.route or carrier.stranded is not None:
            carrier.route = route
            carrier.outgoing.send_again()
        carrier.stranded = None
        self._has_news(carrier)

    def _strand(self, carrier: RelayedCarrier, why: str) -> None:
        carrier.stranded = why
        if not self._around.connect(carrier.peer_id, why):
            self._lose(carrier, why)

    def _lose(self, carrier: RelayedCarrier, why: str) -> None:
        self._run_soon(partial(carrier.fail, CarrierLost("peer", f"no way is left over other nodes: {why}")))
