"""My links to the other members: opened when first needed, or all at once where the world is small.

When two members dial each other at the same moment, both keep the same connection: `decisions.pairing` has the law. If
only one direction gets through, that one is used.

A link belongs to a pair of nodes, whatever ranks they have; what connects it may be several carriers (the network's
first, then shared memory, whose address is told to the peer over it). Node, key and rank of the other end are checked
on both sides before a link is made: node and key by the transport's handshake and the membership's pin, the rank here.

When a link is lost and both ends live, they may make another one: the pair counts its links, and the introduction says
which one is meant. So a dial that answers a loss which the other side has not noticed is told from a dial that crossed
the other side's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, NamedTuple

from msgspec.structs import replace

from nexar.cluster.change import Change
from nexar.cluster.circle import Circle
from nexar.cluster.decisions.pairing import Turn
from nexar.cluster.dial import Dial, DialFailed, NoLonger, Superseded
from nexar.cluster.leavers import LONGEST_CLOSE, Leavers
from nexar.cluster.membership import Member, Membership
from nexar.cluster.node import Node
from nexar.cluster.pairs import CLOSED, Pair, Pairs, address_of, next_number
from nexar.cluster.reception import LineTaker, Reception
from nexar.cluster.relaying import Relaying
from nexar.cluster.sidecars import Sidecars
from nexar.errors import NexarError, PeerLost
from nexar.links.carrier import is_relayed
from nexar.links.link import Link
from nexar.links.parting import part
from nexar.links.router import Router
from nexar.transport.base import Carrier
from nexar.types import NodeId, Rank
from nexar.wire.messages import Introduced, Message

_LONGEST_DIAL: Final = 10.0
"""Seconds to connect, and for the lower node of two also to be answered. The higher one waits twice as long for its
answer: the lower one gives none before its own dial ends, which hangs where the network lets only one direction
through."""


class Unconnected(NamedTuple):
    """A member that a link was wanted to, and that this node is not connected to."""

    rank: Rank | None
    address: str
    cause: str
    """Why the last dial failed; empty: none has."""


class Mesh:
    """The links of one node. It is the `Acceptor` of the node's transports. Close it before the node."""

    def __init__(
        self,
        node: Node,
        *,
        on_control: Callable[[Link, Message], None] | None = None,
        on_refused: Callable[[str, str], None] | None = None,
        on_lost: Callable[[Link, NexarError], None] | None = None,
    ) -> None:
        """`on_control` gets the control messages of links; by default those about communicators find them. `on_lost`
        hears of links that ended without this side's will. Both run on the driving thread and must not block.
        """
        self._node = node
        self.router: Final = Router(node.id, node.config, node.progress)
        """Where its links meet the communicators."""
        self.on_expelled: Callable[[int, str], None] | None = None
        """Told when a peer says that this node is no member any more: since which epoch, and why. Written before the
        first membership."""
        self.leavers: Final = Leavers()
        """Links to who has closed and is no member any more, until they end."""
        self._sidecars = Sidecars(node)
        self._on_lost = on_lost
        self._pairs = Pairs(self.router, on_control or self.router.notices.arrived, self._lost)
        self.relaying: Final = Relaying(node, self._pairs, self.router, self.dial)
        """Who is whose neighbour, and how the others are reached."""
        self.reception: Final = Reception(node, self._pairs, self._sidecars, on_refused)
        """Where the others' connections arrive."""

    @property
    def death_lines(self) -> LineTaker | None:
        """Takes connections that carry nothing. Written before anybody can dial for one."""
        return self.reception.death_lines

    @death_lines.setter
    def death_lines(self, taker: LineTaker) -> None:
        self.reception.death_lines = taker

    # -- the membership --------------------------------------------------------------------------------

    def adopt(self, membership: Membership, change: Change | None = None) -> None:
        """From now on these are the members; `change` says why those of before are none any more. Links to them are
        closed, but for those that lead to who has closed: what was sent there still arrives. Links that were lost may
        be dialed anew. Connections that came before are looked at now. Never blocks.
        """
        with self._pairs.changed:
            old = self._pairs.circle
            circle = Circle(self._node.id, membership) if old is None else old.moved_to(membership, change)
            ended = self._pairs.move(circle)
            early = self.reception.arrivals() if old is None else []
        self._node.expect_peers(membership.size)
        now, quiet = time.monotonic(), frozenset[NodeId]() if change is None else change.quiet
        for link in ended:
            direct = link.peer in quiet and not is_relayed(link.schemes)  # over others all has arrived: see `settle`
            if not (direct and self.leavers.keep(link, now)):
                link.begin_close()
        self.relaying.adopt()
        for carrier in early:
            self.reception.receive(carrier, circle)

    def let_go(self, now: float) -> float | None:
        """Give up links to who closed long ago: whoever still waits for something from there is told. Returns when to
        look again, None: nobody else is on its way out.
        """
        for link in self.leavers.overdue(now):
            link.lose(f"it closed {LONGEST_CLOSE:.0f} s ago, and nothing more came from it")
        return self.leavers.due()

    def expect(self, guests: Iterable[Member]) -> None:
        """These nodes may have a link too: they wait to become members."""
        with self._pairs.changed:
            self._pairs.circle = self._pairs.known().with_guests(guests)

    # -- opening: any thread ---------------------------------------------------------------------------

    def link(self, node: NodeId, deadline: float) -> Link:
        """The link to this node; opened if it is not open yet. PeerLost says why it cannot be."""
        pair = self._pairs.get(node)
        if pair is not None and pair.state.open:  # the way of every message: without the lock
            return pair.link
        if pair is not None and pair.relayed:
            return pair.link
        if not self.relaying.wants(node):
            link = self.relaying.relayed(node, deadline)
            if link is not None:
                return link
        return self.dial(node, deadline)

    def dial(self, node: NodeId, deadline: float) -> Link:
        """As `link`; but connected to this node itself, and not over others: neighbour or not."""
        with self._pairs.changed:
            circle = self._pairs.known()
            member = circle.find(node)
            if member is None:
                raise PeerLost(node=node, cause=f"it is no member at epoch {circle.membership.epoch}")
            pair = self._pairs.of(circle, member)
            failures = pair.state.failures
        while (turn := self._turn(pair, failures, deadline)) is Turn.DIAL:
            self._dial(pair, member, deadline)
        if turn is Turn.OPEN:
            return pair.link
        cause = pair.state.cause or "no connection came about in time"
        raise PeerLost(rank=circle.rank_of(node), node=node, address=address_of(member), cause=cause)

    def relink(self, node: NodeId, deadline: float) -> Link:
        """As `link`; but one that was lost is replaced, and one whose dial failed is dialed again. Where other nodes
        have led to it so far, that is not counted on any more.
        """
        with self._pairs.changed:
            pair = self._pairs.get(node)
            lost = pair is not None and pair.link.failure is not None and pair.is_open
            if pair is not None and lost:
                self._pairs.replace(pair, next_number(pair.number))
        return self.dial(node, deadline) if lost or self.relaying.wants(node) else self.link(node, deadline)

    def _lost(self, link: Link, error: NexarError) -> None:
        """A link has ended without this side's will."""
        self.relaying.station.lost(link)
        if self.leavers.forget(link):
            self._node.progress.run_soon(partial(_close, link))
        if self._on_lost is not None:
            self._on_lost(link, error)

    def _turn(self, pair: Pair, failures: int, deadline: float) -> Turn:
        """When nothing is under way any more. WAIT: but not any longer, it has failed since."""
        with self._pairs.changed:
            self._pairs.wait(lambda: not pair.state.pending, deadline)
            tried = pair.state.pending or pair.state.failures > failures
            return Turn.WAIT if tried and not pair.state.open else pair.state.want()

    def is_open(self, node: NodeId, until: float) -> bool:
        """Wait for the link without dialing; not any longer when the node closes."""
        recall = self._node.recall
        with self._pairs.changed, recall.waking(self._pairs.wake):
            circle = self._pairs.known()
            member = circle.find(node)
            if member is None:
                return False
            pair = self._pairs.of(circle, member)
            self._pairs.wait(lambda: pair.state.open or recall.made or self._pairs.known().find(node) is None, until)
            return pair.state.open

    def _dial(self, pair: Pair, member: Member, deadline: float) -> None:
        introduce = replace(self._pairs.known().introduction(), number=pair.number)
        dial = Dial(self._node, member, pair.link, introduce, self._fault_of)
        cause: str | None = "it was interrupted"
        with self._pairs.changed:
            pair.recall = dial.recall
            if self._pairs.known().find(member.node) is None:  # since it was asked for
                dial.recall.make()
        try:
            connect_by = time.monotonic() + _LONGEST_DIAL + self._node.delay_meter.seconds
            answer_by = connect_by if self._node.id < member.node else connect_by + _LONGEST_DIAL
            dial.run(min(deadline, answer_by), connect_by)
            cause = None
            self._sidecars.open(member, pair.link, introduce, dial.sidecar, self._fault_of)
        except Superseded:
            cause = None
        except NoLonger as gone:
            cause = str(gone)
            self._expelled(gone)
        except DialFailed as failed:
            cause = str(failed)
        finally:
            with self._pairs.changed:
                pair.recall = None
                sentences = pair.state.dialed(opened=dial.opened, cause=None if dial.opened else cause)
                self._pairs.changed.notify_all()
            for sentence in sentences:
                self.reception.answer(pair, sentence.dialer, sentence.fate)

    def _fault_of(self, node: NodeId, claim: Introduced) -> str | None:
        """At the moment of the answer: the membership may have changed since the dial began."""
        return self._pairs.known().fault_of(node, claim)

    def _expelled(self, gone: NoLonger) -> None:
        if self.on_expelled is not None:
            self.on_expelled(gone.epoch, gone.reason)

    # -- Acceptor: the driving thread --------------------------------------------------------------------

    def carrier_accepted(self, carrier: Carrier) -> None:
        """See Acceptor."""
        self.reception.carrier_accepted(carrier)

    def candidate_refused(self, address: str, reason: str) -> None:
        """See Acceptor."""
        self.reception.candidate_refused(address, reason)

    # -- what there is -----------------------------------------------------------------------------------

    @property
    def circle(self) -> Circle:
        """Whom this node may have links with. UsageError before it knows."""
        return self._pairs.known()

    def find(self, node: NodeId) -> Link | None:
        """The link to this node, if it is, or was, open. Without the lock."""
        pair = self._pairs.get(node)
        return pair.link if pair is not None and pair.is_open else None

    def links(self) -> dict[NodeId, Link]:
        """Those that are, or were, open."""
        with self._pairs.changed:
            return {pair.link.peer: pair.link for pair in self._pairs.listed() if pair.is_open}

    def unconnected(self) -> list[Unconnected]:
        """Members that somebody here wanted a link to, and that have none yet. Waits for nobody."""
        with self._pairs.changed:
            circle, pairs = self._pairs.known(), [pair for pair in self._pairs.listed() if not pair.is_open]
            found = [(circle.find(pair.link.peer), pair.state.cause or "") for pair in pairs]
        return [
            Unconnected(circle.rank_of(member.node), address_of(member) or "", cause)
            for member, cause in found
            if member is not None
        ]

    def settle(self, needless: Callable[[NodeId], bool]) -> None:
        """Before it is closed, and while it may still dial: wait until all that was sent over others has arrived, and
        what lies here for others has gone on. What is for who is `needless` need not arrive. Whoever does not answer
        within `heartbeat_timeout` is not waited for any longer.
        """
        try:
            self._node.progress.check()
        except NexarError:
            return  # in a forked child, say: nothing goes out any more
        self.relaying.settle(time.monotonic() + self._node.config.heartbeat_timeout, needless)

    def close(self) -> None:
        """Every link politely, all at once: what was sent still arrives. Idempotent.

        Those over other nodes come first, for the others are their way. Links are given up, and aborted, when nothing
        was heard on any of them for `heartbeat_timeout`: who is silent for so long counts as dead anywhere. A peer that
        is merely slow gets up to half a minute.
        """
        with self._pairs.changed:
            self._pairs.closed = True
            links = [*(pair.link for pair in self._pairs.listed()), *self.leavers.links()]
            arrivals = self.reception.arrivals()
            self._pairs.changed.notify_all()
        self._node.recall.make()
        for carrier in arrivals:
            carrier.abort(CLOSED)
        patience = self._node.config.heartbeat_timeout
        over_others = [link for link in links if is_relayed(link.schemes)]
        part(self._node.progress, over_others, patience=patience, longest=LONGEST_CLOSE)
        self.relaying.close()
        part(self._node.progress, links, patience=patience, longest=LONGEST_CLOSE)


def _close(link: Link) -> None:
    link.begin_close()
