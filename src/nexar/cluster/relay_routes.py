"""The mesh as a graph: who is whose neighbour, and links over other nodes to who is not.

Which ranks are neighbours follows from the setting `topology` and the membership of the cluster's present epoch,
whatever communicators there are. A link to a member that is no neighbour is made without asking anybody: it exists here
from the moment in which it is wanted, and there when its first frame arrives. Of two members there is one link, however
it came about: if they are connected directly later, the link has one more carrier, and a better one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Final

from nexar.cluster.control_threads import TimerThread
from nexar.cluster.membership import Membership
from nexar.cluster.node import Node
from nexar.cluster.peer_table import CLOSED, MAX_MISSED_LINKS, PeerEntry, PeerTable, links_since, next_number
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
_LOST: Final = "the link between us was lost"
_LOOK_INTERVAL: Final = 1.0
"""Seconds in which one member is looked into once, however often others bring word of it that is not believed."""


class RelayRoutes:
    """Of one node: the `Surroundings` of its station. Close it after the relayed links, before the others."""

    def __init__(self, node: Node, peers: PeerTable, router: Router, dial: Callable[[NodeId, float], Link]) -> None:
        """`dial` opens a link of its own to a member; it blocks and raises why it cannot."""
        self._node = node
        self._peers = peers
        self._dial = dial
        self._topology: Final[str] = node.config.topology
        self._closed = False  # written once
        self.shortcuts = 0
        """How often a member was connected to because no way over others was left. Under the lock of the pairs."""
        self._parted: frozenset[NodeId] = frozenset()
        # Neighbours that others reach and this node does not. Replaced under the lock of the pairs, read by anybody.
        self._looked: dict[NodeId, float] = {}  # under the lock of the pairs: who was looked into, and when
        self.doubted: Callable[[NodeId], None] = _ignore_doubt
        """Finds out whether the connection to this member still stands, and loses its link if not. Must not block.
        Written once."""
        self.cut_off: Callable[[NodeId, str], None] = _ignore_cut_off
        """Told of members to which no way is left over others, and why; looks into them. Must not block. Written
        once."""
        self.relay: Final = Relay(node.id, node.progress, router.deferred_io, self)
        router.relay = self.relay.take
        self._timer = TimerThread(self.relay.tick)

    # -- the graph: any thread, without waiting ----------------------------------------------------------

    def is_neighbour(self, node: NodeId) -> bool:
        """Whether this node has a link of its own with that one. Who holds no rank yet is relayed nothing."""
        membership = self._peers.known().membership
        mine, other = self._ranks(membership, node)
        return mine is None or other is None or are_neighbors(self._topology, membership.size, mine, other)

    def wants(self, node: NodeId) -> bool:
        """Whether it is to have a connection of its own: a neighbour, unless it is known that none can be had."""
        return node not in self._parted and self.is_neighbour(node)

    def _ranks(self, membership: Membership, node: NodeId) -> tuple[Rank | None, Rank | None]:
        return membership.rank_of(self._node.id), membership.rank_of(node)

    def epoch(self) -> int:
        """See Surroundings."""
        return self._peers.known().membership.epoch

    def hop_limit(self) -> int:
        """See Surroundings. A route that goes round somebody who is gone may be longer than all others."""
        return detour_limit(self._topology, self._peers.known().membership.size)

    def route(self, destination: NodeId, avoid: frozenset[NodeId]) -> tuple[NodeId, ...] | None:
        """See Surroundings."""
        if destination not in avoid and self.link(destination) is not None:
            return self._node.id, destination
        if destination in self._parted:
            avoid |= {destination}
        membership = self._peers.known().membership  # once: the next one may have other ranks
        size, (mine, other) = membership.size, self._ranks(membership, destination)
        if mine is None or other is None:
            return None
        lost = (rank for rank in neighbors(self._topology, size, mine) if self._is_lost(membership.members[rank].node))
        dead = frozenset((*lost, *(rank for each in avoid if (rank := membership.rank_of(each)) is not None)))
        way = self._way(size, mine, other, dead)
        return None if way is None else tuple(membership.members[rank].node for rank in way)

    def _way(self, size: int, mine: Rank, other: Rank, dead: frozenset[Rank]) -> tuple[Rank, ...] | None:
        if other not in dead:
            return route(self._topology, size, mine, other, dead)
        over = [near for near in neighbors(self._topology, size, mine) if near not in dead]
        found = (route(self._topology, size, near, other, (dead | {mine}) - {other}) for near in over)
        return min(((mine, *way) for way in found if way is not None), key=lambda way: (len(way), way), default=None)

    def link(self, node: NodeId) -> Link | None:
        """See Surroundings."""
        pair = self._peers.get(node)
        if pair is None or not pair.state.open or pair.link.failure is not None:
            return None
        return pair.link

    def _is_lost(self, node: NodeId) -> bool:
        """Whether there was a link, and is none now."""
        if node in self._parted:
            return self.link(node) is None
        pair = self._peers.get(node)
        return pair is not None and pair.state.open and pair.link.failure is not None

    # -- hops --------------------------------------------------------------------------------------------

    def open(self, node: NodeId) -> bool:
        """See Surroundings. One that was lost is made anew by who looks after members, not for the sake of others."""
        known = self._peers.known().find(node) is not None and self.is_neighbour(node)
        if self._closed or not known or self._is_lost(node):
            return False
        self._node.dialer.run_in_thread(partial(self._open, node))
        return True

    def connect(self, node: NodeId, why: str) -> bool:
        """See Surroundings. Whether the peer lives at all is found out beside it, and sooner where it does not."""
        if self._closed or self._peers.closed or self._peers.known().find(node) is None:
            return False
        self.cut_off(node, f"no way is left over other nodes: {why}")
        self._node.dialer.run_in_thread(partial(self._open, node, shortcut=True))
        return True

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
        """See Surroundings."""
        self._timer.wake_by(due)

    def adopt(self) -> None:
        """The members have changed."""
        with self._peers.changed:
            directory = self._peers.known()
            self._parted = frozenset(node for node in self._parted if directory.find(node) is not None)
            self._looked = {node: when for node, when in self._looked.items() if directory.find(node) is not None}
        if self._topology != FULL_MESH or self.relay.in_use:
            self.relay.adopt(lambda node: self._peers.known().find(node) is not None)

    def settle(self, deadline: float, needless: Callable[[NodeId], bool]) -> None:
        """See Station."""
        if self.relay.in_use:
            self.relay.settle(deadline, needless)

    def close(self) -> None:
        """No frame leaves or goes on any more. Idempotent."""
        self._closed = True
        self._timer.close()
        self.relay.close()

    def stats(self) -> dict[str, int]:
        """What went over this node for others, what could not, what came for it and meant nothing, and how often it
        connected to a member because no way over others was left.
        """
        relay = self.relay
        counted = {"passed_on": relay.relayed, "refused": relay.refused, "dropped": relay.dropped}
        return {**counted, "shortcuts": self.shortcuts}

    # -- links -------------------------------------------------------------------------------------------

    def relayed(self, node: NodeId, deadline: float) -> Link | None:
        """The link to a member that is no neighbour; None: there is no way over others. It may wait for another thread
        that makes it.
        """
        with self._peers.changed:
            directory = self._peers.known()
            member = directory.find(node)
            if member is None:
                return None
            pair = self._peers.of(directory, member)
            if pair.relay is not None:
                self._peers.wait(lambda: pair.relayed, deadline)
                return pair.link
            way = self.route(node, frozenset())
            if way is None:
                return None
            carrier = self._make(pair, way)
        self._use(pair, carrier)
        return pair.link

    def detour(self, node: NodeId) -> Link | None:
        """A link over others to a neighbour whose own is lost; None: it is not, or there is nobody to go over."""
        with self._peers.changed:
            directory, pair = self._peers.known(), self._peers.get(node)
            if directory.find(node) is None or pair is None or not self.is_neighbour(node):
                return None
            if pair.link.failure is None:
                return pair.link if pair.relayed else None
            self._parted |= {node}
            way = self.route(node, frozenset())
            fresh = None if way is None else self._peers.replace(pair, next_number(pair.number))
            if way is None or fresh is None:
                return None
            carrier = self._make(fresh, way)
        self._use(fresh, carrier)
        return fresh.link

    def reach(self, nodes: Iterable[NodeId]) -> None:
        """Make the links to those of them that are no neighbours, so far as there is a way. Waits for nobody."""
        if self._topology == FULL_MESH:
            return
        for node in nodes:
            pair = self._peers.get(node)
            known = node == self._node.id or (pair is not None and pair.is_open)
            if not known and not self.is_neighbour(node):
                with suppress(NexarError):  # it is no member any more, or this node closes: then nobody is told
                    self.relayed(node, time.monotonic())

    def welcome(self, header: RelayHeader) -> RelayedCarrier | str | RefusedSource:
        """See Surroundings."""
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
                return _LOST
            if since == 0 and pair.relay is not None:  # another thread has made it just now
                return pair.relay
            if not self._is_believed(pair, header):
                return RefusedSource.NOT_YET
            if since > 0:
                stale, fresh = pair.link, self._peers.replace(pair, header.number)
                assert fresh is not None  # it is a member, and the lock is held
                pair = fresh
            if len(header.route) > 2 and self.is_neighbour(header.source):
                self._parted |= {header.source}  # or it would not come over others
            way = self.route(header.source, frozenset()) or header.route[::-1]
            carrier = self._make(pair, way)
        if stale is not None:
            stale.lose("it connected anew, so frames of the old connection may be lost")
        self._use(pair, carrier)
        return carrier

    def _is_believed(self, pair: PeerEntry, header: RelayHeader) -> bool:
        """Whether this is of its source, so far as this node can know. Under the lock.

        Who brings it may have made it up: a hop proves nothing but itself. So whoever can speak for itself must: while
        there is a connection of its own, the first word of any other way comes over that; and a neighbour is not heard
        over others before it has been tried and found out of reach. Others are believed, for there is no other way.
        """
        if len(header.route) == 2 or pair.link.failure is not None:
            return True
        if pair.state.open:
            return False
        return not self.is_neighbour(header.source) or header.source in self._parted or pair.state.failures > 0

    def investigate(self, header: RelayHeader) -> bool:
        """See Surroundings. If there is no connection to the source, or none any more, it may be true: then the loss is
        noticed, or the dial fails.
        """
        node, now = header.source, time.monotonic()
        with self._peers.changed:
            directory, pair = self._peers.known(), self._peers.get(node)
            if directory.find(node) is None or header.epoch > directory.membership.epoch:
                return False  # the next membership says who that is
            if pair is None or self._is_believed(pair, header):
                return True
            is_due = now >= self._looked.get(node, 0.0) + _LOOK_INTERVAL
            if is_due:
                self._looked[node] = now
        if is_due and pair.state.open:
            self.doubted(node)
        elif is_due:
            self.open(node)
        return False

    def _make(self, pair: PeerEntry, way: tuple[NodeId, ...]) -> RelayedCarrier:
        """Under the lock: from now on this pair has one, and nobody makes another."""
        carrier = pair.relay = self.relay.make(pair.link.peer, pair.number, way)
        return carrier

    def _use(self, pair: PeerEntry, carrier: RelayedCarrier) -> None:
        pair.link.adopt(carrier)
        with self._peers.changed:
            pair.relayed = True
            self._peers.changed.notify_all()


def _ignore_cut_off(_node: NodeId, _why: str) -> None:
    """See `_ask_nobody`."""


def _ignore_doubt(_node: NodeId) -> None:
    """A node that nobody watches over: what becomes of its links, it hears from them."""
