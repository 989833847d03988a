"""The mesh as a graph: direct neighbours, and relayed links to the others.

The setting `topology` and the membership define the neighbours. A relayed link needs no handshake: at the peer it
exists with its first frame. A later direct connection becomes a better carrier of the same link.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Final

from nexar.cluster.control_channel import NeighbourDoubted, RouteLost
from nexar.cluster.control_loop import ControlLoop
from nexar.cluster.membership import Membership
from nexar.cluster.node import Node
from nexar.cluster.peer_table import (
    CLOSED,
    LINK_LOST,
    MAX_MISSED_LINKS,
    RECONNECTED,
    PeerEntry,
    PeerTable,
    links_since,
    next_number,
)
from nexar.errors import NexarError
from nexar.links.link import Link
from nexar.links.relay.carrier import RelayedCarrier
from nexar.links.relay.forwarding import RefusedSource
from nexar.links.relay.relay import Relay
from nexar.links.router import Router
from nexar.topology import FULL_MESH, are_neighbors, detour_limit, neighbors, route
from nexar.types import NodeId, Rank
from nexar.wire.relay import RelayHeader

_LONGEST_DIAL: Final = 10.0
_CHECK_INTERVAL: Final = 1.0
"""Seconds between two probes of a member whose frames are not believed."""


class RelayRoutes:
    """The `MeshView` of one node's relay. Close it after the relayed links, before the others."""

    def __init__(
        self,
        node: Node,
        peers: PeerTable,
        router: Router,
        dial: Callable[[NodeId, float], Link],
        post: Callable[[RouteLost | NeighbourDoubted], None],
        *,
        control_loop: ControlLoop,
    ) -> None:
        """`dial` opens a direct link. It blocks, and raises PeerLost. `post` must not block."""
        self._node = node
        self._peers = peers
        self._dial = dial
        self._topology: Final[str] = node.config.topology
        self._closed = False  # written once
        self.shortcuts = 0
        """Direct connections made because no relay route was left. Guarded by the lock of the peer table."""
        # Neighbours that only others reach. Replaced under the lock of the peer table, read without.
        self._severed: frozenset[NodeId] = frozenset()
        self._last_checks: dict[NodeId, float] = {}  # time of the last probe; guarded by the lock of the peer table
        self._post = post
        self.relay: Final = Relay(node.id, node.progress, router.deferred_io, self)
        router.relay = self.relay.take
        self._timer = control_loop.call_at(None, self.relay.tick)

    # -- graph: any thread, without blocking -------------------------------------------------------------

    def is_neighbour(self, node: NodeId) -> bool:
        # Nothing is relayed to nodes without a rank.
        membership = self._peers.known().membership
        mine, other = self._ranks(membership, node)
        return mine is None or other is None or are_neighbors(self._topology, membership.size, mine, other)

    def wants(self, node: NodeId) -> bool:
        """Whether the node is a neighbour not known to be unreachable."""
        return node not in self._severed and self.is_neighbour(node)

    def _ranks(self, membership: Membership, node: NodeId) -> tuple[Rank | None, Rank | None]:
        return membership.rank_of(self._node.id), membership.rank_of(node)

    def epoch(self) -> int:
        return self._peers.known().membership.epoch

    def hop_limit(self) -> int:
        # A route around a lost node may be longer than all others.
        return detour_limit(self._topology, self._peers.known().membership.size)

    def route(self, destination: NodeId, avoid: frozenset[NodeId]) -> tuple[NodeId, ...] | None:
        if destination not in avoid and self.link(destination) is not None:
            return self._node.id, destination
        if destination in self._severed:
            avoid |= {destination}
        membership = self._peers.known().membership  # read once: another membership may have other ranks
        size, (mine, other) = membership.size, self._ranks(membership, destination)
        if mine is None or other is None:
            return None
        lost = (rank for rank in neighbors(self._topology, size, mine) if self._is_lost(membership.members[rank].node))
        dead = frozenset((*lost, *(rank for each in avoid if (rank := membership.rank_of(each)) is not None)))
        path = self._find_path(size, mine, other, dead)
        return None if path is None else tuple(membership.members[rank].node for rank in path)

    def _find_path(self, size: int, mine: Rank, other: Rank, dead: frozenset[Rank]) -> tuple[Rank, ...] | None:
        if other not in dead:
            return route(self._topology, size, mine, other, dead)
        over = [near for near in neighbors(self._topology, size, mine) if near not in dead]
        found = (route(self._topology, size, near, other, (dead | {mine}) - {other}) for near in over)
        return min(
            ((mine, *path) for path in found if path is not None), key=lambda path: (len(path), path), default=None
        )

    def link(self, node: NodeId) -> Link | None:
        pair = self._peers.get(node)
        if pair is None or not pair.state.open or pair.link.failure is not None:
            return None
        return pair.link

    def _is_lost(self, node: NodeId) -> bool:
        if node in self._severed:
            return self.link(node) is None
        pair = self._peers.get(node)
        return pair is not None and pair.state.open and pair.link.failure is not None

    # -- hops --------------------------------------------------------------------------------------------

    def open(self, node: NodeId) -> bool:
        # The failure monitor, not relaying, replaces lost links.
        known = self._peers.known().find(node) is not None and self.is_neighbour(node)
        if self._closed or not known or self._is_lost(node):
            return False
        return self._node.dialer.try_in_thread(partial(self._open, node), "a neighbour is not dialed")

    def connect(self, node: NodeId, why: str) -> bool:
        # The probe finishes sooner if the peer is dead.
        if self._closed or self._peers.closed or self._peers.known().find(node) is None:
            return False
        self._post(RouteLost(node, f"no route over other nodes is left: {why}"))
        return self._node.dialer.try_in_thread(partial(self._open, node, shortcut=True), "a member is not dialed")

    def _open(self, node: NodeId, *, shortcut: bool = False) -> None:
        try:
            self._dial(node, time.monotonic() + _LONGEST_DIAL)
        except NexarError as error:
            self.relay.unreachable(node, str(getattr(error, "cause", None) or error))
        else:
            with self._peers.changed:
                self.shortcuts += shortcut
            self.relay.opened(node)

    def wake_by(self, due: float) -> None:
        # By the driver: the relay holds its lock, and a finaliser that runs under the loop's lock may need that one.
        self._node.progress.run_soon(partial(self._timer.wake_by, due))

    def adopt(self) -> None:
        with self._peers.changed:
            directory = self._peers.known()
            self._severed = frozenset(node for node in self._severed if directory.find(node) is not None)
            self._last_checks = {
                node: when for node, when in self._last_checks.items() if directory.find(node) is not None
            }
        if self._topology != FULL_MESH or self.relay.in_use:
            self.relay.adopt(lambda node: self._peers.known().find(node) is not None)

    def settle(self, deadline: float, unneeded: Callable[[NodeId], bool]) -> None:
        if self.relay.in_use:
            self.relay.settle(deadline, unneeded)

    def close(self) -> None:
        """Nothing is sent or forwarded afterwards. Idempotent."""
        self._closed = True
        self._timer.close()
        self.relay.close()

    def stats(self) -> dict[str, int]:
        relay = self.relay
        counted = {"passed_on": relay.forwarded, "refused": relay.refused, "dropped": relay.dropped}
        return {**counted, "shortcuts": self.shortcuts}

    # -- links -------------------------------------------------------------------------------------------

    def relayed(self, node: NodeId, deadline: float) -> Link | None:
        """None without a route. May wait for another thread that makes the link."""
        with self._peers.changed:
            directory = self._peers.known()
            member = directory.find(node)
            if member is None:
                return None
            pair = self._peers.of(directory, member)
            if pair.relay is not None:
                self._peers.wait(lambda: pair.relayed, deadline)
                return pair.link
            path = self.route(node, frozenset())
            if path is None:
                return None
            carrier = self._make(pair, path)
        self._adopt_carrier(pair, carrier)
        return pair.link

    def detour(self, node: NodeId) -> Link | None:
        """A link to a neighbour whose direct link is lost; None if not lost, or without a route."""
        with self._peers.changed:
            directory, pair = self._peers.known(), self._peers.get(node)
            if directory.find(node) is None or pair is None or not self.is_neighbour(node):
                return None
            if pair.link.failure is None:
                return pair.link if pair.relayed else None
            self._severed |= {node}
            path = self.route(node, frozenset())
            fresh = None if path is None else self._peers.replace(pair, next_number(pair.number))
            if path is None or fresh is None:
                return None
            carrier = self._make(fresh, path)
        self._adopt_carrier(fresh, carrier)
        return fresh.link

    def reach(self, nodes: Iterable[NodeId]) -> None:
        """Make relayed links where routes exist. Never blocks."""
        if self._topology == FULL_MESH:
            return
        for node in nodes:
            pair = self._peers.get(node)
            known = node == self._node.id or (pair is not None and pair.is_open)
            if not known and not self.is_neighbour(node):
                with suppress(NexarError):  # no longer a member, or this node closes
                    self.relayed(node, time.monotonic())

    def accept_link(self, header: RelayHeader) -> RelayedCarrier | str | RefusedSource:
        stale: Link | None = None
        with self._peers.changed:
            directory = self._peers.known()
            member = directory.find(header.source)
            if self._peers.closed:
                return CLOSED
            if member is None:
                return RefusedSource.NOT_YET if header.epoch > directory.membership.epoch else RefusedSource.NEVER
            pair = self._peers.of(directory, member)
            since = links_since(header.number, pair.number)
            if since > MAX_MISSED_LINKS or (since == 0 and pair.link.failure is not None):
                return LINK_LOST
            if since == 0 and pair.relay is not None:  # another thread has just made it
                return pair.relay
            if not self._is_authentic(pair, header):
                return RefusedSource.NOT_YET
            if since > 0:
                stale, fresh = pair.link, self._peers.replace(pair, header.number)
                assert fresh is not None  # it is a member, and the lock is held
                pair = fresh
            if len(header.route) > 2 and self.is_neighbour(header.source):
                self._severed |= {header.source}  # its frames are relayed, so it has no direct connection
            path = self.route(header.source, frozenset()) or header.route[::-1]
            carrier = self._make(pair, path)
        if stale is not None:
            stale.lose(RECONNECTED)
        self._adopt_carrier(pair, carrier)
        return carrier

    def _is_authentic(self, pair: PeerEntry, header: RelayHeader) -> bool:
        """Whether the frame comes from its source. Under the lock.

        A relay can forge frames. So while a direct connection exists, the first frame of another route must arrive over
        it; a neighbour is believed over relays only after a direct dial failed. Others are believed, for lack of an
        alternative.
        """
        if len(header.route) == 2 or pair.link.failure is not None:
            return True
        if pair.state.open:
            return False
        return not self.is_neighbour(header.source) or header.source in self._severed or pair.state.failures > 0

    def investigate(self, header: RelayHeader) -> bool:
        # Without a direct connection the frame may be genuine: then the loss is noticed or the dial fails.
        node, now = header.source, time.monotonic()
        with self._peers.changed:
            directory, pair = self._peers.known(), self._peers.get(node)
            if directory.find(node) is None or header.epoch > directory.membership.epoch:
                return False  # the next membership decides
            if pair is None or self._is_authentic(pair, header):
                return True
            is_due = now >= self._last_checks.get(node, 0.0) + _CHECK_INTERVAL
            if is_due:
                self._last_checks[node] = now
        if is_due and pair.state.open:
            self._post(NeighbourDoubted(node))
        elif is_due:
            self.open(node)
        return False

    def _make(self, pair: PeerEntry, path: tuple[NodeId, ...]) -> RelayedCarrier:
        """Under the lock, so that there is only one carrier."""
        carrier = pair.relay = self.relay.make(pair.link.peer, pair.number, path)
        return carrier

    def _adopt_carrier(self, pair: PeerEntry, carrier: RelayedCarrier) -> None:
        pair.link.adopt(carrier)
        with self._peers.changed:
            pair.relayed = True
            self._peers.changed.notify_all()
