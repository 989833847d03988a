"""Connections that others dialed: each becomes a link, a sidecar, a death line, or nothing, and its dialer is told.

Node and key of the dialer are checked before a word is said, by the transport's handshake and the membership's pin; the
place it claims when it introduces itself. Which of two crossing dials is kept, `decisions.pairing` says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Protocol

from nexar.cluster.arrivals import Arrivals
from nexar.cluster.circle import Circle
from nexar.cluster.decisions.pairing import Fate
from nexar.cluster.introduction import Answering
from nexar.cluster.node import Node
from nexar.cluster.pairs import CLOSED, MOST_MISSED, Pair, Pairs, links_since
from nexar.cluster.pins import why_not
from nexar.cluster.sidecars import Sidecars
from nexar.transport.base import Carrier
from nexar.wire.frame import Frame
from nexar.wire.messages import Introduce, Introduced

_log = logging.getLogger(__name__)

_SHARED_MEMORY: Final = "shm"
_TOO_MANY: Final = "you have dialed too often without becoming a link"
_LOST: Final = "the link between us was lost"


class LineTaker(Protocol):
    """See DeathLines."""

    def why_not(self, carrier: Carrier, introduce: Introduce) -> str | None:
        """Why such a connection is not wanted; None if it is."""

    def take(self, dialer: Answering, answer: Introduced) -> None:
        """It is a line from now on; the dialer is told so."""


class Reception:
    """Of one node: the `Acceptor` of its transports. The driving thread, where a method does not say otherwise."""

    def __init__(
        self, node: Node, pairs: Pairs, sidecars: Sidecars, on_refused: Callable[[str, str], None] | None
    ) -> None:
        """`on_refused` is told of who was not let in: address and reason."""
        self._node = node
        self._pairs = pairs
        self._sidecars = sidecars
        self.on_refused = on_refused
        self.death_lines: LineTaker | None = None
        """Takes connections that carry nothing. Written before anybody can dial for one."""
        self._arrivals = (
            Arrivals()
        )  # under the lock of the pairs: no links yet; before the membership is known, nothing

    # -- Acceptor --------------------------------------------------------------------------------------

    def carrier_accepted(self, carrier: Carrier) -> None:
        """See Acceptor."""
        with self._pairs.changed:
            closed, circle = self._pairs.closed, self._pairs.circle
            displaced = None if closed else self._arrivals.add(carrier)
        if closed and (circle is None or carrier.scheme != _SHARED_MEMORY):
            carrier.abort(CLOSED)
            return
        if displaced is not None:
            self._displace(displaced)
        if circle is not None:
            self.receive(carrier, circle)

    def candidate_refused(self, address: str, reason: str) -> None:
        """See Acceptor."""
        _log.info("refused a connection from %s: %s", address, reason)
        if self.on_refused is not None:
            self.on_refused(address, reason)

    def _displace(self, carrier: Carrier) -> None:
        """It has to go for another one. Its sink hears nothing of that, so whoever counts on it is told here."""
        with self._pairs.changed:
            pair = self._pairs.get(carrier.peer.node)
            if pair is not None:
                for dialer in [each for each in pair.state.waiting if each.carrier is carrier]:
                    pair.state.ended(dialer)
                self._pairs.changed.notify_all()
        self.candidate_refused(carrier.peer.address, "it has dialed too often without becoming a link")
        carrier.abort(_TOO_MANY)

    def arrivals(self) -> list[Carrier]:
        """What is nothing yet. Any thread, under the lock of the pairs."""
        return self._arrivals.listed()

    def receive(self, carrier: Carrier, circle: Circle) -> None:
        """Look at it, now that it is known who may come. Any thread."""
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

    def _use(self, carrier: Carrier) -> None:
        """One more carrier of a link; also of one that is closing, which ends politely on all of them."""
        with self._pairs.changed:
            pair = self._pairs.of_carrier(carrier)
        if pair is None:
            carrier.abort(CLOSED)
        else:
            pair.link.adopt(carrier)

    def _arrived(self, carrier: Carrier) -> None:
        """It is something else now: a link, or nothing."""
        with self._pairs.changed:
            self._arrivals.remove(carrier)

    def _ended(self, dialer: Answering) -> None:
        """It came to nothing: whoever counted on it begins anew."""
        self._arrived(dialer.carrier)
        with self._pairs.changed:
            pair = self._pairs.get(dialer.carrier.peer.node)
            if pair is not None:
                pair.state.ended(dialer)
                self._pairs.changed.notify_all()

    # -- introductions -----------------------------------------------------------------------------------

    def _introduced(self, dialer: Answering, introduce: Introduce) -> None:
        circle, node = self._pairs.known(), dialer.carrier.peer.node
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
        with self._pairs.changed:
            if self._pairs.closed:
                return  # its carrier is about to be aborted
            pair = self._pairs.of_carrier(dialer.carrier)
            stale = None
            if pair is not None and 0 < links_since(introduce.number, pair.number) <= MOST_MISSED:
                stale = pair.link
                pair = self._pairs.replace(pair, introduce.number)
            fate = Fate.SUPERSEDED if pair is None else pair.state.introduced(dialer)
        if stale is not None:
            stale.lose("it connected anew, so frames of the old connection may be lost")
        if pair is not None:
            self.answer(pair, dialer, fate)

    def answer(self, pair: Pair, dialer: Answering, fate: Fate) -> None:
        """Tell a dialer what becomes of it. Any thread."""
        if fate is Fate.WELCOME:
            self._welcome(dialer)
        elif fate is Fate.SUPERSEDED and pair.link.failure is not None:
            dialer.decline(_LOST)
        elif fate is Fate.SUPERSEDED:
            dialer.decline("your peer's own dial has won", superseded=True)

    def _welcome(self, dialer: Answering) -> None:
        circle, peer = self._pairs.known(), dialer.carrier.peer.node
        address = self._node.memory_address_for(peer) if circle.shares_host(peer) else ""
        about = circle.introduction()
        offered = self._sidecars.offered
        dialer.welcome(Introduced(rank=about.rank, epoch=about.epoch, shared_memory=address, sidecar=offered))

    def _confirmed(self, dialer: Answering, frame: Frame, body: memoryview) -> None:
        carrier = dialer.carrier
        if dialer.is_sidecar:
            self._confirmed_sidecar(carrier, frame, body)
            return
        with self._pairs.changed:
            self._arrivals.remove(carrier)
            pair = None if self._pairs.closed else self._pairs.get(carrier.peer.node)
            welcome = pair is not None and pair.state.welcomes(dialer)
        if pair is None or not welcome:
            carrier.abort(CLOSED if pair is None else "you have another connection to this node")
            return
        pair.link.adopt(carrier)
        with self._pairs.changed:
            pair.state.confirmed(dialer)
            self._pairs.changed.notify_all()
        pair.link.frame_arrived(carrier, frame, body)

    def _confirmed_sidecar(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        """It may be here before the link is: another connection, on which the dialer has gone on as well."""
        self._arrived(carrier)
        with self._pairs.changed:
            pair = self._pairs.of_carrier(carrier)
        if pair is None:
            carrier.abort(CLOSED)
        else:
            pair.link.sidecar.adopt(carrier)
            pair.link.sidecar.frame_arrived(carrier, frame, body)
