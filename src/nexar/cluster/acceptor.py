"""Connections that came in and are no links yet: few of each node, and few in all. No I/O.

Law: a node has at most `most_of_one` of them and everybody together `most`. When one more comes, the oldest goes: of
that node if it has too many, else of all. So a member that dials and never says a word keeps nobody else out, and an
honest one, whose dial may come to all our addresses at the same moment, always gets its turn.

Is the one at the other end of a connection who it says? The transport verifies chain and name; the pin is ours.

Connections that others dialed: each becomes a link, a sidecar, a death line, or nothing, and its dialer is told.

Node and key of the dialer are checked before a word is said, by the transport's handshake and the membership's pin; the
place it claims when it introduces itself. Which of two crossing dials is kept, `decisions.pairing` says.
"""

from __future__ import annotations

import hmac
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

from nexar.cluster.addresses import MAX_ADDRESSES
from nexar.cluster.decisions.peering import DialDecision, PeerDirectory
from nexar.cluster.handshake import AnsweringHandshake, SidecarDialer
from nexar.cluster.node import Node
from nexar.cluster.peer_table import CLOSED, MAX_MISSED_LINKS, PeerEntry, PeerTable, links_since
from nexar.security.certificates import ForeignCertificate, certificate_fingerprint
from nexar.transport.base import Carrier
from nexar.types import NodeId, format_node
from nexar.wire.control import Introduce, Introduced
from nexar.wire.frame import Frame

MAX_INCOMING: Final = 1024
MAX_INCOMING_PER_NODE: Final = 2 * 2 * MAX_ADDRESSES
"""A dial goes to every address of ours, on two transports, and on a busy host most of these connections come about
before the first one has won; twice that, because a dial may begin anew before the end of the last has been noticed."""


class IncomingLimit:
    """Carriers by the node they come from, the oldest first. Not safe by itself: its owner has a lock."""

    def __init__(self, most: int = MAX_INCOMING, most_of_one: int = MAX_INCOMING_PER_NODE) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._everybody: OrderedDict[Carrier, None] = OrderedDict()
        self._of_node: dict[NodeId, OrderedDict[Carrier, None]] = {}

    def __len__(self) -> int:
        return len(self._everybody)

    def add(self, carrier: Carrier) -> Carrier | None:
        """One more; the one that has to go for it, if there was no room. It has been taken out."""
        displaced = self._one_too_many(carrier.peer.node)
        if displaced is not None:
            self.remove(displaced)
        self._everybody[carrier] = None
        self._of_node.setdefault(carrier.peer.node, OrderedDict())[carrier] = None
        return displaced

    def _one_too_many(self, node: NodeId) -> Carrier | None:
        mine = self._of_node.get(node)
        if mine is not None and len(mine) >= self._most_of_one:
            return next(iter(mine))
        return next(iter(self._everybody)) if len(self._everybody) >= self._most else None

    def remove(self, carrier: Carrier) -> bool:
        """It is a link now, or gone. False if it was not here."""
        if carrier not in self._everybody:
            return False
        del self._everybody[carrier]
        mine = self._of_node[carrier.peer.node]
        del mine[carrier]
        if not mine:
            del self._of_node[carrier.peer.node]
        return True

    def listed(self) -> list[Carrier]:
        """All of them, the oldest first."""
        return list(self._everybody)


_WITHOUT_CERTIFICATES = frozenset({"shm", "memory"})
"""Schemes that prove who is there by other means: a secret that only this peer was told, or being in this process."""


def pin_mismatch(carrier: Carrier, directory: PeerDirectory) -> str | None:
    """Why this carrier's peer is not let in; None if it is who the membership says, or was a member once: who that is
    will be told so, and nothing else.
    """
    peer, membership = carrier.peer, directory.membership
    member = directory.find(peer.node)
    if not peer.verified:
        return "it has not proven who it is"
    if member is None and peer.node in directory.former:
        return None
    if member is None and membership.pin(peer.node) is not None:
        return f"node {format_node(peer.node)} holds no rank, so it has no link"
    if member is None:
        return f"node {format_node(peer.node)} is not in the membership of epoch {membership.epoch}"
    if peer.certificate is not None:
        return _compare(peer.certificate, member.fingerprint, peer.node)
    return None if carrier.scheme in _WITHOUT_CERTIFICATES else "it showed no certificate"


def _compare(certificate: bytes, pin: bytes, node: NodeId) -> str | None:
    try:
        found = certificate_fingerprint(certificate)
    except ForeignCertificate as error:
        return f"its certificate is not readable: {error}"
    same = hmac.compare_digest(found, pin)
    return None if same else f"node {format_node(node)} has another key than the membership pins"


_log = logging.getLogger(__name__)

_SHARED_MEMORY: Final = "shm"
_TOO_MANY: Final = "you have dialed too often without becoming a link"
_LOST: Final = "the link between us was lost"


class LivenessTaker(Protocol):
    """See DeathLines."""

    def why_not(self, carrier: Carrier, introduce: Introduce) -> str | None:
        """Why such a connection is not wanted; None if it is."""

    def take(self, dialer: AnsweringHandshake, answer: Introduced) -> None:
        """It is a line from now on; the dialer is told so."""


class PeerAcceptor:
    """Of one node: the `Acceptor` of its transports. The driving thread, where a method does not say otherwise."""

    def __init__(
        self, node: Node, peers: PeerTable, sidecars: SidecarDialer, on_refused: Callable[[str, str], None] | None
    ) -> None:
        """`on_refused` is told of who was not let in: address and reason."""
        self._node = node
        self._peers = peers
        self._sidecars = sidecars
        self.on_refused = on_refused
        self.liveness_connections: LivenessTaker | None = None
        """Takes connections that carry nothing. Written before anybody can dial for one."""
        self._arrivals = (
            IncomingLimit()
        )  # under the lock of the pairs: no links yet; before the membership is known, nothing

    # -- Acceptor --------------------------------------------------------------------------------------

    def carrier_accepted(self, carrier: Carrier) -> None:
        """See Acceptor."""
        with self._peers.changed:
            closed, directory = self._peers.closed, self._peers.directory
            displaced = None if closed else self._arrivals.add(carrier)
        if closed and (directory is None or carrier.scheme != _SHARED_MEMORY):
            carrier.abort(CLOSED)
            return
        if displaced is not None:
            self._displace(displaced)
        if directory is not None:
            self.receive(carrier, directory)

    def candidate_refused(self, address: str, reason: str) -> None:
        """See Acceptor."""
        _log.info("refused a connection from %s: %s", address, reason)
        if self.on_refused is not None:
            self.on_refused(address, reason)

    def _displace(self, carrier: Carrier) -> None:
        """It has to go for another one. Its sink hears nothing of that, so whoever counts on it is told here."""
        with self._peers.changed:
            pair = self._peers.get(carrier.peer.node)
            if pair is not None:
                for dialer in [each for each in pair.state.waiting if each.carrier is carrier]:
                    pair.state.ended(dialer)
                self._peers.changed.notify_all()
        self.candidate_refused(carrier.peer.address, "it has dialed too often without becoming a link")
        carrier.abort(_TOO_MANY)

    def arrivals(self) -> list[Carrier]:
        """What is nothing yet. Any thread, under the lock of the pairs."""
        return self._arrivals.listed()

    def receive(self, carrier: Carrier, directory: PeerDirectory) -> None:
        """Look at it, now that it is known who may come. Any thread."""
        refusal = pin_mismatch(carrier, directory)
        if refusal is not None:
            self._arrived(carrier)
            self.candidate_refused(carrier.peer.address, refusal)
            carrier.abort(refusal)
        elif carrier.scheme == _SHARED_MEMORY:
            # Who knows the address was told it on the link, so it needs no further introduction.
            self._arrived(carrier)
            self._use(carrier)
        else:
            AnsweringHandshake(carrier, self._introduced, self._confirmed, self._ended)

    def _use(self, carrier: Carrier) -> None:
        """One more carrier of a link; also of one that is closing, which ends politely on all of them."""
        with self._peers.changed:
            pair = self._peers.of_carrier(carrier)
        if pair is None:
            carrier.abort(CLOSED)
        else:
            pair.link.adopt(carrier)

    def _arrived(self, carrier: Carrier) -> None:
        """It is something else now: a link, or nothing."""
        with self._peers.changed:
            self._arrivals.remove(carrier)

    def _ended(self, dialer: AnsweringHandshake) -> None:
        """It came to nothing: whoever counted on it begins anew."""
        self._arrived(dialer.carrier)
        with self._peers.changed:
            pair = self._peers.get(dialer.carrier.peer.node)
            if pair is not None:
                pair.state.ended(dialer)
                self._peers.changed.notify_all()

    # -- introductions -----------------------------------------------------------------------------------

    def _introduced(self, dialer: AnsweringHandshake, introduce: Introduce) -> None:
        directory, node = self._peers.known(), dialer.carrier.peer.node
        former = directory.former.get(node)
        fault = directory.why_not_accepted(node, introduce) or self._why_unwanted(dialer.carrier, introduce)
        if former is not None and directory.find(node) is None:
            dialer.decline(former.reason, expelled=former.epoch)
        elif fault is not None:
            self._decline(dialer, fault)
        elif introduce.death_line and self.liveness_connections is not None:
            self._arrived(dialer.carrier)
            self.liveness_connections.take(dialer, Introduced(rank=directory.rank, epoch=directory.membership.epoch))
        elif introduce.sidecar:
            dialer.welcome(Introduced(rank=directory.rank, epoch=directory.membership.epoch))
        else:
            self._judge(dialer, introduce)

    def _why_unwanted(self, carrier: Carrier, introduce: Introduce) -> str | None:
        lines = self.liveness_connections
        if introduce.death_line:
            return "this node keeps no death lines" if lines is None else lines.why_not(carrier, introduce)
        return self._sidecars.why_not(carrier, introduce)

    def _decline(self, dialer: AnsweringHandshake, reason: str) -> None:
        self.candidate_refused(dialer.carrier.peer.address, reason)
        dialer.decline(reason)

    def _judge(self, dialer: AnsweringHandshake, introduce: Introduce) -> None:
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
            stale.lose("it connected anew, so frames of the old connection may be lost")
        if pair is not None:
            self.answer(pair, dialer, outcome)

    def answer(self, pair: PeerEntry, dialer: AnsweringHandshake, outcome: DialDecision) -> None:
        """Tell a dialer what becomes of it. Any thread."""
        if outcome is DialDecision.WELCOME:
            self._welcome(dialer)
        elif outcome is DialDecision.SUPERSEDED and pair.link.failure is not None:
            dialer.decline(_LOST)
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
        """It may be here before the link is: another connection, on which the dialer has gone on as well."""
        self._arrived(carrier)
        with self._peers.changed:
            pair = self._peers.of_carrier(carrier)
        if pair is None:
            carrier.abort(CLOSED)
        else:
            pair.link.sidecar.adopt(carrier)
            pair.link.sidecar.frame_arrived(carrier, frame, body)
