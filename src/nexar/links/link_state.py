"""A send that could not be done at once: it waits for credit, for a grant, or for delivery.

My conversation with one peer in one communicator: order, credit, and sends that wait for it.

A flow lives no longer than the carrier that bore it. When that breaks, frames may be lost, so the flow is over for
good; the communicator's next generation gets a new one.

What the sending and the arriving half of a link share: who the peer is, what connects us, and the flows.
"""

from __future__ import annotations

import threading
from collections import deque
from copy import copy
from dataclasses import replace
from typing import Any, Protocol

from nexar.errors import LinkClosed, NexarError, PeerLost, PeerMisbehaved, UsageError
from nexar.links.carrier_selection import RELAY, choose, number_of
from nexar.links.flow_control import MIN_CREDIT_BYTES, ReceiveCredit, SendCredit, admits
from nexar.links.matching import Matching
from nexar.links.messages import conversation, key_of
from nexar.links.operation import Operation
from nexar.links.router import Router
from nexar.transport.base import Buffer, Carrier, CarrierLost
from nexar.types import AwaitedPeer, NodeId, Rank, format_node
from nexar.wire.control import CommunicatorClosed
from nexar.wire.control import encode as encode_message
from nexar.wire.frame import VERSION, Frame, FrameKind, Lane, pack_header


class SendOwner(Protocol):
    """Whose send it is (a Link)."""

    lock: threading.Lock

    def cancel_send(self, send: PostedSend) -> None:
        """See Operation.cancel."""

    def awaited(self, missing: str) -> AwaitedPeer:
        """The peer."""


class PostedSend(Operation):
    """A message whose memory is borrowed until the peer's transport has all of it. Changes under the node's lock."""

    __slots__ = ("announced", "data", "flowing", "frame", "owner", "shape")

    def __init__(self, owner: SendOwner, frame: Frame, shape: bytes, data: memoryview) -> None:
        super().__init__(owner.lock)
        self.owner = owner
        self.frame = frame  # the envelope
        self.shape = shape
        self.data = data
        self.announced = False  # the envelope has left
        self.flowing = False  # the peer granted it

    @property
    def name(self) -> str:
        """As errors call it."""
        return f"the send of {self.frame.length} bytes {self._conversation}"

    @property
    def _conversation(self) -> str:
        _, space, tag = key_of(self.frame.destination, self.frame)
        return conversation(space, tag)

    def belongs_to(self, communicator: int, generation: int) -> bool:
        """Is it of this generation?"""
        return self.frame.communicator == communicator and self.frame.generation == generation

    def awaited(self) -> AwaitedPeer:
        """The receiver, and what it has not done."""
        if self.flowing:
            return self.owner.awaited("the rest of the transfer")
        return self.owner.awaited(f"a receive {self._conversation}")

    def cancel(self) -> None:
        """The message is taken back: the receiver sees nothing of it."""
        self.owner.cancel_send(self)


class Flow:
    """State of one (link, communicator, generation). Changes under the node's lock."""

    __slots__ = ("expected", "generation", "held", "matching", "message", "received", "sent", "take_whole", "waiting")

    def __init__(self, matching: Matching, send_credit_bytes: int, receive_credit_bytes: int) -> None:
        self.matching = matching
        self.generation = matching.generation
        self.sent = SendCredit(send_credit_bytes)
        self.take_whole = self.sent.take_whole  # bound once: asked for every message
        self.received = ReceiveCredit(receive_credit_bytes)
        self.message = 0  # number of the next message I send
        self.expected = 0  # number of the next message to deliver
        self.held: dict[int, tuple[Frame, bytes]] = {}  # came before their turn: threads and carriers may overtake
        self.waiting: deque[PostedSend] = deque()  # sends without credit even for an envelope


class LinkState:
    """State of one link. Changes under the node's lock."""

    def __init__(self, router: Router, peer: NodeId, rank: Rank | None, address: str | None) -> None:
        self.router = router
        self.node = router.node
        self.peer = peer
        self.rank = rank
        self.address = address
        self.credit_bytes = router.config.credit_bytes
        self.carriers: dict[str, Carrier] = {}
        self.carrier: Carrier | None = None  # the best of them; None: not connected
        self.number = 0  # of its scheme
        self.peer_credit = MIN_CREDIT_BYTES  # what each flow may send; more once the peer has said so
        self.sidecar: Carrier | None = None  # beside the carriers above, for large payloads
        self._sidecar_known = False  # the peer has it too: payloads may be announced on it
        self._former: set[int] = set()  # numbers of sidecars that were lost: the peer may not have heard yet
        self._by_number: dict[int, Carrier] = {}
        self._finished: set[Carrier] = set()  # those on which the peer has finished
        self.failure: NexarError | None = None  # why nothing can be sent now
        self.flows: dict[int, Flow] = {}  # by communicator
        self.dropped_frames = 0  # of a kind we do not know, or for something that is over

    def add(self, carrier: Carrier) -> None:
        """One more way to the peer."""
        self.carriers[carrier.scheme] = carrier
        self._choose()

    def drop(self, carrier: Carrier) -> None:
        """This way is gone."""
        if self.carriers.get(carrier.scheme) is carrier:
            del self.carriers[carrier.scheme]
            self._finished.discard(carrier)
            self._choose()

    def add_sidecar(self, carrier: Carrier) -> None:
        """A way for large payloads; nothing is announced on it before the peer has said that it knows it."""
        self.sidecar = carrier
        self._sidecar_known = False
        self._choose()

    def confirm_sidecar(self, carrier: Carrier) -> None:
        """The peer has spoken on it, so it takes what comes there."""
        self._sidecar_known = self._sidecar_known or self.sidecar is carrier

    def drop_sidecar(self, carrier: Carrier | None = None) -> Carrier | None:
        """It is gone (or whichever there is). None: there was none, or another."""
        gone = self.sidecar
        if gone is None or carrier not in (None, gone):
            return None
        self.sidecar = None
        self._sidecar_known = False
        self._former.add(number_of(gone.scheme))
        self._choose()
        return gone

    def drop_carriers(self) -> list[Carrier]:
        """All ways are gone, the sidecar too; returns them."""
        carriers = [*self.carriers.values(), *filter(None, (self.drop_sidecar(),))]
        self.carriers.clear()
        self._former.clear()
        self._finished.clear()
        self._choose()
        return carriers

    def finished_by_peer(self, carrier: Carrier) -> bool:
        """The peer will send no more on this one. True: nor on any other. A carrier that was replaced says nothing. One
        that goes over other nodes is not waited for where there are others: it may go over the very ones that finish.
        """
        if self.carriers.get(carrier.scheme) is not carrier:
            return False
        self._finished.add(carrier)
        needed = [other for scheme, other in self.carriers.items() if scheme != RELAY] or [carrier]
        return all(other in self._finished for other in needed)

    def _choose(self) -> None:
        scheme = choose(0, self.carriers)
        self.carrier = self.carriers[scheme] if scheme is not None else None
        self.number = number_of(scheme) if scheme is not None else 0
        every = [*self.carriers.values(), *filter(None, (self.sidecar,))]
        self._by_number = {number_of(carrier.scheme): carrier for carrier in every}

    def number_for(self, size_bytes: int) -> int:
        """Of the carrier that takes a payload of that size."""
        if self.sidecar is None or not self._sidecar_known:
            return self.number
        scheme = choose(size_bytes, self.carriers, self.sidecar.scheme)
        return number_of(scheme) if scheme is not None else self.number

    def knows(self, number: int) -> bool:
        """Whether a peer that has not heard of a loss yet may announce a payload there."""
        return number in self._by_number or number in self._former

    def connected(self) -> Carrier:
        """The carrier to use now. Raises why there is none."""
        if self.failure is not None:
            raise copy(self.failure)  # each caller gets its own, or tracebacks of all would pile up in one
        if self.carrier is None:
            raise PeerLost(**self.facts(), cause="not connected yet")
        return self.carrier

    def carrier_of(self, number: int) -> Carrier | None:
        """The carrier that an envelope names."""
        return self._by_number.get(number)

    def flow(self, communicator: int, matching: Matching | None = None) -> Flow:
        """The flow to send on. Raises if the communicator is not open, or its flow with this peer is over.

        `matching`: who sends belongs to this generation. If that is over it raises what ended it: a frame must never
        pass for one of the next.
        """
        error = None if matching is None else matching.lost(self.peer)
        if error is not None:
            raise copy(error)
        flow = self.flows.get(communicator)
        return flow if flow is not None else self._begin_sending(communicator)

    def _begin_sending(self, communicator: int) -> Flow:
        matching = self.router.current(communicator)
        error = matching.lost(self.peer)
        if error is not None:
            raise copy(error)
        if not matching.admits(self.peer):
            raise UsageError(f"node {format_node(self.peer)} is no member of communicator {communicator}")
        return self.begin(matching)

    def begin(self, matching: Matching) -> Flow:
        """A new flow for this generation of the communicator."""
        flow = Flow(matching, self.peer_credit, self.credit_bytes)
        self.flows[matching.communicator] = flow
        known = matching.peers.get(self.peer) or AwaitedPeer(rank=self.rank, node=self.peer)
        matching.peers[self.peer] = replace(known, address=self.address or known.address)
        return flow

    def raise_credit(self, amount: int) -> None:
        """The peer has said how much each flow may send to it."""
        if amount > self.peer_credit:
            for flow in self.flows.values():
                flow.sent.raise_limit(amount - self.peer_credit)
            self.peer_credit = amount

    def notice(
        self,
        kind: FrameKind,
        communicator: int,
        generation: int,
        *,
        transfer: int = 0,
        length: int = 0,
        carrier: int = 0,
        body: bytes = b"",
    ) -> None:
        """Put a frame of the link's own protocol into the outbox. Under the lock."""
        if self.carrier is None:
            return
        lane = Lane.DATA if kind == FrameKind.WITHDRAW else Lane.CONTROL
        header = pack_header(
            VERSION, kind, lane, carrier, 0, 0, 0, 0, 0, 0, generation, 0, 0, communicator, self.node, self.peer, 0, 0,
            0, transfer, length, 0, len(body),
        )  # fmt: skip
        self.router.deferred_io.add(self.carrier.send_frame, lane, communicator, header, body)

    def dialer_of(self, carrier: Carrier) -> NodeId:
        """Of the two ends."""
        return self.node if carrier.dialed else self.peer

    def pass_on(self, *body: Buffer) -> None:
        """Give the peer something that goes over it to others, or has come over others to it. Any thread, with the
        lock or without. Raises CarrierLost.
        """
        size = sum(map(len, body))
        self._speak_of_relaying(FrameKind.RELAY, Lane.RELAY, 0, size, *body)

    def make_room(self, hops: int, amount: int) -> None:
        """So much of what it gave us to relay, after so many hops, has gone on. Likewise."""
        self._speak_of_relaying(FrameKind.ROOM, Lane.CONTROL, hops, amount)

    def _speak_of_relaying(self, kind: FrameKind, lane: Lane, hops: int, length: int, *body: Buffer) -> None:
        carrier = self.carrier
        if carrier is None or carrier.scheme == RELAY or self.failure is not None:
            raise CarrierLost("closed", "no connection of its own")
        header = pack_header(
            VERSION, kind, lane, 0, 0, 0, 0, 0, 0, 0, 0, hops, 0, 0, self.node, self.peer, 0, 0, 0, 0, length, 0,
            length if body else 0,
        )  # fmt: skip
        carrier.send_frame(lane, 0, header, *body)

    def tell_unheard(self, call: Frame) -> None:
        """A remote call has come for a communicator that is closed here. Under the lock. A peer that calls again and
        again, and reads none of the answers, gets no more of them.
        """
        body = encode_message(
            CommunicatorClosed(communicator=call.communicator, generation=call.generation, number=call.tag)
        )
        try:
            if self.carrier is not None and admits(Lane.CONTROL, self.carrier.queued_bytes(Lane.CONTROL), len(body)):
                self.notice(FrameKind.CONTROL, 0, 0, length=len(body), body=body)
        except CarrierLost:
            return  # the link is told by the carrier itself

    def facts(self) -> dict[str, Any]:
        """The peer, as facts of an error."""
        return {"rank": self.rank, "node": self.peer, "address": self.address}

    def awaited(self, missing: str) -> AwaitedPeer:
        """The peer, as somebody waited for."""
        return AwaitedPeer(rank=self.rank, node=self.peer, address=self.address, missing=missing)

    def explain(self, loss: CarrierLost) -> NexarError:
        """What a carrier's end means to the user."""
        if loss.misbehaved:
            return PeerMisbehaved(rank=self.rank, node=self.peer, address=self.address, what=loss.reason)
        if loss.kind == "closed":
            return LinkClosed(rank=self.rank, node=self.peer, address=self.address)
        return PeerLost(rank=self.rank, node=self.peer, address=self.address, cause=loss.reason)
