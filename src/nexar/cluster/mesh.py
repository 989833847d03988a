"""My links to the other members: opened when first needed, or all at once where the world is small.

When two members dial each other at the same moment, both keep the same connection: `decisions.pairing` has the law. If
only one direction gets through, that one is used.

A link belongs to a pair of members for good; what connects it may be several carriers (the network's first, then shared
memory, whose address is told to the peer over it). Node, key and rank of the other end are checked on both sides
before a link is made: node and key by the transport's handshake and the membership's pin, the rank here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from nexar.cluster.arrivals import Arrivals
from nexar.cluster.decisions.pairing import Fate, Pairing, Turn
from nexar.cluster.dial import Dial, DialFailed, Superseded
from nexar.cluster.introduction import Answering
from nexar.cluster.membership import Member, Membership
from nexar.cluster.node import Node
from nexar.cluster.pins import why_not
from nexar.cluster.sidecars import Sidecars
from nexar.errors import PeerLost, UsageError
from nexar.links.link import Link
from nexar.links.parting import part
from nexar.links.router import Router
from nexar.transport.base import Carrier
from nexar.types import NodeId, Rank, format_node
from nexar.wire.frame import Frame
from nexar.wire.messages import Introduce, Introduced, Message

_log = logging.getLogger(__name__)

_SHARED_MEMORY: Final = "shm"
_CLOSED: Final = "this node is closed"
_TOO_MANY: Final = "you have dialed too often without becoming a link"
_LOST: Final = "the link between us was lost"
_LONGEST_DIAL: Final = 10.0
"""Seconds, of the lower node of two; the higher one's takes twice as long: it may have to wait for the end of the
other's, which hangs where the network lets only one direction through."""
_HEAD_START: Final = 3.0
"""Seconds that the lower rank has to open a link of a small world, before the higher one dials too; after a dial that
failed, the lower one waits a little longer than that for the other's."""
_LONGEST_CLOSE: Final = 30.0
_OPENERS: Final = 8  # links opened at the same time


@dataclass(slots=True)
class _Pair:
    """One peer, under the mesh's lock."""

    link: Link
    state: Pairing[Answering]


class Mesh:
    """The links of one node. It is the `Acceptor` of the node's transports. Close it before the node."""

    def __init__(
        self,
        node: Node,
        *,
        on_control: Callable[[Link, Message], None] | None = None,
        on_refused: Callable[[str, str], None] | None = None,
    ) -> None:
        """`on_control` gets the control messages of links; by default those about communicators find them."""
        self._node = node
        self.router: Final = Router(node.id, node.config, node.progress)
        """Where its links meet the communicators."""
        self._on_control = on_control or self.router.notices.arrived
        self._on_refused = on_refused
        self._sidecars = Sidecars(node)
        self._changed = threading.Condition()  # over everything below
        self._membership: Membership | None = None
        self._rank: Rank = -1
        self._arrivals = Arrivals()  # no links yet; before the membership is known, not even looked at
        self._pairs: dict[NodeId, _Pair] = {}
        self._closed = False

    # -- the membership --------------------------------------------------------------------------------

    def adopt(self, membership: Membership) -> None:
        """From now on these are the members. Connections that came before are looked at now."""
        rank = membership.rank_of(self._node.id)
        if rank is None:
            raise UsageError("this node is not in the membership that it is given")
        with self._changed:
            self._membership, self._rank = membership, rank
            early = self._arrivals.listed()
        for carrier in early:
            self._receive(carrier, membership)

    # -- opening: any thread ---------------------------------------------------------------------------

    def link(self, rank: Rank, deadline: float) -> Link:
        """The link to this rank; opened if it is not open yet. PeerLost says why it cannot be."""
        membership = self._known()
        member = membership.member(rank)
        pair = self._pairs.get(member.node)
        if pair is not None and pair.state.open:  # the way of every message: without the lock
            return pair.link
        with self._changed:
            pair = self._pair(membership, member)
            failures = pair.state.failures
        while (turn := self._turn(pair, failures, deadline)) is Turn.DIAL:
            self._dial(pair, rank, member, deadline)
        if turn is Turn.OPEN:
            return pair.link
        cause = pair.state.cause or "no connection came about in time"
        raise PeerLost(rank=rank, node=member.node, address=_address(member), cause=cause)

    def _turn(self, pair: _Pair, failures: int, deadline: float) -> Turn:
        """When nothing is under way any more. WAIT: but not any longer, it has failed since."""
        with self._changed:
            self._wait(lambda: not pair.state.pending, deadline)
            tried = pair.state.pending or pair.state.failures > failures
            return Turn.WAIT if tried and not pair.state.open else pair.state.want()

    def _wait(self, true: Callable[[], bool], deadline: float) -> bool:
        """Under the lock. UsageError when the mesh is closed meanwhile."""
        self._changed.wait_for(lambda: true() or self._closed, max(0.0, deadline - time.monotonic()))
        self._check_open()
        return true()

    def open_all(self, deadline: float) -> None:
        """Every link at once. Raises the first failure, when all have ended."""
        size = self._known().size
        dialing_first = [*range(self._rank + 1, size), *range(self._rank)]
        with ThreadPoolExecutor(min(_OPENERS, size), thread_name_prefix="nexar-open") as pool:
            openings = [pool.submit(self._open, rank, deadline) for rank in dialing_first]
        for opening in openings:
            opening.result()

    def _open(self, rank: Rank, deadline: float) -> None:
        """The lower rank dials, so that a small world needs no second dial; where it does not get through, perhaps the
        higher one does.
        """
        if rank < self._rank and self._is_open(rank, min(deadline, time.monotonic() + _HEAD_START)):
            return
        try:
            self.link(rank, deadline)
        except PeerLost:
            if not self._is_open(rank, min(deadline, time.monotonic() + 2 * _HEAD_START)):
                raise

    def _is_open(self, rank: Rank, until: float) -> bool:
        """Wait for it without dialing."""
        membership = self._known()
        with self._changed:
            pair = self._pair(membership, membership.member(rank))
            return self._wait(lambda: pair.state.open, until)

    def _dial(self, pair: _Pair, rank: Rank, member: Member, deadline: float) -> None:
        introduce = Introduce(rank=self._rank, epoch=self._known().epoch)
        dial = Dial(self._node, member, rank, pair.link, introduce)
        cause: str | None = "it was interrupted"
        try:
            longest = _LONGEST_DIAL if self._node.id < member.node else 2 * _LONGEST_DIAL
            dial.run(min(deadline, time.monotonic() + longest))
            cause = None
            self._sidecars.open(member, rank, pair.link, introduce, dial.sidecar)
        except Superseded:
            cause = None
        except DialFailed as failed:
            cause = str(failed)
        finally:
            with self._changed:
                sentences = pair.state.dialed(opened=dial.opened, cause=None if dial.opened else cause)
                self._changed.notify_all()
            for sentence in sentences:
                self._answer(pair, sentence.dialer, sentence.fate)

    # -- Acceptor: the driving thread --------------------------------------------------------------------

    def carrier_accepted(self, carrier: Carrier) -> None:
        """See Acceptor."""
        with self._changed:
            closed, membership = self._closed, self._membership
            displaced = None if closed else self._arrivals.add(carrier)
        if closed and (membership is None or carrier.scheme != _SHARED_MEMORY):
            carrier.abort(_CLOSED)
            return
        if displaced is not None:
            self._displace(displaced)
        if membership is not None:
            self._receive(carrier, membership)

    def _displace(self, carrier: Carrier) -> None:
        """It has to go for another one. Its sink hears nothing of that, so whoever counts on it is told here."""
        with self._changed:
            pair = self._pairs.get(carrier.peer.node)
            if pair is not None:
                for dialer in [each for each in pair.state.waiting if each.carrier is carrier]:
                    pair.state.ended(dialer)
                self._changed.notify_all()
        self.candidate_refused(carrier.peer.address, "it has dialed too often without becoming a link")
        carrier.abort(_TOO_MANY)

    def candidate_refused(self, address: str, reason: str) -> None:
        """See Acceptor."""
        _log.info("refused a connection from %s: %s", address, reason)
        if self._on_refused is not None:
            self._on_refused(address, reason)

    def _receive(self, carrier: Carrier, membership: Membership) -> None:
        refusal = why_not(carrier, membership)
        if refusal is not None:
            self._arrived(carrier)
            self.candidate_refused(carrier.peer.address, refusal)
            carrier.abort(refusal)
        elif carrier.scheme == _SHARED_MEMORY:
            # Who knows the address was told it on the link, so it needs no further introduction.
            self._arrived(carrier)
            self._use(carrier, membership)
        else:
            Answering(carrier, self._introduced, self._confirmed, self._ended)

    def _arrived(self, carrier: Carrier) -> None:
        """It is something else now: a link, or nothing."""
        with self._changed:
            self._arrivals.remove(carrier)

    def _ended(self, dialer: Answering) -> None:
        """It came to nothing: whoever counted on it begins anew."""
        self._arrived(dialer.carrier)
        with self._changed:
            pair = self._pairs.get(dialer.carrier.peer.node)
            if pair is not None:
                pair.state.ended(dialer)
                self._changed.notify_all()

    def _introduced(self, dialer: Answering, introduce: Introduce) -> None:
        membership, peer = self._known(), dialer.carrier.peer
        rank = membership.rank_of(peer.node)
        if rank is None or introduce.rank != rank or introduce.epoch != membership.epoch:
            place = "no place" if rank is None else f"rank {rank}"
            claim = f"rank {introduce.rank} at epoch {introduce.epoch}"
            reason = f"it claims {claim}, the membership gives it {place} at epoch {membership.epoch}"
            self._decline(dialer, reason)
        elif (unwanted := self._sidecars.why_not(dialer.carrier, introduce)) is not None:
            self._decline(dialer, unwanted)
        elif introduce.sidecar:
            dialer.welcome(Introduced(rank=self._rank, epoch=membership.epoch))
        else:
            self._judge(dialer, membership, rank)

    def _decline(self, dialer: Answering, reason: str) -> None:
        self.candidate_refused(dialer.carrier.peer.address, reason)
        dialer.decline(reason)

    def _judge(self, dialer: Answering, membership: Membership, rank: Rank) -> None:
        with self._changed:
            if self._closed:
                return  # its carrier is about to be aborted
            pair = self._pair(membership, membership.members[rank])
            fate = pair.state.introduced(dialer)
        self._answer(pair, dialer, fate)

    def _answer(self, pair: _Pair, dialer: Answering, fate: Fate) -> None:
        """Any thread."""
        if fate is Fate.WELCOME:
            self._welcome(dialer)
        elif fate is Fate.SUPERSEDED and pair.link.failure is not None:
            dialer.decline(_LOST)
        elif fate is Fate.SUPERSEDED:
            dialer.decline("your peer's own dial has won", superseded=True)

    def _welcome(self, dialer: Answering) -> None:
        membership, peer = self._known(), dialer.carrier.peer.node
        rank = membership.rank_of(peer)
        same_host = rank in membership.ranks_on(membership.member(self._rank).host)
        address = self._node.memory_address_for(peer) if same_host else ""
        offered = self._sidecars.offered
        dialer.welcome(Introduced(rank=self._rank, epoch=membership.epoch, shared_memory=address, sidecar=offered))

    def _confirmed(self, dialer: Answering, frame: Frame, body: memoryview) -> None:
        carrier = dialer.carrier
        if dialer.is_sidecar:
            self._confirmed_sidecar(carrier, frame, body)
            return
        with self._changed:
            self._arrivals.remove(carrier)
            pair = None if self._closed else self._pairs[carrier.peer.node]
            welcome = pair is not None and pair.state.welcomes(dialer)
        if pair is None or not welcome:
            carrier.abort(_CLOSED if pair is None else "you have another connection to this node")
            return
        pair.link.adopt(carrier)
        with self._changed:
            pair.state.confirmed(dialer)
            self._changed.notify_all()
        pair.link.frame_arrived(carrier, frame, body)

    def _confirmed_sidecar(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        """It may be here before the link is: another connection, on which the dialer has gone on as well."""
        self._arrived(carrier)
        pair = self._pair_of(carrier, self._known())
        if pair is None:
            carrier.abort(_CLOSED)
        else:
            pair.link.sidecar.adopt(carrier)
            pair.link.sidecar.frame_arrived(carrier, frame, body)

    # -- pairs -----------------------------------------------------------------------------------------

    def _known(self) -> Membership:
        if self._membership is None:
            raise UsageError("this node does not know its membership yet")
        return self._membership

    def _pair(self, membership: Membership, member: Member) -> _Pair:
        """Under the lock."""
        self._check_open()
        if member.node not in self._pairs:
            rank = membership.rank_of(member.node)
            link = Link(
                self.router,
                member.node,
                rank=rank,
                address=_address(member),
                on_control=self._on_control,
            )
            self._pairs[member.node] = _Pair(link, Pairing(lower=self._node.id < member.node))
        return self._pairs[member.node]

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"{_CLOSED}; make a new one with nexar.init()")

    def _use(self, carrier: Carrier, membership: Membership) -> None:
        """One more carrier of a link; also of one that is closing, which ends politely on all of them."""
        pair = self._pair_of(carrier, membership)
        if pair is None:
            carrier.abort(_CLOSED)
        else:
            pair.link.adopt(carrier)

    def _pair_of(self, carrier: Carrier, membership: Membership) -> _Pair | None:
        """Of a carrier that came on top; None: the node is closed, and there never was one."""
        rank = membership.rank_of(carrier.peer.node)
        assert rank is not None  # it was checked when it came
        with self._changed:
            pair = self._pairs.get(carrier.peer.node)
            return pair if pair is not None or self._closed else self._pair(membership, membership.members[rank])

    def rank_of(self, node: NodeId) -> Rank:
        """Of a member."""
        rank = self._known().rank_of(node)
        if rank is None:
            raise UsageError(f"node {format_node(node)} is no member of this cluster")
        return rank

    def links(self) -> dict[Rank, Link]:
        """Those that are, or were, open."""
        membership = self._known()
        with self._changed:
            opened = [(membership.rank_of(node), pair.link) for node, pair in self._pairs.items() if pair.state.open]
        return {rank: link for rank, link in opened if rank is not None}

    def close(self) -> None:
        """Every link politely, all at once: what was sent still arrives. Idempotent.

        Links are given up, and aborted, when nothing was heard on any of them for `heartbeat_timeout`: who is silent
        for so long counts as dead anywhere. A peer that is merely slow gets up to half a minute.
        """
        with self._changed:
            self._closed = True
            pairs = list(self._pairs.values())
            arrivals = self._arrivals.listed()
            self._changed.notify_all()
        self._node.recall.make()
        for carrier in arrivals:
            carrier.abort(_CLOSED)
        links = [pair.link for pair in pairs]
        part(self._node.progress, links, patience=self._node.config.heartbeat_timeout, longest=_LONGEST_CLOSE)


def _address(member: Member) -> str | None:
    """The most promising one: for people."""
    return next((told[0] for told in member.addresses.values() if told), None)
