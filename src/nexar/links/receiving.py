"""The receiving half of a link: handles frames under the lock, answers through the deferred I/O queue."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from msgspec.structs import replace

from nexar.errors import NexarError, Revoked
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
)  # a message finished for another reason than its receipt is not in _flowing
_COLLECTIVE_OVER: Final = "the receiver has left this collective"


class Misbehaviour(Exception):
    """The peer broke the protocol: the link ends."""


class Receiving:
    """The `Origin` of every message of its link."""

    def __init__(self, state: LinkState, misbehaved: Callable[[str], None]) -> None:
        """`misbehaved` ends the link. It is called without the lock."""
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
        return self._state.rank

    # -- frames, under the lock --------------------------------------------------------------------------

    def message(self, frame: Frame, body: memoryview) -> None:
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
        if credit.owed and credit.held > credit.batching_limit:
            self._state.notice(FrameKind.CREDIT, frame.communicator, frame.generation, length=credit.consumed(0))
        if frame.space == _COLLECTIVE:
            if flow.matching.mismatch_detector.check_frame(self._peer, frame):
                self._deliver(flow, frame, body)
            else:
                self._discard(flow, frame)
        elif frame.space > _LAST_SPACE:
            raise Misbehaviour(f"it sent a message of unknown space {frame.space}")
        elif frame.message == flow.expected:
            flow.expected += 1
            self._deliver(flow, frame, body)
            if flow.held:
                self._deliver_held(flow)
        else:
            self._hold(flow, frame, body)

    def _begin(self, frame: Frame, body: memoryview) -> Flow | None:
        """Return the flow of a new generation. None: the frame was kept or dropped."""
        matching = self._router.find(frame.communicator, frame.generation)
        if matching is None:
            if frame.space == _CALL and self._router.is_over(frame.communicator, frame.generation):
                self._state.send_communicator_closed(frame)
            if not self._router.keep(self, frame, partial(self._deliver_late, frame, bytes(body))):
                raise Misbehaviour("it sent more to communicators that are not open here than can be kept")
            return None
        if not matching.admits(self._state.peer):
            raise Misbehaviour(f"it sent to communicator {frame.communicator}, but is not a member of it")
        if matching.lost(self._state.peer) is not None:
            self._state.dropped_frames += 1
            return None
        return self._state.begin(matching)

    def _deliver_late(self, frame: Frame, body: bytes) -> None:
        """The router calls this without the lock when the communicator opens."""
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
        self._state.dropped_frames += 1
        if frame.kind != _EAGER:
            self._state.notice(
                FrameKind.REFUSE,
                frame.communicator,
                frame.generation,
                transfer=frame.transfer,
                body=_COLLECTIVE_OVER.encode(),
            )
        amount = flow.received.consumed(HEADER_BYTES + frame.body)
        if amount:
            self._state.notice(FrameKind.CREDIT, frame.communicator, frame.generation, length=amount)

    def _announced(self, flow: Flow, frame: Frame, shape: tuple[int, ...]) -> None:
        if frame.transfer in self._flowing:
            raise Misbehaviour(f"it announced transfer {frame.transfer} twice")
        if not self._state.knows(frame.carrier):
            raise Misbehaviour(f"it announced a payload on unknown carrier {frame.carrier}")
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

    def payload_complete(self, transfer: int) -> None:
        found = self._flowing.pop(transfer, None)
        if found is None:
            return
        matching, message = found
        self.payloads += 1
        self._state.notice(FrameKind.DELIVERED, matching.communicator, matching.generation, transfer=transfer)
        matching.payload_complete(message)

    def withdrawn(self, frame: Frame) -> None:
        found = self._flowing.pop(frame.transfer, None)
        if found is not None:
            found[0].withdraw(found[1])

    def fail(self, error: NexarError) -> None:
        self._router.forget(self)
        for matching, message in self._take_flowing(self._flowing):
            matching.abandon(message, error)
        self._router.lose(self._state.peer, error)

    def close(self, matching: Matching, error: NexarError) -> None:
        """Abandon payloads of an ended generation. Under the lock.

        After `Revoked` no sender is refused: the change or notice that ended the generation here ends it at the sender
        too. A refusal that came first would end the sender's call as cancelled, which has no successor.
        """
        mine = [transfer for transfer, (owner, _) in self._flowing.items() if owner is matching]
        for _, message in self._take_flowing(mine):
            matching.abandon(message, error)
            if not isinstance(error, Revoked):
                self._send_refusal(message, str(error))

    def _take_flowing(self, transfers: Iterable[int]) -> list[tuple[Matching, Message]]:
        """Remove and return the unfinished messages. A message that a late receive completed before the driver's report
        counts as delivered.
        """
        unfinished = []
        for transfer in list(transfers):
            if self._flowing[transfer][1].state in _WHOLE:
                self.payload_complete(transfer)
            else:
                unfinished.append(self._flowing.pop(transfer))
        return unfinished

    def fall_back(self, number: int) -> None:
        """Grant the payloads of a lost bulk channel again, on the mesh carrier. Under the lock. The channel no longer
        touches memory, and the sender holds every payload until delivery.
        """
        for _, message in list(self._flowing.values()):
            if message.frame.carrier == number:
                self._grant_again(message)

    def _grant_again(self, message: Message) -> None:
        transfer = message.frame.transfer
        if transfer not in self._flowing:
            return  # it ended while it was moved
        if message.state in _WHOLE:
            self.payload_complete(transfer)
        elif message.state is MessageState.MOVING:  # only the moving thread knows its destination
            message.after_move = partial(self._grant_again, message)
        else:
            message.frame = replace(message.frame, carrier=self._state.number)
            if message.data is not None:
                self.grant(message, message.data)

    # -- Origin ----------------------------------------------------------------------------------------

    def grant(self, message: Message, into: memoryview) -> None:
        """Use the mesh carrier instead of a lost bulk channel."""
        frame, number = message.frame, message.frame.carrier
        carrier = self._state.carrier_of(number)
        if carrier is None:
            number, carrier = self._state.number, self._state.carrier
            message.frame = replace(frame, carrier=number)
        if carrier is None:
            return  # lost since the announcement; the link abandons the message
        try:
            carrier.expect_payload(frame.transfer, into)
        except CarrierLost:
            return  # likewise; a bulk channel reports its loss itself, which grants the message again
        self._state.notice(
            FrameKind.GRANT, frame.communicator, frame.generation, transfer=frame.transfer, carrier=number
        )

    def redirect(self, message: Message, into: memoryview | None) -> Redirected:
        carrier = self._state.carrier_of(message.frame.carrier)
        if carrier is None:
            return Redirected.UNKNOWN
        try:
            return carrier.redirect_payload(message.frame.transfer, into)
        except CarrierLost:
            return Redirected.UNKNOWN

    def refuse(self, message: Message, reason: str) -> None:
        self._flowing.pop(message.frame.transfer, None)
        self.redirect(message, None)
        self._send_refusal(message, reason)

    def _send_refusal(self, message: Message, reason: str) -> None:
        frame = message.frame
        self._state.notice(
            FrameKind.REFUSE, frame.communicator, frame.generation, transfer=frame.transfer, body=reason.encode()[:4096]
        )

    def consumed(self, message: Message) -> None:
        flow = self._state.flows.get(message.frame.communicator)
        frame = message.frame
        if flow is None or flow.generation != frame.generation:
            return
        amount = flow.received.consumed(HEADER_BYTES + frame.body)
        if amount:
            self._state.notice(FrameKind.CREDIT, frame.communicator, frame.generation, length=amount)
