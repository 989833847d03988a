"""The arriving half of a link: frames in, changes under the lock, answers by the outbox."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from msgspec.structs import replace

from nexar.errors import NexarError
from nexar.links.link_state import Flow, LinkState
from nexar.links.matching import Matching
from nexar.links.messages import Message, MessageState
from nexar.transport.base import CarrierLost, Redirected
from nexar.wire.frame import HEADER_BYTES, Frame, FrameError, FrameKind, Space, decode_shape

_EAGER: Final = int(FrameKind.EAGER)
_COLLECTIVE: Final = int(Space.COLLECTIVE)
_CALL: Final = int(Space.CALL)
_LAST_SPACE: Final = max(Space)
_WHOLE: Final = (
    MessageState.COMPLETE,
    MessageState.FINISHED,
)  # what is gone for another reason than that it was received does not flow
_OVER: Final = "the receiver has left this collective"


class Misbehaviour(Exception):
    """What the peer did wrong. Caught by the link, which ends the connection."""


class Receiving:
    """Takes messages in. It is the `Origin` of every message of its link."""

    def __init__(self, state: LinkState, misbehaved: Callable[[str], None]) -> None:
        """`misbehaved` ends the link; called without the lock."""
        self._state = state
        self._router = state.router
        self._peer = state.peer
        self._misbehaved = misbehaved
        # Announced messages by transfer, until whole or gone; under the lock.
        self._flowing: dict[int, tuple[Matching, Message]] = {}
        self.messages = 0  # under the lock
        self.bytes = 0
        self.payloads = 0

    @property
    def rank(self) -> int | None:
        """The peer's, for errors."""
        return self._state.rank

    # -- frames, under the lock --------------------------------------------------------------------------

    def message(self, frame: Frame, body: memoryview) -> None:
        """A whole message, or an envelope."""
        flow = self._state.flows.get(frame.communicator)
        if flow is None or flow.generation != frame.generation:
            flow = self._begin(frame, body)
            if flow is None:
                return
        credit = flow.received
        if not credit.arrived(HEADER_BYTES + frame.body):
            raise Misbehaviour(
                f"it sent more than its credit of {credit.limit} bytes in communicator {frame.communicator}"
            )
        if credit.owed and credit.held > credit.comfort:
            self._state.notice(FrameKind.CREDIT, frame.communicator, frame.generation, length=credit.consumed(0))
        if frame.space == _COLLECTIVE:
            if flow.matching.mismatch_detector.saw(self._peer, frame):
                self._deliver(flow, frame, body)
            else:
                self._discard(flow, frame)
        elif frame.space > _LAST_SPACE:
            raise Misbehaviour(f"it sent a message of space {frame.space}, which there is not")
        elif frame.message == flow.expected:
            flow.expected += 1
            self._deliver(flow, frame, body)
            if flow.held:
                self._deliver_held(flow)
        else:
            self._hold(flow, frame, body)

    def _begin(self, frame: Frame, body: memoryview) -> Flow | None:
        """The first frame of a generation; None if it is kept for later or belongs to one that is over."""
        matching = self._router.find(frame.communicator, frame.generation)
        if matching is None:
            if frame.space == _CALL and self._router.is_over(frame.communicator, frame.generation):
                self._state.tell_unheard(frame)
            if not self._router.keep(self, frame, partial(self._deliver_late, frame, bytes(body))):
                raise Misbehaviour("it sends to communicators that are not open here, more than can be kept")
            return None
        if not matching.admits(self._state.peer):
            raise Misbehaviour(f"it sent to communicator {frame.communicator}, of which it is no member")
        if matching.lost(self._state.peer) is not None:
            self._state.dropped_frames += 1
            return None
        return self._state.begin(matching)

    def _deliver_late(self, frame: Frame, body: bytes) -> None:
        """Its communicator has been opened. Called by the router, without the lock."""
        try:
            with self._router.lock:
                self.message(frame, memoryview(body))
        except (Misbehaviour, FrameError) as fault:
            self._misbehaved(str(fault))
        self._router.deferred_io.flush()

    def _deliver(self, flow: Flow, frame: Frame, body: memoryview) -> None:
        self.messages += 1
        self.bytes += frame.length
        shape: tuple[int, ...] = ()
        if frame.dimensions:
            shape = decode_shape(frame, body)
        if frame.kind != _EAGER:
            self._announced(flow, frame, shape)
        elif flow.matching.arrive(self, self._peer, frame, shape, body[len(shape) * 8 :] if shape else body):
            amount = flow.received.consumed(HEADER_BYTES + frame.body)
            if amount:
                self._state.notice(FrameKind.CREDIT, frame.communicator, frame.generation, length=amount)

    def _discard(self, flow: Flow, frame: Frame) -> None:
        """A message of a collective that is over here."""
        self._state.dropped_frames += 1
        if frame.kind != _EAGER:
            self._state.notice(
                FrameKind.REFUSE, frame.communicator, frame.generation, transfer=frame.transfer, body=_OVER.encode()
            )
        amount = flow.received.consumed(HEADER_BYTES + frame.body)
        if amount:
            self._state.notice(FrameKind.CREDIT, frame.communicator, frame.generation, length=amount)

    def _announced(self, flow: Flow, frame: Frame, shape: tuple[int, ...]) -> None:
        if frame.transfer in self._flowing:
            raise Misbehaviour(f"it announced transfer {frame.transfer} twice")
        if not self._state.knows(frame.carrier):
            raise Misbehaviour(f"it announced a payload on carrier {frame.carrier}, which does not connect us")
        message = flow.matching.announce(self, self._state.peer, frame, shape)
        self._flowing[frame.transfer] = flow.matching, message

    def _hold(self, flow: Flow, frame: Frame, body: memoryview) -> None:
        if frame.message < flow.expected or frame.message in flow.held:
            raise Misbehaviour(f"it sent message {frame.message} twice")
        flow.held[frame.message] = frame, bytes(body)

    def _deliver_held(self, flow: Flow) -> None:
        while (held := flow.held.pop(flow.expected, None)) is not None:
            flow.expected += 1
            self._deliver(flow, held[0], memoryview(held[1]))

    def landed(self, transfer: int) -> None:
        """A payload is whole: its sender may be told."""
        found = self._flowing.pop(transfer, None)
        if found is None:
            return
        matching, message = found
        self.payloads += 1
        self._state.notice(FrameKind.DELIVERED, matching.communicator, matching.generation, transfer=transfer)
        matching.land(message)

    def withdrawn(self, frame: Frame) -> None:
        """The sender takes a message back."""
        found = self._flowing.pop(frame.transfer, None)
        if found is not None:
            found[0].withdraw(found[1])

    def fail(self, error: NexarError) -> None:
        """The link is lost: what was on its way will not come, and nobody need wait for more."""
        self._router.forget(self)
        for matching, message in self._take_flowing(self._flowing):
            matching.abandon(message, error)
        self._router.lose(self._state.peer, error)

    def close(self, matching: Matching, error: NexarError) -> None:
        """A generation is over: what flows into its receives is not wanted any more. Under the lock."""
        mine = [transfer for transfer, (owner, _) in self._flowing.items() if owner is matching]
        for _, message in self._take_flowing(mine):
            matching.abandon(message, error)
            self._tell_refusal(message, str(error))

    def _take_flowing(self, transfers: Iterable[int]) -> list[tuple[Matching, Message]]:
        """Those of which something is missing; they are not followed any more.

        A message can be whole, and even received, before the driving thread says so: who posted a receive late asked
        the carrier and heard that all had landed. To its sender that is delivery, whatever ends here.
        """
        unfinished = []
        for transfer in list(transfers):
            if self._flowing[transfer][1].state in _WHOLE:
                self.landed(transfer)
            else:
                unfinished.append(self._flowing.pop(transfer))
        return unfinished

    def fall_back(self, number: int) -> None:
        """The sidecar of this number has ended: what flowed on it is expected anew on the mesh carrier. Under the lock.

        The sidecar touches no memory any more, and the sender still holds every payload of which it has not heard that
        it was delivered; so it begins again, and nothing is lost.
        """
        for _, message in list(self._flowing.values()):
            if message.frame.carrier == number:
                self._begin_anew(message)

    def _begin_anew(self, message: Message) -> None:
        transfer = message.frame.transfer
        if transfer not in self._flowing:
            return  # it ended otherwise while it was moved
        if message.state in _WHOLE:
            self.landed(transfer)
        elif message.state is MessageState.MOVING:  # only who moves it knows where it goes
            message.after_move = partial(self._begin_anew, message)
        else:
            message.frame = replace(message.frame, carrier=self._state.number)
            if message.data is not None:
                self.grant(message, message.data)

    # -- Origin ----------------------------------------------------------------------------------------

    def grant(self, message: Message, into: memoryview) -> None:
        """See Origin. A sidecar that was lost since the message was announced is replaced by the mesh carrier."""
        frame, number = message.frame, message.frame.carrier
        carrier = self._state.carrier_of(number)
        if carrier is None:
            number, carrier = self._state.number, self._state.carrier
            message.frame = replace(frame, carrier=number)
        if carrier is None:
            return  # lost since it was announced; the message is abandoned with its link
        try:
            carrier.expect_payload(frame.transfer, into)
        except CarrierLost:
            return  # likewise; of a sidecar: the carrier reports its end by itself, and the message begins anew
        self._state.notice(
            FrameKind.GRANT, frame.communicator, frame.generation, transfer=frame.transfer, carrier=number
        )

    def redirect(self, message: Message, into: memoryview | None) -> Redirected:
        """See Origin. A carrier that has ended reports its loss by itself; nothing lands any more."""
        carrier = self._state.carrier_of(message.frame.carrier)
        if carrier is None:
            return Redirected.UNKNOWN
        try:
            return carrier.redirect_payload(message.frame.transfer, into)
        except CarrierLost:
            return Redirected.UNKNOWN

    def refuse(self, message: Message, reason: str) -> None:
        """See Origin."""
        self._flowing.pop(message.frame.transfer, None)
        self.redirect(message, None)
        self._tell_refusal(message, reason)

    def _tell_refusal(self, message: Message, reason: str) -> None:
        frame = message.frame
        self._state.notice(
            FrameKind.REFUSE, frame.communicator, frame.generation, transfer=frame.transfer, body=reason.encode()[:4096]
        )

    def consumed(self, message: Message) -> None:
        """See Origin."""
        flow = self._state.flows.get(message.frame.communicator)
        frame = message.frame
        if flow is None or flow.generation != frame.generation:
            return
        amount = flow.received.consumed(HEADER_BYTES + frame.body)
        if amount:
            self._state.notice(FrameKind.CREDIT, frame.communicator, frame.generation, length=amount)
