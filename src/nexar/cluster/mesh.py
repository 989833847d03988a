"""My links to the other members: opened when first needed, or all at once where the world is small.

Law of two dials: when two members dial each other at the same moment, the dial of the lower node id stays. The lower
one lets the other's introduction wait until its own dial has come to something; the higher one accepts at once. So
both keep the same connection, and if only one direction gets through, that one is used.

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
from nexar.cluster.dial import Dial, DialFailed, Superseded
from nexar.cluster.introduction import Answering
from nexar.cluster.membership import Member, Membership
from nexar.cluster.node import Node
from nexar.cluster.pins import why_not
from nexar.errors import NexarError, PeerLost, UsageError
from nexar.links.link import Link
from nexar.links.router import Router
from nexar.transport.base import Carrier
from nexar.types import NodeId, Rank
from nexar.wire.frame import Frame
from nexar.wire.messages import Introduce, Introduced, Message

_log = logging.getLogger(__name__)

_CLOSED: Final = "this node is closed"
_TOO_MANY: Final = "you have dialed too often without becoming a link"
_LONGEST_DIAL: Final = 20.0
_CLOSE_TIMEOUT: Final = 2.0
_OPENERS: Final = 8  # links opened at the same time


@dataclass(slots=True)
class _Pair:
    """One peer, under the mesh's lock."""

    link: Link
    open: bool = False
    dialing: bool = False
    held: Answering | None = None
    """Its introduction waits for the end of our own dial."""


class Mesh:
    """The links of one node. It is the `Acceptor` of the node's transports. Close it before the node."""

    def __init__(
        self,
        node: Node,
        *,
        on_control: Callable[[Link, Message], None] | None = None,
        on_refused: Callable[[str, str], None] | None = None,
    ) -> None:
        self._node = node
        self.router: Final = Router(node.id, node.config, node.progress)
        """Where its links meet the communicators."""
        self._on_control = on_control
        self._on_refused = on_refused
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
        with self._changed:
            pair = self._pair(membership, member)
            opened, mine = pair.open, not (pair.open or pair.dialing)
            pair.dialing = pair.dialing or mine
        if opened:
            return pair.link
        cause = self._dial(pair, rank, member, deadline) if mine else None
        with self._changed:
            settled = lambda: pair.open or not pair.dialing or self._closed  # noqa: E731
            self._changed.wait_for(settled, max(0.0, deadline - time.monotonic()))
            opened = pair.open
            if mine:
                pair.dialing = False  # if not open: the peer's dial, which was to win, has not come either
        if opened:
            return pair.link
        raise PeerLost(
            rank=rank,
            node=member.node,
            address=_place(member),
            cause=cause or "no connection came about in time",
        )

    def open_all(self, deadline: float) -> None:
        """Every link at once. The lower rank of a pair dials. Raises the first failure, when all have ended."""
        membership = self._known()
        higher = range(self._rank + 1, membership.size)
        with ThreadPoolExecutor(max_workers=min(_OPENERS, len(higher) or 1), thread_name_prefix="nexar-open") as pool:
            dials = [pool.submit(self.link, rank, deadline) for rank in higher]
        for dial in dials:
            dial.result()
        for rank in range(self._rank):
            self._await(membership, rank, deadline)

    def _await(self, membership: Membership, rank: Rank, deadline: float) -> None:
        member = membership.member(rank)
        with self._changed:
            pair = self._pair(membership, member)
            if self._changed.wait_for(lambda: pair.open, max(0.0, deadline - time.monotonic())):
                return
        raise PeerLost(rank=rank, node=member.node, address=_place(member), cause="it has not connected in time")

    def _dial(self, pair: _Pair, rank: Rank, member: Member, deadline: float) -> str | None:
        """Why it failed; None if it did not, or if the peer's own dial has won."""
        introduce = Introduce(rank=self._rank, epoch=self._known().epoch)
        dial = Dial(self._node, member, rank, pair.link, introduce)
        opened = superseded = False
        try:
            dial.run(min(deadline, time.monotonic() + _LONGEST_DIAL))
            opened = True
        except Superseded:
            superseded = True
        except DialFailed as failed:
            return str(failed)
        finally:
            self._dialed(pair, rank, opened=opened, superseded=superseded)
        return None

    def _dialed(self, pair: _Pair, rank: Rank, *, opened: bool, superseded: bool) -> None:
        """The dial is over, however it went. Superseded: the pair still counts as dialing, by the peer's dial."""
        with self._changed:
            pair.open = pair.open or opened
            pair.dialing = superseded and not pair.open
            held, pair.held = pair.held, None
            self._changed.notify_all()
        if held is not None:
            self._answer_held(pair, held, rank)

    def _answer_held(self, pair: _Pair, held: Answering, rank: Rank) -> None:
        if pair.open:
            held.decline("your peer's own dial has won", superseded=True)
        else:
            self._accept(held, rank)

    # -- Acceptor: the driving thread --------------------------------------------------------------------

    def carrier_accepted(self, carrier: Carrier) -> None:
        """See Acceptor."""
        with self._changed:
            closed, membership = self._closed, self._membership
            displaced = None if closed else self._arrivals.add(carrier)
        if closed:
            carrier.abort(_CLOSED)
            return
        if displaced is not None:
            self.candidate_refused(displaced.peer.address, "it has dialed too often without becoming a link")
            displaced.abort(_TOO_MANY)
        if membership is not None:
            self._receive(carrier, membership)

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
        elif carrier.scheme == "shm":
            # Who knows the address was told it on the link, so it needs no further introduction.
            self._arrived(carrier)
            self._use(carrier, membership)
        else:
            Answering(carrier, self._introduced, self._confirmed, self._arrived)

    def _arrived(self, carrier: Carrier) -> None:
        """It is something else now: a link, or nothing."""
        with self._changed:
            self._arrivals.remove(carrier)

    def _introduced(self, dialer: Answering, introduce: Introduce) -> None:
        membership, peer = self._known(), dialer.carrier.peer
        rank = membership.rank_of(peer.node)
        if rank is None or introduce.rank != rank or introduce.epoch != membership.epoch:
            place = "no place" if rank is None else f"rank {rank}"
            claim = f"rank {introduce.rank} at epoch {introduce.epoch}"
            reason = f"it claims {claim}, the membership gives it {place} at epoch {membership.epoch}"
            self.candidate_refused(peer.address, reason)
            dialer.decline(reason)
        elif not self._hold(dialer, membership, rank):
            self._accept(dialer, rank)

    def _hold(self, dialer: Answering, membership: Membership, rank: Rank) -> bool:
        """Whether it waits for the end of our own dial; an earlier one that does waits no longer."""
        with self._changed:
            if self._closed:
                return False  # its carrier is about to be aborted
            pair = self._pair(membership, membership.members[rank])
            if not pair.dialing or pair.open or self._node.id > dialer.carrier.peer.node:
                return False
            before, pair.held = pair.held, dialer
        if before is not None:
            before.decline("you have dialed anew")
        return True

    def _accept(self, dialer: Answering, rank: Rank) -> None:
        membership = self._known()
        same_host = membership.member(rank).host == membership.member(self._rank).host
        address = self._node.memory_address_for(dialer.carrier.peer.node) if same_host else ""
        dialer.welcome(Introduced(rank=self._rank, epoch=membership.epoch, shared_memory=address))

    def _confirmed(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        link = self._use(carrier, self._known())
        if link is not None:
            link.frame_arrived(carrier, frame, body)

    # -- pairs -----------------------------------------------------------------------------------------

    def _known(self) -> Membership:
        if self._membership is None:
            raise UsageError("this node does not know its membership yet")
        return self._membership

    def _pair(self, membership: Membership, member: Member) -> _Pair:
        """Under the lock."""
        if self._closed:
            raise UsageError("this node is closed; make a new one with nexar.init()")
        if member.node not in self._pairs:
            rank = membership.rank_of(member.node)
            link = Link(
                self.router,
                member.node,
                rank=rank,
                address=_place(member),
                on_control=self._on_control,
                on_lost=self._lost,
            )
            self._pairs[member.node] = _Pair(link)
        return self._pairs[member.node]

    def _use(self, carrier: Carrier, membership: Membership) -> Link | None:
        """This carrier connects the pair. None: not any more, for this node is closed."""
        rank = membership.rank_of(carrier.peer.node)
        assert rank is not None  # it was checked when it came
        with self._changed:
            pair = None if self._closed else self._pair(membership, membership.members[rank])
        if pair is None:
            carrier.abort(_CLOSED)
            return None
        pair.link.adopt(carrier)
        with self._changed:
            pair.open = True
            self._changed.notify_all()
        return pair.link

    def _lost(self, link: Link, error: NexarError) -> None:
        with self._changed:
            self._changed.notify_all()

    def links(self) -> dict[Rank, Link]:
        """Those that are, or were, open."""
        membership = self._known()
        with self._changed:
            opened = [(membership.rank_of(node), pair.link) for node, pair in self._pairs.items() if pair.open]
        return {rank: link for rank, link in opened if rank is not None}

    def close(self) -> None:
        """Every link politely, within two seconds in all; then abruptly. Idempotent."""
        with self._changed:
            self._closed = True
            pairs = list(self._pairs.values())
            arrivals = self._arrivals.listed()
            self._changed.notify_all()
        deadline = time.monotonic() + _CLOSE_TIMEOUT
        for carrier in arrivals:
            carrier.abort(_CLOSED)
        for pair in pairs:
            pair.link.close(timeout=max(0.0, deadline - time.monotonic()))


def _place(member: Member) -> str | None:
    return next((places[0] for places in member.addresses.values() if places), None)
