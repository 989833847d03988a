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

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from msgspec.structs import replace

from nexar.cluster.arrivals import Arrivals
from nexar.cluster.change import Change
from nexar.cluster.circle import Circle
from nexar.cluster.decisions.pairing import Fate, Turn
from nexar.cluster.dial import Dial, DialFailed, NoLonger, Superseded
from nexar.cluster.introduction import Answering
from nexar.cluster.membership import Member, Membership
from nexar.cluster.node import Node
from nexar.cluster.pairs import Pair, Pairs, address_of
from nexar.cluster.pins import why_not
from nexar.cluster.sidecars import Sidecars
from nexar.errors import NexarError, PeerLost, UsageError
from nexar.links.link import Link
from nexar.links.parting import part
from nexar.links.router import Router
from nexar.transport.base import Carrier
from nexar.types import NodeId
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
_LONGEST_CLOSE: Final = 30.0


class LineTaker(Protocol):
    """See DeathLines."""

    def why_not(self, carrier: Carrier, introduce: Introduce) -> str | None:
        """Why such a connection is not wanted; None if it is."""

    def take(self, dialer: Answering, answer: Introduced) -> None:
        """It is a line from now on; the dialer is told so."""


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
        self._on_refused = on_refused
        self.on_expelled: Callable[[int, str], None] | None = None
        """Told when a peer says that this node is no member any more: since which epoch, and why. Written before the
        first membership."""
        self.death_lines: LineTaker | None = None
        """Takes connections that carry nothing. Written before anybody can dial for one."""
        self._sidecars = Sidecars(node)
        self._changed = threading.Condition()  # over everything below
        self._circle: Circle | None = None  # replaced under the lock, read by anybody
        self._arrivals = Arrivals()  # no links yet; before the membership is known, not even looked at
        self._pairs = Pairs(self.router, on_control or self.router.notices.arrived, on_lost)
        self._closed = False

    # -- the membership --------------------------------------------------------------------------------

    def adopt(self, membership: Membership, change: Change | None = None) -> None:
        """From now on these are the members; `change` says why those of before are none any more. Links to them are
        closed, links that were lost may be dialed anew. Connections that came before are looked at now. Never blocks.
        """
        with self._changed:
            old = self._circle
            circle = Circle(self._node.id, membership) if old is None else old.moved_to(membership, change)
            self._circle = circle
            ended = self._pairs.move(circle)
            early = self._arrivals.listed() if old is None else []
            self._changed.notify_all()
        for link in ended:
            link.begin_close()
        for carrier in early:
            self._receive(carrier, circle)

    def expect(self, guests: Iterable[Member]) -> None:
        """These nodes may have a link too: they wait to become members."""
        with self._changed:
            self._circle = self._known().with_guests(guests)

    # -- opening: any thread ---------------------------------------------------------------------------

    def link(self, node: NodeId, deadline: float) -> Link:
        """The link to this node; opened if it is not open yet. PeerLost says why it cannot be."""
        pair = self._pairs.get(node)
        if pair is not None and pair.state.open:  # the way of every message: without the lock
            return pair.link
        with self._changed:
            circle = self._known()
            member = circle.find(node)
            if member is None:
                raise PeerLost(node=node, cause=f"it is no member at epoch {circle.membership.epoch}")
            pair = self._pair(circle, member)
            failures = pair.state.failures
        while (turn := self._turn(pair, failures, deadline)) is Turn.DIAL:
            self._dial(pair, member, deadline)
        if turn is Turn.OPEN:
            return pair.link
        cause = pair.state.cause or "no connection came about in time"
        raise PeerLost(rank=circle.rank_of(node), node=node, address=address_of(member), cause=cause)

    def relink(self, node: NodeId, deadline: float) -> Link:
        """As `link`; but one that was lost is replaced, and one whose dial failed is dialed again."""
        with self._changed:
            pair = self._pairs.get(node)
            if pair is not None and pair.link.failure is not None and pair.state.open:
                self._pairs.replace(pair, self._known(), pair.number + 1)
                self._changed.notify_all()
        return self.link(node, deadline)

    def _turn(self, pair: Pair, failures: int, deadline: float) -> Turn:
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

    def is_open(self, node: NodeId, until: float) -> bool:
        """Wait for the link without dialing."""
        with self._changed:
            circle = self._known()
            member = circle.find(node)
            if member is None:
                return False
            pair = self._pair(circle, member)
            return self._wait(lambda: pair.state.open, until)

    def _dial(self, pair: Pair, member: Member, deadline: float) -> None:
        introduce = replace(self._known().introduction(), number=pair.number)
        dial = Dial(self._node, member, pair.link, introduce, self._fault_of)
        cause: str | None = "it was interrupted"
        try:
            longest = _LONGEST_DIAL if self._node.id < member.node else 2 * _LONGEST_DIAL
            dial.run(min(deadline, time.monotonic() + longest))
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
            with self._changed:
                sentences = pair.state.dialed(opened=dial.opened, cause=None if dial.opened else cause)
                self._changed.notify_all()
            for sentence in sentences:
                self._answer(pair, sentence.dialer, sentence.fate)

    def _fault_of(self, node: NodeId, claim: Introduced) -> str | None:
        """At the moment of the answer: the membership may have changed since the dial began."""
        return self._known().fault_of(node, claim)

    def _expelled(self, gone: NoLonger) -> None:
        if self.on_expelled is not None:
            self.on_expelled(gone.epoch, gone.reason)

    # -- Acceptor: the driving thread --------------------------------------------------------------------

    def carrier_accepted(self, carrier: Carrier) -> None:
        """See Acceptor."""
        with self._changed:
            closed, circle = self._closed, self._circle
            displaced = None if closed else self._arrivals.add(carrier)
        if closed and (circle is None or carrier.scheme != _SHARED_MEMORY):
            carrier.abort(_CLOSED)
            return
        if displaced is not None:
            self._displace(displaced)
        if circle is not None:
            self._receive(carrier, circle)

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

    def _receive(self, carrier: Carrier, circle: Circle) -> None:
        refusal = why_not(carrier, circle)
        if refusal is not None:
            self._arrived(carrier)
            self.candidate_refused(carrier.peer.address, refusal)
            carrier.abort(refusal)
        elif carrier.scheme == _SHARED_MEMORY:
            # Who knows the address was told it on the link, so it needs no further introduction.
            self._arrived(carrier)
            self._use(carrier)
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
        circle, node = self._known(), dialer.carrier.peer.node
        former = circle.former.get(node)
        fault = circle.fault_of(node, introduce) or self._why_unwanted(dialer.carrier, introduce)
        if former is not None and circle.find(node) is None:
            dialer.decline(former.reason, expelled=former.epoch)
        elif fault is not None:
            self._decline(dialer, fault)
        elif introduce.death_line and self.death_lines is not None:
            self._arrived(dialer.carrier)
            self.death_lines.take(dialer, Introduced(rank=circle.rank, epoch=circle.membership.epoch))
        elif introduce.sidecar:
            dialer.welcome(Introduced(rank=circle.rank, epoch=circle.membership.epoch))
        else:
            self._judge(dialer, introduce)

    def _why_unwanted(self, carrier: Carrier, introduce: Introduce) -> str | None:
        lines = self.death_lines
        if introduce.death_line:
            return "this node keeps no death lines" if lines is None else lines.why_not(carrier, introduce)
        return self._sidecars.why_not(carrier, introduce)

    def _decline(self, dialer: Answering, reason: str) -> None:
        self.candidate_refused(dialer.carrier.peer.address, reason)
        dialer.decline(reason)

    def _judge(self, dialer: Answering, introduce: Introduce) -> None:
        with self._changed:
            if self._closed:
                return  # its carrier is about to be aborted
            pair = self._pair_of(dialer.carrier)
            stale = None
            if pair is not None and introduce.number > pair.number:
                stale = pair.link
                pair = self._pairs.replace(pair, self._known(), introduce.number)
                self._changed.notify_all()
            fate = Fate.SUPERSEDED if pair is None else pair.state.introduced(dialer)
        if stale is not None:
            stale.lose("it connected anew, so frames of the old connection may be lost")
        if pair is not None:
            self._answer(pair, dialer, fate)

    def _answer(self, pair: Pair, dialer: Answering, fate: Fate) -> None:
        """Any thread."""
        if fate is Fate.WELCOME:
            self._welcome(dialer)
        elif fate is Fate.SUPERSEDED and pair.link.failure is not None:
            dialer.decline(_LOST)
        elif fate is Fate.SUPERSEDED:
            dialer.decline("your peer's own dial has won", superseded=True)

    def _welcome(self, dialer: Answering) -> None:
        circle, peer = self._known(), dialer.carrier.peer.node
        address = self._node.memory_address_for(peer) if circle.shares_host(peer) else ""
        about = circle.introduction()
        offered = self._sidecars.offered
        dialer.welcome(Introduced(rank=about.rank, epoch=about.epoch, shared_memory=address, sidecar=offered))

    def _confirmed(self, dialer: Answering, frame: Frame, body: memoryview) -> None:
        carrier = dialer.carrier
        if dialer.is_sidecar:
            self._confirmed_sidecar(carrier, frame, body)
            return
        with self._changed:
            self._arrivals.remove(carrier)
            pair = None if self._closed else self._pairs.get(carrier.peer.node)
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
        with self._changed:
            pair = self._pair_of(carrier)
        if pair is None:
            carrier.abort(_CLOSED)
        else:
            pair.link.sidecar.adopt(carrier)
            pair.link.sidecar.frame_arrived(carrier, frame, body)

    # -- pairs -----------------------------------------------------------------------------------------

    def _known(self) -> Circle:
        if self._circle is None:
            raise UsageError("this node does not know its membership yet")
        return self._circle

    def _pair(self, circle: Circle, member: Member) -> Pair:
        """Under the lock."""
        self._check_open()
        return self._pairs.of(circle, member)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"{_CLOSED}; make a new one with nexar.init()")

    def _use(self, carrier: Carrier) -> None:
        """One more carrier of a link; also of one that is closing, which ends politely on all of them."""
        with self._changed:
            pair = self._pair_of(carrier)
        if pair is None:
            carrier.abort(_CLOSED)
        else:
            pair.link.adopt(carrier)

    def _pair_of(self, carrier: Carrier) -> Pair | None:
        """Under the lock. None: the node is closed and there never was one, or its peer has no place any more."""
        node, circle = carrier.peer.node, self._known()
        pair, member = self._pairs.get(node), circle.find(node)
        return pair if pair is not None or self._closed or member is None else self._pair(circle, member)

    @property
    def circle(self) -> Circle:
        """Whom this node may have links with. UsageError before it knows."""
        return self._known()

    def links(self) -> dict[NodeId, Link]:
        """Those that are, or were, open."""
        with self._changed:
            return {pair.link.peer: pair.link for pair in self._pairs.listed() if pair.state.open}

    def close(self) -> None:
        """Every link politely, all at once: what was sent still arrives. Idempotent.

        Links are given up, and aborted, when nothing was heard on any of them for `heartbeat_timeout`: who is silent
        for so long counts as dead anywhere. A peer that is merely slow gets up to half a minute.
        """
        with self._changed:
            self._closed = True
            pairs = self._pairs.listed()
            arrivals = self._arrivals.listed()
            self._changed.notify_all()
        self._node.recall.make()
        for carrier in arrivals:
            carrier.abort(_CLOSED)
        links = [pair.link for pair in pairs]
        part(self._node.progress, links, patience=self._node.config.heartbeat_timeout, longest=_LONGEST_CLOSE)
