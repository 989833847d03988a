"""My links to the other members: opened when first needed, or all at once where the world is small.

When two members dial each other at the same moment, both keep the same connection: `decisions.pairing` has the law. If
only one direction gets through, that one is used.

A link belongs to a pair of nodes, whatever ranks they have; what connects it may be several carriers (the network's
first, then shared memory, whose address is told to the peer over it). Node, key and rank of the other end are checked
on both sides before a link is made: node and key by the transport's handshake and the membership's pin, the rank here.

When a link is lost and both ends live, they may make another one: the pair counts its links, and the introduction says
which one is meant. So a dial that answers a loss which the other side has not noticed is told from a dial that crossed
the other side's own.

Opens links when the first communicator is made, so that ranks that cannot connect are known before anybody computes.

In a small world, and in a sparse topology, these are all links between neighbours. In a large full mesh a rank dials
the ranks that it watches and waits for the ranks that watch it to dial.

Law: in a large full mesh every rank is dialed by at least one other rank, and never dials that one itself meanwhile.
So a rank that cannot be dialed is found, although it can dial the others. The cost per rank does not grow with the
world.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple

from msgspec.structs import replace

from nexar.cluster.acceptor import LivenessTaker, PeerAcceptor
from nexar.cluster.decisions.failure_detector import watched, watchers
from nexar.cluster.decisions.peering import LinkTurn, PeerDirectory
from nexar.cluster.handshake import DialSuperseded, NoLongerMember, PeerDial, PeerDialFailed, SidecarDialer
from nexar.cluster.membership import Change, Member, Membership
from nexar.cluster.node import Node
from nexar.cluster.peer_table import CLOSED, LONGEST_CLOSE, PeerEntry, PeerTable, QuietLeavers, address_of, next_number
from nexar.cluster.relay_routes import RelayRoutes
from nexar.errors import NexarError, PeerLost
from nexar.links.carrier_selection import is_relayed
from nexar.links.link import Link, close_all
from nexar.links.router import Router
from nexar.topology import FULL_MESH
from nexar.transport.base import Carrier
from nexar.types import NodeId, Rank
from nexar.wire.control import Introduced, Message

_LONGEST_DIAL: Final = 10.0
"""Seconds to connect, and for the lower node of two also to be answered. The higher one waits twice as long for its
answer: the lower one gives none before its own dial ends, which hangs where the network lets only one direction
through."""


class UnconnectedMember(NamedTuple):
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
        self.quiet_leavers: Final = QuietLeavers()
        """Links to who has closed and is no member any more, until they end."""
        self._sidecars = SidecarDialer(node)
        self._on_lost = on_lost
        self._peers = PeerTable(self.router, on_control or self.router.notices.arrived, self._lost)
        self.relay_routes: Final = RelayRoutes(node, self._peers, self.router, self.dial)
        """Who is whose neighbour, and how the others are reached."""
        self.acceptor: Final = PeerAcceptor(node, self._peers, self._sidecars, on_refused)
        """Where the others' connections arrive."""

    @property
    def liveness_connections(self) -> LivenessTaker | None:
        """Takes connections that carry nothing. Written before anybody can dial for one."""
        return self.acceptor.liveness_connections

    @liveness_connections.setter
    def liveness_connections(self, taker: LivenessTaker) -> None:
        self.acceptor.liveness_connections = taker

    # -- the membership --------------------------------------------------------------------------------

    def adopt(self, membership: Membership, change: Change | None = None) -> None:
        """From now on these are the members; `change` says why those of before are none any more. Links to them are
        closed, but for those that lead to who has closed: what was sent there still arrives. Links that were lost may
        be dialed anew. Connections that came before are looked at now. Never blocks.
        """
        with self._peers.changed:
            old = self._peers.directory
            directory = PeerDirectory(self._node.id, membership) if old is None else old.moved_to(membership, change)
            ended = self._peers.move(directory)
            early = self.acceptor.arrivals() if old is None else []
        self._node.expect_peers(membership.size)
        now, quiet = time.monotonic(), frozenset[NodeId]() if change is None else change.quiet
        for link in ended:
            direct = link.peer in quiet and not is_relayed(link.schemes)  # over others all has arrived: see `settle`
            if not (direct and self.quiet_leavers.keep(link, now)):
                link.begin_close()
        self.relay_routes.adopt()
        for carrier in early:
            self.acceptor.receive(carrier, directory)

    def let_go(self, now: float) -> float | None:
        """Give up links to who closed long ago: whoever still waits for something from there is told. Returns when to
        look again, None: nobody else is on its way out.
        """
        for link in self.quiet_leavers.overdue(now):
            link.lose(f"it closed {LONGEST_CLOSE:.0f} s ago, and nothing more came from it")
        return self.quiet_leavers.due()

    def expect(self, joiners: Iterable[Member]) -> None:
        """These nodes may have a link too: they wait to become members."""
        with self._peers.changed:
            self._peers.directory = self._peers.known().with_joiners(joiners)

    # -- opening: any thread ---------------------------------------------------------------------------

    def link(self, node: NodeId, deadline: float) -> Link:
        """The link to this node; opened if it is not open yet. PeerLost says why it cannot be."""
        pair = self._peers.get(node)
        if pair is not None and pair.state.open:  # the way of every message: without the lock
            return pair.link
        if pair is not None and pair.relayed:
            return pair.link
        if not self.relay_routes.wants(node):
            link = self.relay_routes.relayed(node, deadline)
            if link is not None:
                return link
        return self.dial(node, deadline)

    def dial(self, node: NodeId, deadline: float) -> Link:
        """As `link`; but connected to this node itself, and not over others: neighbour or not."""
        with self._peers.changed:
            directory = self._peers.known()
            member = directory.find(node)
            if member is None:
                raise PeerLost(node=node, cause=f"it is no member at epoch {directory.membership.epoch}")
            pair = self._peers.of(directory, member)
            failures = pair.state.failures
        while (turn := self._turn(pair, failures, deadline)) is LinkTurn.DIAL:
            self._dial(pair, member, deadline)
        if turn is LinkTurn.OPEN:
            return pair.link
        cause = pair.state.cause or "no connection came about in time"
        raise PeerLost(rank=directory.rank_of(node), node=node, address=address_of(member), cause=cause)

    def relink(self, node: NodeId, deadline: float) -> Link:
        """As `link`; but one that was lost is replaced, and one whose dial failed is dialed again. Where other nodes
        have led to it so far, that is not counted on any more.
        """
        with self._peers.changed:
            pair = self._peers.get(node)
            lost = pair is not None and pair.link.failure is not None and pair.is_open
            if pair is not None and lost:
                self._peers.replace(pair, next_number(pair.number))
        return self.dial(node, deadline) if lost or self.relay_routes.wants(node) else self.link(node, deadline)

    def _lost(self, link: Link, error: NexarError) -> None:
        """A link has ended without this side's will."""
        self.relay_routes.relay.lost(link)
        if self.quiet_leavers.forget(link):
            self._node.progress.run_soon(partial(_close, link))
        if self._on_lost is not None:
            self._on_lost(link, error)

    def _turn(self, pair: PeerEntry, failures: int, deadline: float) -> LinkTurn:
        """When nothing is under way any more. WAIT: but not any longer, it has failed since."""
        with self._peers.changed:
            self._peers.wait(lambda: not pair.state.pending, deadline)
            tried = pair.state.pending or pair.state.failures > failures
            return LinkTurn.WAIT if tried and not pair.state.open else pair.state.want()

    def is_open(self, node: NodeId, until: float) -> bool:
        """Wait for the link without dialing; not any longer when the node closes."""
        cancel_token = self._node.cancel_token
        with self._peers.changed, cancel_token.waking(self._peers.wake):
            directory = self._peers.known()
            member = directory.find(node)
            if member is None:
                return False
            pair = self._peers.of(directory, member)
            self._peers.wait(
                lambda: pair.state.open or cancel_token.made or self._peers.known().find(node) is None, until
            )
            return pair.state.open

    def _dial(self, pair: PeerEntry, member: Member, deadline: float) -> None:
        introduce = replace(self._peers.known().introduction(), number=pair.number)
        dial = PeerDial(self._node, member, pair.link, introduce, self._fault_of)
        cause: str | None = "it was interrupted"
        with self._peers.changed:
            pair.cancel_token = dial.cancel_token
            if self._peers.known().find(member.node) is None:  # since it was asked for
                dial.cancel_token.make()
        try:
            connect_by = time.monotonic() + _LONGEST_DIAL + self._node.delay_meter.seconds
            answer_by = connect_by if self._node.id < member.node else connect_by + _LONGEST_DIAL
            dial.run(min(deadline, answer_by), connect_by)
            cause = None
            self._sidecars.open(member, pair.link, introduce, dial.sidecar, self._fault_of)
        except DialSuperseded:
            cause = None
        except NoLongerMember as gone:
            cause = str(gone)
            self._expelled(gone)
        except PeerDialFailed as failed:
            cause = str(failed)
        finally:
            with self._peers.changed:
                pair.cancel_token = None
                sentences = pair.state.dialed(opened=dial.opened, cause=None if dial.opened else cause)
                self._peers.changed.notify_all()
            for sentence in sentences:
                self.acceptor.answer(pair, sentence.dialer, sentence.outcome)

    def _fault_of(self, node: NodeId, claim: Introduced) -> str | None:
        """At the moment of the answer: the membership may have changed since the dial began."""
        return self._peers.known().why_not_accepted(node, claim)

    def _expelled(self, gone: NoLongerMember) -> None:
        if self.on_expelled is not None:
            self.on_expelled(gone.epoch, gone.reason)

    # -- Acceptor: the driving thread --------------------------------------------------------------------

    def carrier_accepted(self, carrier: Carrier) -> None:
        """See Acceptor."""
        self.acceptor.carrier_accepted(carrier)

    def candidate_refused(self, address: str, reason: str) -> None:
        """See Acceptor."""
        self.acceptor.candidate_refused(address, reason)

    # -- what there is -----------------------------------------------------------------------------------

    @property
    def directory(self) -> PeerDirectory:
        """Whom this node may have links with. UsageError before it knows."""
        return self._peers.known()

    def find(self, node: NodeId) -> Link | None:
        """The link to this node, if it is, or was, open. Without the lock."""
        pair = self._peers.get(node)
        return pair.link if pair is not None and pair.is_open else None

    def links(self) -> dict[NodeId, Link]:
        """Those that are, or were, open."""
        with self._peers.changed:
            return {pair.link.peer: pair.link for pair in self._peers.listed() if pair.is_open}

    def unconnected(self) -> list[UnconnectedMember]:
        """Members that somebody here wanted a link to, and that have none yet. Waits for nobody."""
        with self._peers.changed:
            directory, peers = self._peers.known(), [pair for pair in self._peers.listed() if not pair.is_open]
            found = [(directory.find(pair.link.peer), pair.state.cause or "") for pair in peers]
        return [
            UnconnectedMember(directory.rank_of(member.node), address_of(member) or "", cause)
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
        self.relay_routes.settle(time.monotonic() + self._node.config.heartbeat_timeout, needless)

    def close(self) -> None:
        """Every link politely, all at once: what was sent still arrives. Idempotent.

        Those over other nodes come first, for the others are their way. Links are given up, and aborted, when nothing
        was heard on any of them for `heartbeat_timeout`: who is silent for so long counts as dead anywhere. A peer that
        is merely slow gets up to half a minute.
        """
        with self._peers.changed:
            self._peers.closed = True
            links = [*(pair.link for pair in self._peers.listed()), *self.quiet_leavers.links()]
            arrivals = self.acceptor.arrivals()
            self._peers.changed.notify_all()
        self._node.cancel_token.make()
        for carrier in arrivals:
            carrier.abort(CLOSED)
        close_timeout = self._node.config.heartbeat_timeout
        over_others = [link for link in links if is_relayed(link.schemes)]
        close_all(self._node.progress, over_others, close_timeout=close_timeout, longest=LONGEST_CLOSE)
        self.relay_routes.close()
        close_all(self._node.progress, links, close_timeout=close_timeout, longest=LONGEST_CLOSE)


def _close(link: Link) -> None:
    link.begin_close()


EAGER_WORLD: Final = 8
"""Up to this size every link is opened at once; in larger worlds a link is opened when it is first used."""
_HEAD_START: Final = 3.0
"""Seconds that the lower rank has to open a link, before the higher one dials too; after a dial that failed, the lower
one waits a little longer than that for the other's. In a large world, a dial that failed is repeated after that
time."""
_OPENERS: Final = 8  # links opened at the same time


def open_first(mesh: Mesh, topology: str, deadline: float) -> None:
    """The links that this node must have before it counts as connected. Raises the first failure, when all attempts
    have ended. Blocks.
    """
    if topology != FULL_MESH or mesh.directory.membership.size <= EAGER_WORLD:
        open_all(mesh, deadline)
    else:
        open_watching(mesh, deadline)


def open_watching(mesh: Mesh, deadline: float) -> None:
    """The links to the ranks that this one watches, which it dials, and to those that watch it, which dial it. Raises
    the first failure, when all dials have ended.
    """
    directory = mesh.directory
    members, mine, size = directory.membership.members, directory.rank, directory.membership.size
    dialed = watched(size, mine)
    with ThreadPoolExecutor(len(dialed), thread_name_prefix="nexar-open") as pool:
        openings = [pool.submit(_dial, mesh, members[rank].node, deadline) for rank in dialed]
    for opening in openings:
        opening.result()
    for rank in watchers(size, mine):
        _await(mesh, rank, members[rank], deadline)


def _dial(mesh: Mesh, node: NodeId, deadline: float) -> None:
    """The other one does not dial: what keeps a single dial from getting through may be a burst of connections."""
    try:
        mesh.relink(node, deadline)
    except PeerLost:
        if not mesh.is_open(node, min(deadline, time.monotonic() + _HEAD_START)):
            mesh.relink(node, deadline)


def _await(mesh: Mesh, rank: Rank, member: Member, deadline: float) -> None:
    if not mesh.is_open(member.node, deadline):
        cause = "it did not connect to this rank in time"
        raise PeerLost(rank=rank, node=member.node, address=address_of(member), cause=cause)


def open_all(mesh: Mesh, deadline: float) -> None:
    """Every link to a neighbour that is not open yet. Raises the first failure, when all have ended."""
    directory = mesh.directory
    members, mine = directory.membership.members, directory.rank
    opened = {node for node in mesh.links() if mesh.relay_routes.link(node) is not None}
    order = [*range(mine + 1, len(members)), *range(mine)]
    wanted = [rank for rank in order if mesh.relay_routes.wants(members[rank].node)]
    missing = [rank for rank in wanted if members[rank].node not in opened]
    if not missing:
        return
    with ThreadPoolExecutor(min(_OPENERS, len(missing)), thread_name_prefix="nexar-open") as pool:
        openings = [pool.submit(_open, mesh, members[rank].node, rank < mine, deadline) for rank in missing]
    for opening in openings:
        opening.result()


def _open(mesh: Mesh, node: NodeId, lower: bool, deadline: float) -> None:
    """The lower rank dials, so that a small world needs no second dial; where it does not get through, perhaps the
    higher one does.
    """
    if lower and mesh.is_open(node, min(deadline, time.monotonic() + _HEAD_START)):
        return
    try:
        mesh.relink(node, deadline)
    except PeerLost:
        if not mesh.is_open(node, min(deadline, time.monotonic() + 2 * _HEAD_START)):
            raise
