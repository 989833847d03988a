"""The sending half of a link: whole messages, envelopes, payloads, and sends that wait for credit."""

from __future__ import annotations

import struct
from itertools import count as counter
from typing import Final, NamedTuple

from msgspec.structs import replace

from nexar.errors import Cancelled, NexarError, UsageError
from nexar.links.flow_control import admits
from nexar.links.link_state import Flow, LinkState, PostedSend
from nexar.links.matching import Matching
from nexar.links.messages import row_of
from nexar.links.operation import FINISHED, Operation
from nexar.transport.base import CarrierLost
from nexar.types import AwaitedPeer
from nexar.wire.frame import (
    HEADER_BYTES,
    VERSION,
    Frame,
    FrameKind,
    Lane,
    Space,
    encode,
    encode_shape,
    pack_header,
    unpack_header,
)

_EAGER: Final = int(FrameKind.EAGER)
_ENVELOPE: Final = int(FrameKind.ENVELOPE)
_DATA: Final = Lane.DATA
_RPC: Final = Lane.RPC
_CALL: Final = int(Space.CALL)  # this and higher: remote calls
_COLLECTIVE: Final = int(Space.COLLECTIVE)
_MESSAGES: Final = frozenset({int(Space.TAGGED), int(Space.UNTAGGED), int(Space.PART)})


class MessageHeader(NamedTuple):
    """Header fields of a message. The last seven describe a collective."""

    space: int = Space.UNTAGGED
    tag: int = 0
    dtype: int = 0
    sequence: int = 0
    step: int = 0
    operation: int = 0
    reduce_op: int = 0
    root: int = 0
    elements: int = 0
    way: int = 0


PLAIN: Final = MessageHeader()


class Sending:
    """Tracks sends until they are done."""

    def __init__(self, state: LinkState) -> None:
        self._state = state
        self.lock = state.router.lock
        self._deferred_io = state.router.deferred_io
        self._eager_limit = state.router.config.eager_limit_bytes
        self._transfers = counter(1)
        self._announced: dict[int, PostedSend] = {}  # by transfer; under the lock
        self.messages = 0  # posted; under the lock
        self.bytes = 0
        self.envelopes = 0
        self.stalls = 0  # sends that had to wait for credit

    def post(
        self,
        communicator: int,
        data: memoryview,
        *,
        shape: tuple[int, ...] = (),
        about: MessageHeader = PLAIN,
        matching: Matching | None = None,
    ) -> Operation:
        if data.__class__ is not memoryview or data.format != "B" or data.ndim != 1:
            # before anything is counted: a failure must leave no trace
            data = row_of(data, "a send needs contiguous bytes")
        space, tag, dtype, sequence, step, operation, reduce_op, root, elements, way = about
        extents = encode_shape(shape) if shape else b""
        length = len(data)
        whole = length <= self._eager_limit
        lane = _DATA if space < _CALL else _RPC
        body = len(extents) + length if whole else len(extents)  # an array may be longer than the body field can hold
        state = self._state
        try:
            with self.lock:
                carrier = state.carrier if state.failure is None and state.carrier is not None else state.connected()
                flow = state.flows.get(communicator)
                if flow is None or (matching is not None and flow.matching is not matching):
                    flow = state.flow(communicator, matching)
                # Packed before anything is counted: the peer would wait for a number that was taken and not sent.
                header = pack_header(
                    VERSION, _EAGER, lane, state.number, space, dtype, len(shape), operation, reduce_op, way,
                    flow.generation, step, root, communicator, state.node, state.peer, tag, sequence, flow.message, 0,
                    length, elements, body,
                )  # fmt: skip
                if space != _COLLECTIVE:  # collectives match by sequence and step
                    flow.message += 1
                self.messages += 1
                self.bytes += length
                whole = whole and not flow.waiting and flow.take_whole(HEADER_BYTES + body)
                if not whole:
                    send = self._post_large(flow, PostedSend(self, Frame(*unpack_header(header)), extents, data))
            if not whole:
                self._deferred_io.flush()
                return send
            if extents:
                carrier.send_frame(lane, communicator, header, extents, data)
            else:
                carrier.send_frame(lane, communicator, header, data)
        except CarrierLost as loss:
            raise state.explain(loss) from loss
        except struct.error as error:
            raise _unfit(error) from error
        return FINISHED

    def _post_large(self, flow: Flow, send: PostedSend) -> PostedSend:
        if flow.waiting or not self._announce(flow, send):
            self.stalls += 1
            flow.waiting.append(send)
        return send

    def _announce(self, flow: Flow, send: PostedSend) -> bool:
        if not flow.sent.take_envelope(HEADER_BYTES + len(send.shape)):
            return False
        transfer, carries = next(self._transfers), self._state.number_for(send.frame.length)
        send.frame = replace(send.frame, kind=_ENVELOPE, carrier=carries, transfer=transfer, body=len(send.shape))
        send.announced = True
        self._announced[transfer] = send
        self.envelopes += 1
        carrier = self._state.connected()
        lane = Lane(send.frame.lane)
        self._deferred_io.add(carrier.send_frame, lane, send.frame.communicator, encode(send.frame), send.shape)
        return True

    # -- frames of the peer, under the lock --------------------------------------------------------------

    def granted(self, frame: Frame) -> None:
        """Start the payload. If the send was withdrawn, withdraw again: WITHDRAW may have overtaken the envelope."""
        send = self._announced.get(frame.transfer)
        if send is not None:
            self._begin_payload(send, frame.carrier)
        elif self._may_answer():
            self._withdraw(frame)

    def _may_answer(self) -> bool:
        """False for a peer that grants repeatedly and does not read the answers."""
        carrier = self._state.carrier
        try:
            return carrier is not None and admits(Lane.CONTROL, carrier.queued_bytes(_DATA), HEADER_BYTES)
        except CarrierLost:
            return False  # the carrier reports its loss itself

    def _begin_payload(self, send: PostedSend, number: int) -> None:
        """Under the lock, so that a cancelled send is not lent again. The receiver chooses the carrier, because it may
        notice the loss of a bulk channel first. The payload then restarts.
        """
        carrier = self._state.carrier_of(number)
        if carrier is None or (send.flowing and send.frame.carrier == number):
            return
        if send.frame.carrier != number:
            self._stop(send)
            send.frame = replace(send.frame, carrier=number)
        send.flowing = True
        try:
            carrier.send_payload(send.frame.transfer, send.data)
        except CarrierLost:
            return  # the carrier reports its loss itself

    def _withdraw(self, frame: Frame) -> None:
        self._state.notice(FrameKind.WITHDRAW, frame.communicator, frame.generation, transfer=frame.transfer)

    def delivered(self, frame: Frame) -> None:
        send = self._announced.pop(frame.transfer, None)
        if send is not None:
            send.finish()

    def refused(self, frame: Frame, reason: str) -> None:
        send = self._announced.pop(frame.transfer, None)
        if send is not None:
            self._stop(send)
            send.finish(Cancelled(operation=send.name, reason=reason))

    def credited(self, frame: Frame) -> bool:
        """Continue waiting sends in order. Return False if the peer returned too much credit."""
        flow = self._state.flows.get(frame.communicator)
        if flow is None or flow.generation != frame.generation:
            return True
        if not flow.sent.give_back(frame.length):
            return False
        self._go_on(flow)
        return True

    def allowed(self, frame: Frame) -> None:
        """Apply the credit of the peer's TERMS, and continue waiting sends: nothing else would."""
        self._state.raise_credit(frame.length)
        for flow in self._state.flows.values():
            self._go_on(flow)

    def _go_on(self, flow: Flow) -> None:
        while flow.waiting and (flow.waiting[0].done or self._announce(flow, flow.waiting[0])):
            flow.waiting.popleft()

    def unfinished(self) -> list[PostedSend]:
        """User messages only. Under the lock."""
        waiting = (send for flow in self._state.flows.values() for send in flow.waiting)
        return [send for send in (*waiting, *self._announced.values()) if send.frame.space in _MESSAGES]

    # -- ending ----------------------------------------------------------------------------------------

    def cancel_send(self, send: PostedSend) -> None:
        with self.lock:
            if send.done:
                return
            if send.announced:
                self._announced.pop(send.frame.transfer, None)
                self._stop(send)
                self._withdraw(send.frame)
            else:
                self._forget_waiting(send)
            send.finish(Cancelled(operation=send.name))
        self._deferred_io.flush()

    def fail(self, error: NexarError) -> None:
        """End all sends. Carriers stop reading their memory, and the peer is told. Under the lock."""
        self._end([send for flow in self._state.flows.values() for send in flow.waiting], error)
        self._end(list(self._announced.values()), error)

    def close(self, communicator: int, generation: int, error: NexarError) -> None:
        """End the sends of a generation. Under the lock."""
        flow = self._state.flows.get(communicator)
        waiting = list(flow.waiting) if flow is not None and flow.generation == generation else []
        announced = [send for send in self._announced.values() if send.belongs_to(communicator, generation)]
        self._end([*waiting, *announced], error)

    def _end(self, sends: list[PostedSend], error: NexarError) -> None:
        for send in sends:
            if self._announced.pop(send.frame.transfer, None) is not None:
                self._stop(send)
                self._withdraw(send.frame)
            send.finish(error)

    def awaited(self, missing: str) -> AwaitedPeer:
        return self._state.awaited(missing)

    def _stop(self, send: PostedSend) -> None:
        carrier = self._state.carrier_of(send.frame.carrier)
        if carrier is not None and send.flowing:
            try:
                carrier.withdraw_payload(send.frame.transfer)
            except CarrierLost:
                return  # it has ended, so it reads nothing; it reports its loss itself

    def _forget_waiting(self, send: PostedSend) -> None:
        """Renumber later messages: the receiver would wait for the number of this one."""
        flow = self._state.flows.get(send.frame.communicator)
        if flow is None or send not in flow.waiting:
            return
        position = flow.waiting.index(send)
        del flow.waiting[position]
        if send.frame.space == _COLLECTIVE:
            return
        flow.message -= 1
        for later in list(flow.waiting)[position:]:
            if later.frame.space != _COLLECTIVE:
                later.frame = replace(later.frame, message=later.frame.message - 1)


def _unfit(error: struct.error) -> UsageError:
    return UsageError(f"send: a number does not fit into its header field ({error}); tags are 0 to 2**64 - 1")
