"""State that both halves of a link share: peer, carriers, flows, posted sends.

A flow ends with its carrier, because frames may be lost. The next generation gets a new flow.
"""

from __future__ import annotations

from collections import deque
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from nexar.links.sending import Sending


class PostedSend(Operation):
    """A send that waits for credit, a grant or delivery, and borrows the caller's memory. The node's lock guards it."""

    __slots__ = ("announced", "data", "flowing", "frame", "owner", "shape")

    def __init__(self, owner: Sending, frame: Frame, shape: bytes, data: memoryview) -> None:
        super().__init__(owner.lock)
        self.owner = owner
        self.frame = frame  # the envelope
        self.shape = shape
        self.data = data
        self.announced = False  # the envelope was sent
        self.flowing = False  # the peer granted it

    @property
    def name(self) -> str:
        return f"the send of {self.frame.length} bytes {self._conversation}"

    @property
    def _conversation(self) -> str:
        _, space, tag = key_of(self.frame.destination, self.frame)
        return conversation(space, tag)

    def belongs_to(self, communicator: int, generation: int) -> bool:
        return self.frame.communicator == communicator and self.frame.generation == generation

    def awaited(self) -> AwaitedPeer:
        if self.flowing:
            return self.owner.awaited("the rest of the transfer")
        return self.owner.awaited(f"a receive {self._conversation}")

    def cancel(self) -> None:
        """The receiver never sees the message."""
        self.owner.cancel_send(self)


class Flow:
    """State of one (link, communicator, generation). The node's lock guards it."""

    __slots__ = ("expected", "generation", "held", "matching", "message", "received", "sent", "take_whole", "waiting")

    def __init__(self, matching: Matching, send_credit_bytes: int, receive_credit_bytes: int) -> None:
        self.matching = matching
        self.generation = matching.generation
        self.sent = SendCredit(send_credit_bytes)
        self.take_whole = self.sent.take_whole  # bound once, for the fast path
        self.received = ReceiveCredit(receive_credit_bytes)
        self.message = 0  # number of the next message I send
        self.expected = 0  # number of the next message to deliver
        self.held: dict[int, tuple[Frame, bytes]] = {}  # arrived out of order: threads and carriers may overtake
        self.waiting: deque[PostedSend] = deque()  # sends without credit even for an envelope


class LinkState:
    """State of one link. The node's lock guards it."""

    def __init__(self, router: Router, peer: NodeId, rank: Rank | None, address: str | None) -> None:
        self.router = router
        self.node = router.node
        self.peer = peer
        self.rank = rank
        self.address = address
        self.credit_bytes = router.config.credit_bytes
        self.carriers: dict[str, Carrier] = {}
        self.carrier: Carrier | None = None  # the best of them; None if not connected
        self.number = 0  # of the carrier's scheme
        self.peer_credit = MIN_CREDIT_BYTES  # bytes that each flow may send; TERMS raises it
        self.sidecar: Carrier | None = None  # the bulk channel, beside the carriers above
        self._sidecar_known = False  # the peer has it too: payloads may be announced on it
        self._lost_numbers: set[int] = set()  # numbers of lost bulk channels: the peer may not know yet
        self._by_number: dict[int, Carrier] = {}
        self._finished: set[Carrier] = set()  # carriers on which the peer has finished
        self.failure: NexarError | None = None  # why nothing can be sent now
        self.flows: dict[int, Flow] = {}  # by communicator
        self.dropped_frames = 0  # frames of unknown kind, or for something that is over

    def add(self, carrier: Carrier) -> None:
        self.carriers[carrier.scheme] = carrier
        self._choose()

    def drop(self, carrier: Carrier) -> None:
        if self.carriers.get(carrier.scheme) is carrier:
            del self.carriers[carrier.scheme]
            self._finished.discard(carrier)
            self._choose()

    def add_sidecar(self, carrier: Carrier) -> None:
        """No payload is announced on it until the peer confirms it."""
        self.sidecar = carrier
        self._sidecar_known = False
        self._choose()

    def confirm_sidecar(self, carrier: Carrier) -> None:
        self._sidecar_known = self._sidecar_known or self.sidecar is carrier

    def drop_sidecar(self, carrier: Carrier | None = None) -> Carrier | None:
        """Drop and return the bulk channel. Return None if `carrier` is given and is not the current one."""
        gone = self.sidecar
        if gone is None or carrier not in (None, gone):
            return None
        self.sidecar = None
        self._sidecar_known = False
        self._lost_numbers.add(number_of(gone.scheme))
        self._choose()
        return gone

    def drop_carriers(self) -> list[Carrier]:
        carriers = [*self.carriers.values(), *filter(None, (self.drop_sidecar(),))]
        self.carriers.clear()
        self._lost_numbers.clear()
        self._finished.clear()
        self._choose()
        return carriers

    def finished_by_peer(self, carrier: Carrier) -> bool:
        """Whether the peer has finished every carrier that counts. A replaced one does not count, nor a relayed one
        beside others: the finishing nodes may be its relays.
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
        all_carriers = [*self.carriers.values(), *filter(None, (self.sidecar,))]
        self._by_number = {number_of(carrier.scheme): carrier for carrier in all_carriers}

    def number_for(self, size_bytes: int) -> int:
        if self.sidecar is None or not self._sidecar_known:
            return self.number
        scheme = choose(size_bytes, self.carriers, self.sidecar.scheme)
        return number_of(scheme) if scheme is not None else self.number

    def knows(self, number: int) -> bool:
        """Whether a peer that has not noticed a loss may announce a payload there."""
        return number in self._by_number or number in self._lost_numbers

    def connected(self) -> Carrier:
        """Return the carrier to use. Raise the link's failure, or PeerLost."""
        if self.failure is not None:
            raise copy(self.failure)  # a copy for each caller, because tracebacks accumulate in an exception
        if self.carrier is None:
            raise PeerLost(**self.facts(), cause="not connected yet")
        return self.carrier

    def carrier_of(self, number: int) -> Carrier | None:
        return self._by_number.get(number)

    def flow(self, communicator: int, matching: Matching | None = None) -> Flow:
        """Raise if the communicator is not open, the flow is over, or the sender's generation `matching` has ended: its
        frames must not count for the next generation.
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
            raise UsageError(f"node {format_node(self.peer)} is not a member of communicator {communicator}")
        return self.begin(matching)

    def begin(self, matching: Matching) -> Flow:
        flow = Flow(matching, self.peer_credit, self.credit_bytes)
        self.flows[matching.communicator] = flow
        known = matching.peers.get(self.peer) or AwaitedPeer(rank=self.rank, node=self.peer)
        matching.peers[self.peer] = replace(known, address=self.address or known.address)
        return flow

    def raise_credit(self, amount: int) -> None:
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
        """Queue a frame of the link protocol. Under the lock."""
        if self.carrier is None:
            return
        lane = Lane.DATA if kind == FrameKind.WITHDRAW else Lane.CONTROL
        header = pack_header(
            VERSION, kind, lane, carrier, 0, 0, 0, 0, 0, 0, generation, 0, 0, communicator, self.node, self.peer, 0, 0,
            0, transfer, length, 0, len(body),
        )  # fmt: skip
        self.router.deferred_io.add(self.carrier.send_frame, lane, communicator, header, body)

    def dialer_of(self, carrier: Carrier) -> NodeId:
        return self.node if carrier.dialed else self.peer

    def send_relayed(self, *body: Buffer) -> None:
        """Send a RELAY frame. Raise CarrierLost. Any thread, with or without the lock."""
        size = sum(map(len, body))
        self._send_relay_frame(FrameKind.RELAY, Lane.RELAY, 0, size, *body)

    def return_relay_credit(self, hops: int, amount: int) -> None:
        """Like send_relayed."""
        self._send_relay_frame(FrameKind.RELAY_CREDIT, Lane.CONTROL, hops, amount)

    def _send_relay_frame(self, kind: FrameKind, lane: Lane, hops: int, length: int, *body: Buffer) -> None:
        carrier = self.carrier
        if carrier is None or carrier.scheme == RELAY or self.failure is not None:
            raise CarrierLost("closed", "no direct connection")
        header = pack_header(
            VERSION, kind, lane, 0, 0, 0, 0, 0, 0, 0, 0, hops, 0, 0, self.node, self.peer, 0, 0, 0, 0, length, 0,
            length if body else 0,
        )  # fmt: skip
        carrier.send_frame(lane, 0, header, *body)

    def send_communicator_closed(self, call: Frame) -> None:
        """Answer a remote call to a closed communicator, if the peer reads answers. Under the lock."""
        body = encode_message(
            CommunicatorClosed(communicator=call.communicator, generation=call.generation, number=call.tag)
        )
        try:
            if self.carrier is not None and admits(Lane.CONTROL, self.carrier.queued_bytes(Lane.CONTROL), len(body)):
                self.notice(FrameKind.CONTROL, 0, 0, length=len(body), body=body)
        except CarrierLost:
            return  # the carrier reports its loss itself

    def facts(self) -> dict[str, Any]:
        return {"rank": self.rank, "node": self.peer, "address": self.address}

    def awaited(self, missing: str) -> AwaitedPeer:
        return AwaitedPeer(rank=self.rank, node=self.peer, address=self.address, missing=missing)

    def explain(self, loss: CarrierLost) -> NexarError:
        if loss.misbehaved:
            return PeerMisbehaved(rank=self.rank, node=self.peer, address=self.address, what=loss.reason)
        if loss.kind == "closed":
            return LinkClosed(rank=self.rank, node=self.peer, address=self.address)
        return PeerLost(rank=self.rank, node=self.peer, address=self.address, cause=loss.reason)
