"""The links of one node to the other members, opened on first use or, in a small world, all at once.

A link may have several carriers. Pairs number their links: this distinguishes a new dial, after a loss that one side
has not noticed, from a concurrent dial.

Invariant: in a large full mesh each rank dials the ranks it watches and is dialed by its watchers, never both ways. So
a rank that can dial but cannot be dialed is found. The cost per rank does not grow with the world.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple

from msgspec.structs import replace

from nexar.cluster.acceptor import PeerAcceptor
from nexar.cluster.control_channel import ControlChannel, LinkLost, LivenessConnectionLost, RemovalReported
from nexar.cluster.decisions.failure_detector import watched, watchers
from nexar.cluster.decisions.peering import LinkTurn, PeerDirectory
from nexar.cluster.handshake import DialSuperseded, NoLongerMember, PeerDial, PeerDialFailed, SidecarDialer
from nexar.cluster.liveness_connections import LivenessConnections
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
from nexar.wire.control import Introduced

_LONGEST_DIAL: Final = 10.0
"""Seconds to connect, and for the lower node also to be answered. The higher one waits twice as long: the lower one
answers only after its own dial ends, which hangs if the network passes one direction only.
"""


class UnconnectedMember(NamedTuple):
    """A wanted member without a connection."""

    rank: Rank | None
    address: str
    cause: str  # of the last failed dial; empty if none failed


class Mesh:
    """The links of one node, and the `Acceptor` of its transports. Close it before the node."""

    def __init__(self, node: Node, *, on_refused: Callable[[str, str], None] | None = None) -> None:
        """`on_refused` receives address and reason. The driver calls it; it must not block."""
        self._node = node
        self.router: Final = Router(node.id, node.config, node.progress)
        self.control: Final = ControlChannel(self.router.notices.arrived)
        self.quiet_leavers: Final = QuietLeavers()  # links to closed former members, until they end
        self._sidecars = SidecarDialer(node)
        self._peers = PeerTable(self.router, self.control.control, self._lost)
        self.relay_routes: Final = RelayRoutes(
            node, self._peers, self.router, self.dial, self.control.post, control_loop=node.control_loop
        )
        self.liveness_connections: Final = self._make_liveness_connections()
        self.acceptor: Final = PeerAcceptor(node, self._peers, self._sidecars, self.liveness_connections, on_refused)
        self._timer = node.control_loop.call_at(None, self._lose_overdue)

    def _make_liveness_connections(self) -> LivenessConnections | None:
        """None if the peers are in this process, whose threads do not end silently. The node runtime closes them."""
        if not self._node.has_remote_peers:
            return None
        return LivenessConnections(
            self._node,
            self.links,
            lambda node, cause: self.control.post(LivenessConnectionLost(node, cause)),
            control_loop=self._node.control_loop,
        )

    # -- membership ------------------------------------------------------------------------------------

    def adopt(self, membership: Membership, change: Change | None = None) -> None:
        """Closes links to removed members, except to quiet ones, whose data may still arrive. Lost links may be dialed
        again. Checks early connections. Never blocks.
        """
        with self._peers.changed:
            old = self._peers.directory
            directory = PeerDirectory(self._node.id, membership) if old is None else old.moved_to(membership, change)
            ended = self._peers.move(directory)
            early = self.acceptor.arrivals() if old is None else []
        self._node.expect_peers(membership.size)
        # Voters ask a member whose process is ending over their link, and get no answer. Without a link they try its
        # port, which is open for some milliseconds more: then they would vote against its removal.
        self._node.lose_at_exit(self._node.config.topology == FULL_MESH and membership.size <= EAGER_WORLD)
        now, quiet = time.monotonic(), frozenset[NodeId]() if change is None else change.quiet
        for link in ended:
            direct = link.peer in quiet and not is_relayed(link.schemes)  # relayed data has all arrived (`settle`)
            if not (direct and self.quiet_leavers.keep(link, now)):
                link.begin_close()
        self._timer.wake_by(self.quiet_leavers.due())
        self.relay_routes.adopt()
        for carrier in early:
            self.acceptor.receive(carrier, directory)

    def _lose_overdue(self, now: float) -> float | None:
        """Lose links to nodes that closed LONGEST_CLOSE ago, so that calls end. Returns the next time."""
        for link in self.quiet_leavers.overdue(now):
            link.lose(f"it closed {LONGEST_CLOSE:.0f} s ago, and nothing more came from it")
        return self.quiet_leavers.due()

    def expect(self, joiners: Iterable[Member]) -> None:
        with self._peers.changed:
            self._peers.directory = self._peers.known().with_joiners(joiners)

    # -- opening links: any thread ---------------------------------------------------------------------

    def link(self, node: NodeId, deadline: float) -> Link:
        """Opens the link if needed. Blocks. Raises PeerLost."""
        pair = self._peers.get(node)
        if pair is not None and pair.state.open:  # path of every message: without the lock
            return pair.link
        if pair is not None and pair.relayed:
            return pair.link
        if not self.relay_routes.wants(node):
            link = self.relay_routes.relayed(node, deadline)
            if link is not None:
                return link
        return self.dial(node, deadline)

    def dial(self, node: NodeId, deadline: float) -> Link:
        """Like `link`, but direct."""
        with self._peers.changed:
            directory = self._peers.known()
            member = directory.find(node)
            if member is None:
                raise PeerLost(node=node, cause=f"it is no member at epoch {directory.membership.epoch}")
            pair = self._peers.of(directory, member)
            failures = pair.state.failures
        while (turn := self._next_turn(pair, failures, deadline)) is LinkTurn.DIAL:
            self._dial(pair, member, deadline)
        if turn is LinkTurn.OPEN:
            return pair.link
        cause = pair.state.cause or "no connection came about in time"
        raise PeerLost(rank=directory.rank_of(node), node=node, address=address_of(member), cause=cause)

    def relink(self, node: NodeId, deadline: float) -> Link:
        """Like `link`, but replaces a lost link or a failed dial by a direct connection."""
        with self._peers.changed:
            pair = self._peers.get(node)
            lost = pair is not None and pair.link.failure is not None and pair.is_open
            if pair is not None and lost:
                self._peers.replace(pair, next_number(pair.number))
        return self.dial(node, deadline) if lost or self.relay_routes.wants(node) else self.link(node, deadline)

    def _lost(self, link: Link, error: NexarError) -> None:
        self.relay_routes.relay.lost(link)
        if self.quiet_leavers.forget(link):
            self._node.progress.run_soon(partial(_close, link))
        self.control.post(LinkLost(link, error))

    def _next_turn(self, pair: PeerEntry, failures: int, deadline: float) -> LinkTurn:
        """Wait until no dial is pending. WAIT: it failed or is late."""
        with self._peers.changed:
            self._peers.wait(lambda: not pair.state.pending, deadline)
            tried = pair.state.pending or pair.state.failures > failures
            return LinkTurn.WAIT if tried and not pair.state.open else pair.state.want()

    def is_open(self, node: NodeId, until: float) -> bool:
        """Wait for the link without dialing. False at `until` or when the node closes."""
        cancel_token = self._node.cancel_token
        with self._peers.changed, cancel_token.waking(self._peers.wake):
            directory = self._peers.known()
            member = directory.find(node)
            if member is None:
                return False
            pair = self._peers.of(directory, member)
            self._peers.wait(
                lambda: pair.state.open or cancel_token.is_cancelled or self._peers.known().find(node) is None, until
            )
            return pair.state.open

    def _dial(self, pair: PeerEntry, member: Member, deadline: float) -> None:
        introduce = replace(self._peers.known().introduction(), number=pair.number)
        dial = PeerDial(self._node, member, pair.link, introduce, self._why_not_accepted)
        cause: str | None = "it was interrupted"
        with self._peers.changed:
            pair.cancel_token = dial.cancel_token
            if self._peers.known().find(member.node) is None:  # removed meanwhile
                dial.cancel_token.cancel()
        try:
            connect_by = time.monotonic() + _LONGEST_DIAL + self._node.delay_meter.seconds
            answer_by = connect_by if self._node.id < member.node else connect_by + _LONGEST_DIAL
            dial.run(min(deadline, answer_by), connect_by)
            cause = None
            self._sidecars.open(member, pair.link, introduce, dial.sidecar, self._why_not_accepted)
        except DialSuperseded:
            cause = None
        except NoLongerMember as gone:
            cause = str(gone)
            self.control.post(RemovalReported(gone.epoch, gone.reason))
        except PeerDialFailed as failed:
            cause = str(failed)
        finally:
            with self._peers.changed:
                pair.cancel_token = None
                answers = pair.state.dialed(opened=dial.opened, cause=None if dial.opened else cause)
                self._peers.changed.notify_all()
            for each in answers:
                self.acceptor.answer(pair, each.dialer, each.outcome)

    def _why_not_accepted(self, node: NodeId, claim: Introduced) -> str | None:
        # The membership may have changed since the dial began.
        return self._peers.known().why_not_accepted(node, claim)

    # -- Acceptor: called by the driver ------------------------------------------------------------------

    def carrier_accepted(self, carrier: Carrier) -> None:
        self.acceptor.carrier_accepted(carrier)

    def candidate_refused(self, address: str, reason: str) -> None:
        self.acceptor.candidate_refused(address, reason)

    # -- state -------------------------------------------------------------------------------------------

    @property
    def directory(self) -> PeerDirectory:
        """Raises UsageError before the membership is known."""
        return self._peers.known()

    def find(self, node: NodeId) -> Link | None:
        """The link if it is or was open. Lock-free."""
        pair = self._peers.get(node)
        return pair.link if pair is not None and pair.is_open else None

    def links(self) -> dict[NodeId, Link]:
        with self._peers.changed:
            return {pair.link.peer: pair.link for pair in self._peers.listed() if pair.is_open}

    def unconnected(self) -> list[UnconnectedMember]:
        with self._peers.changed:
            directory, peers = self._peers.known(), [pair for pair in self._peers.listed() if not pair.is_open]
            found = [(directory.find(pair.link.peer), pair.state.cause or "") for pair in peers]
        return [
            UnconnectedMember(directory.rank_of(member.node), address_of(member) or "", cause)
            for member, cause in found
            if member is not None
        ]

    def settle(self, unneeded: Callable[[NodeId], bool]) -> None:
        """Call this before `close`: waits until relayed data has arrived, except for `unneeded` nodes. Each peer has
        `heartbeat_timeout` to answer.
        """
        try:
            self._node.progress.check()
        except NexarError:
            return  # e.g. in a forked child: nothing can be sent
        self.relay_routes.settle(time.monotonic() + self._node.config.heartbeat_timeout, unneeded)

    def close(self) -> None:
        """Finish all links: sent data still arrives. Idempotent.

        Relayed links come first, since they need the others. Links are aborted when all were silent for
        `heartbeat_timeout`; a slow peer gets LONGEST_CLOSE.
        """
        self._timer.close()
        with self._peers.changed:
            self._peers.closed = True
            links = [*(pair.link for pair in self._peers.listed()), *self.quiet_leavers.links()]
            arrivals = self.acceptor.arrivals()
            self._peers.changed.notify_all()
        self._node.cancel_token.cancel()
        for carrier in arrivals:
            carrier.abort(CLOSED)
        close_timeout = self._node.config.heartbeat_timeout
        relayed = [link for link in links if is_relayed(link.schemes)]
        close_all(self._node.progress, relayed, close_timeout=close_timeout, longest=LONGEST_CLOSE)
        self.relay_routes.close()
        close_all(self._node.progress, links, close_timeout=close_timeout, longest=LONGEST_CLOSE)


def _close(link: Link) -> None:
    link.begin_close()


EAGER_WORLD: Final = 8
"""Up to this size all links are opened at once."""
_HEAD_START: Final = 3.0
"""Seconds for the lower rank to open a link before the higher one dials too. After a failed dial the lower one waits
twice as long for the other's. In a large world a failed dial is repeated after this time.
"""
_MAX_OPENING: Final = 8  # at a time


def open_first(mesh: Mesh, topology: str, deadline: float) -> None:
    """Open the links needed at first. Blocks. Raises the first failure after all attempts."""
    if topology != FULL_MESH or mesh.directory.membership.size <= EAGER_WORLD:
        open_all(mesh, deadline)
    else:
        open_watching(mesh, deadline)


def open_watching(mesh: Mesh, deadline: float) -> None:
    """Dial the watched ranks, wait for the watchers. Errors as `open_first`."""
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
    # The peer does not dial, and a burst of connections may make one dial fail.
    try:
        mesh.relink(node, deadline)
    except PeerLost:
        if not mesh.is_open(node, min(deadline, time.monotonic() + _HEAD_START)):
            mesh.relink(node, deadline)


def _await(mesh: Mesh, rank: Rank, member: Member, deadline: float) -> None:
    if not mesh.is_open(member.node, deadline):
        cause = "it did not connect to this rank in time"
        raise PeerLost(rank=rank, node=member.node, address=address_of(member), cause=cause)


def is_open_to_all(mesh: Mesh) -> bool:
    """Whether `open_all` has nothing to do. Never blocks."""
    return not _unopened(mesh)


def _unopened(mesh: Mesh) -> list[Rank]:
    directory = mesh.directory
    members, mine = directory.membership.members, directory.rank
    opened = {node for node in mesh.links() if mesh.relay_routes.link(node) is not None}
    order = [*range(mine + 1, len(members)), *range(mine)]
    wanted = [rank for rank in order if mesh.relay_routes.wants(members[rank].node)]
    return [rank for rank in wanted if members[rank].node not in opened]


def open_all(mesh: Mesh, deadline: float) -> None:
    """Open missing links to neighbours. Errors as `open_first`."""
    members, mine = mesh.directory.membership.members, mesh.directory.rank
    missing = _unopened(mesh)
    if not missing:
        return
    with ThreadPoolExecutor(min(_MAX_OPENING, len(missing)), thread_name_prefix="nexar-open") as pool:
        openings = [pool.submit(_open, mesh, members[rank].node, rank < mine, deadline) for rank in missing]
    for opening in openings:
        opening.result()


def _open(mesh: Mesh, node: NodeId, lower: bool, deadline: float) -> None:
    # The lower rank dials, which saves a second dial; if that fails, the higher one tries.
    if lower and mesh.is_open(node, min(deadline, time.monotonic() + _HEAD_START)):
        return
    try:
        mesh.relink(node, deadline)
    except PeerLost:
        if not mesh.is_open(node, min(deadline, time.monotonic() + 2 * _HEAD_START)):
            raise
