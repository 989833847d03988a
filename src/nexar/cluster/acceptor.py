"""Incoming connections: each becomes a link, a bulk channel or a liveness connection, or is refused.

The transport verifies certificate chain and node; pin, rank and epoch are checked here.
"""

from __future__ import annotations

import hmac
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from nexar.cluster.addresses import MAX_ADDRESSES
from nexar.cluster.decisions.peering import DialDecision, PeerDirectory
from nexar.cluster.handshake import AnsweringHandshake, SidecarDialer
from nexar.cluster.membership import pin_of
from nexar.cluster.node import Node
from nexar.cluster.peer_table import CLOSED, LINK_LOST, MAX_MISSED_LINKS, RECONNECTED, PeerEntry, PeerTable, links_since
from nexar.security.certificates import ForeignCertificate, certificate_fingerprint
from nexar.transport.base import Carrier
from nexar.transport.registry import capabilities_of
from nexar.types import NodeId, format_node
from nexar.wire.control import Introduce, Introduced
from nexar.wire.frame import Frame

if TYPE_CHECKING:
    from nexar.cluster.liveness_connections import LivenessConnections

_log = logging.getLogger(__name__)

MAX_INCOMING: Final = 1024
MAX_INCOMING_PER_NODE: Final = 2 * 2 * MAX_ADDRESSES
"""A dial tries all our addresses on two transports, and on a busy host most attempts connect before the first one wins.
Doubled, because a node may dial again before the end of its last dial is noticed.
"""


class IncomingLimit:
    """Incoming connections that are not links yet. Not thread-safe.

    Invariant: one node has at most `most_of_one` connections, all together `most`. One more displaces the oldest, of
    that node or of all, so a silent dialer keeps no other node out.
    """

    def __init__(self, most: int = MAX_INCOMING, most_of_one: int = MAX_INCOMING_PER_NODE) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._all: OrderedDict[Carrier, None] = OrderedDict()
        self._by_node: dict[NodeId, OrderedDict[Carrier, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, carrier: Carrier) -> Carrier | None:
        """Returns the displaced carrier, already removed."""
        displaced = self._displaced_by(carrier.peer.node)
        if displaced is not None:
            self.remove(displaced)
        self._all[carrier] = None
        self._by_node.setdefault(carrier.peer.node, OrderedDict())[carrier] = None
        return displaced

    def _displaced_by(self, node: NodeId) -> Carrier | None:
        mine = self._by_node.get(node)
        if mine is not None and len(mine) >= self._most_of_one:
            return next(iter(mine))
        return next(iter(self._all)) if len(self._all) >= self._most else None

    def remove(self, carrier: Carrier) -> bool:
        if carrier not in self._all:
            return False
        del self._all[carrier]
        mine = self._by_node[carrier.peer.node]
        del mine[carrier]
        if not mine:
            del self._by_node[carrier.peer.node]
        return True

    def listed(self) -> list[Carrier]:
        """Oldest first."""
        return list(self._all)


def pin_mismatch(carrier: Carrier, directory: PeerDirectory) -> str | None:
    """The reason to refuse this carrier; None for a member, and for a former one, which the handshake informs."""
    peer, membership = carrier.peer, directory.membership
    member = directory.find(peer.node)
    if not peer.verified:
        return "it has not proven who it is"
    if member is None and peer.node in directory.former:
        return None
    if member is None and pin_of(membership, peer.node) is not None:
        return f"node {format_node(peer.node)} holds no rank, so it has no link"
    if member is None:
        return f"node {format_node(peer.node)} is not in the membership of epoch {membership.epoch}"
    if peer.certificate is not None:
        return _compare(peer.certificate, member.fingerprint, peer.node)
    return "it showed no certificate" if capabilities_of(carrier.scheme).has_certificates else None


def _compare(certificate: bytes, pin: bytes, node: NodeId) -> str | None:
    try:
        found = certificate_fingerprint(certificate)
    except ForeignCertificate as error:
        return f"its certificate is not readable: {error}"
    same = hmac.compare_digest(found, pin)
    return None if same else f"node {format_node(node)} has another key than the membership pins"


_DIALED_TOO_OFTEN: Final = "you have dialed too often without becoming a link"


class PeerAcceptor:
    """The `Acceptor` of one node's transports. The driver calls its methods unless stated otherwise."""

    def __init__(
        self,
        node: Node,
        peers: PeerTable,
        sidecars: SidecarDialer,
        liveness_connections: LivenessConnections | None,
        on_refused: Callable[[str, str], None] | None,
    ) -> None:
        """`on_refused` receives address and reason."""
        self._node = node
        self._peers = peers
        self._sidecars = sidecars
        self.on_refused = on_refused
        self._liveness_connections = liveness_connections
        # Not links yet; they wait here while the membership is unknown. Guarded by the lock of the peer table.
        self._arrivals = IncomingLimit()

    # -- Acceptor --------------------------------------------------------------------------------------

    def carrier_accepted(self, carrier: Carrier) -> None:
        with self._peers.changed:
            closed, directory = self._peers.closed, self._peers.directory
            displaced = None if closed else self._arrivals.add(carrier)
        if closed and (directory is None or not capabilities_of(carrier.scheme).shares_memory):
            carrier.abort(CLOSED)
            return
        if displaced is not None:
            self._displace(displaced)
        if directory is not None:
            self.receive(carrier, directory)

    def candidate_refused(self, address: str, reason: str) -> None:
        _log.info("refused a connection from %s: %s", address, reason)
        if self.on_refused is not None:
            self.on_refused(address, reason)

    def _displace(self, carrier: Carrier) -> None:
        # The sink of an aborted carrier is not notified, so the pairing is updated here.
        with self._peers.changed:
            pair = self._peers.get(carrier.peer.node)
            if pair is not None:
                for dialer in [each for each in pair.state.waiting if each.carrier is carrier]:
                    pair.state.ended(dialer)
                self._peers.changed.notify_all()
        self.candidate_refused(carrier.peer.address, "it has dialed too often without becoming a link")
        carrier.abort(_DIALED_TOO_OFTEN)

    def arrivals(self) -> list[Carrier]:
        """Requires the lock of the peer table. Any thread."""
        return self._arrivals.listed()

    def receive(self, carrier: Carrier, directory: PeerDirectory) -> None:
        """Requires a known membership. Any thread."""
        refusal = pin_mismatch(carrier, directory)
        if refusal is not None:
            self._remove_arrival(carrier)
            self.candidate_refused(carrier.peer.address, refusal)
            carrier.abort(refusal)
        elif capabilities_of(carrier.scheme).shares_memory:
            # The peer received this address over the link, so it needs no introduction.
            self._remove_arrival(carrier)
            self._adopt(carrier)
        else:
            AnsweringHandshake(carrier, self._introduced, self._confirmed, self._ended)

    def _adopt(self, carrier: Carrier) -> None:
        # A closing link takes the carrier too, so that it can finish on all of them.
        with self._peers.changed:
            pair = self._peers.of_carrier(carrier)
        if pair is None:
            carrier.abort(CLOSED)
        else:
            pair.link.adopt(carrier)

    def _remove_arrival(self, carrier: Carrier) -> None:
        with self._peers.changed:
            self._arrivals.remove(carrier)

    def _ended(self, dialer: AnsweringHandshake) -> None:
        self._remove_arrival(dialer.carrier)
        with self._peers.changed:
            pair = self._peers.get(dialer.carrier.peer.node)
            if pair is not None:
                pair.state.ended(dialer)
                self._peers.changed.notify_all()

    # -- introductions -----------------------------------------------------------------------------------

    def _introduced(self, dialer: AnsweringHandshake, introduce: Introduce) -> None:
        directory, node = self._peers.known(), dialer.carrier.peer.node
        former = directory.former.get(node)
        fault = directory.why_not_accepted(node, introduce) or self._why_refused(dialer.carrier, introduce)
        if former is not None and directory.find(node) is None:
            dialer.decline(former.reason, expelled=former.epoch)
        elif fault is not None:
            self._decline(dialer, fault)
        elif introduce.death_line and self._liveness_connections is not None:
            self._remove_arrival(dialer.carrier)
            self._liveness_connections.take(dialer, Introduced(rank=directory.rank, epoch=directory.membership.epoch))
        elif introduce.sidecar:
            dialer.welcome(Introduced(rank=directory.rank, epoch=directory.membership.epoch))
        else:
            self._decide(dialer, introduce)

    def _why_refused(self, carrier: Carrier, introduce: Introduce) -> str | None:
        connections = self._liveness_connections
        if introduce.death_line:
            return (
                "this node keeps no liveness connections"
                if connections is None
                else connections.why_refused(carrier, introduce)
            )
        return self._sidecars.why_refused(carrier, introduce)

    def _decline(self, dialer: AnsweringHandshake, reason: str) -> None:
        self.candidate_refused(dialer.carrier.peer.address, reason)
        dialer.decline(reason)

    def _decide(self, dialer: AnsweringHandshake, introduce: Introduce) -> None:
        with self._peers.changed:
            if self._peers.closed:
                return  # its carrier is about to be aborted
            pair = self._peers.of_carrier(dialer.carrier)
            stale = None
            if pair is not None and 0 < links_since(introduce.number, pair.number) <= MAX_MISSED_LINKS:
                stale = pair.link
                pair = self._peers.replace(pair, introduce.number)
            outcome = DialDecision.SUPERSEDED if pair is None else pair.state.introduced(dialer)
        if stale is not None:
            stale.lose(RECONNECTED)
        if pair is not None:
            self.answer(pair, dialer, outcome)

    def answer(self, pair: PeerEntry, dialer: AnsweringHandshake, outcome: DialDecision) -> None:
        """Any thread."""
        if outcome is DialDecision.WELCOME:
            self._welcome(dialer)
        elif outcome is DialDecision.SUPERSEDED and pair.link.failure is not None:
            dialer.decline(LINK_LOST)
        elif outcome is DialDecision.SUPERSEDED:
            dialer.decline("your peer's own dial has won", superseded=True)

    def _welcome(self, dialer: AnsweringHandshake) -> None:
        directory, peer = self._peers.known(), dialer.carrier.peer.node
        address = self._node.memory_address_for(peer) if directory.is_on_same_host(peer) else ""
        about = directory.introduction()
        offered = self._sidecars.offered
        dialer.welcome(Introduced(rank=about.rank, epoch=about.epoch, shared_memory=address, sidecar=offered))

    def _confirmed(self, dialer: AnsweringHandshake, frame: Frame, body: memoryview) -> None:
        carrier = dialer.carrier
        if dialer.is_sidecar:
            self._confirmed_sidecar(carrier, frame, body)
            return
        with self._peers.changed:
            self._arrivals.remove(carrier)
            pair = None if self._peers.closed else self._peers.get(carrier.peer.node)
            welcome = pair is not None and pair.state.welcomes(dialer)
        if pair is None or not welcome:
            carrier.abort(CLOSED if pair is None else "you have another connection to this node")
            return
        pair.link.adopt(carrier)
        with self._peers.changed:
            pair.state.confirmed(dialer)
            self._peers.changed.notify_all()
        pair.link.frame_arrived(carrier, frame, body)

    def _confirmed_sidecar(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        # A bulk channel may be confirmed before its link, which is another connection.
        self._remove_arrival(carrier)
        with self._peers.changed:
            pair = self._peers.of_carrier(carrier)
        if pair is None:
            carrier.abort(CLOSED)
        else:
            pair.link.sidecar.adopt(carrier)
            pair.link.sidecar.frame_arrived(carrier, frame, body)
