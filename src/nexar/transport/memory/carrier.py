"""A carrier between two nodes of one process: two pipes and the twin carrier at the other end.

A method changes a pipe and schedules the twin. The twin's driver takes items from the pipe and calls the sink.

No lock is held during a sink call, yet none starts after abort() returns. The driver publishes the carrier it enters,
then checks whether it has ended. abort ends the carrier, then checks whether it is entered and waits for the driver.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from nexar.transport.base import Buffer, Carrier, CarrierLost, Peer, Redirected, Sink
from nexar.transport.memory.pipe import (
    NEVER,
    DeliveryFault,
    Direction,
    FaultModel,
    OutgoingTransfer,
    Pipe,
    PipeBroken,
    PipeEnd,
    QueuedItem,
)
from nexar.transport.unverified import decode_unverified
from nexar.wire.frame import HEADER_BYTES, MAX_CHUNK_BYTES, Decode, FrameError, FrameKind, Lane, decode

if TYPE_CHECKING:
    from nexar.transport.memory.transport import MemoryNetwork, MemoryTransport

_FRAMES_PER_TURN: Final = 256  # then the node's other carriers are driven
_FAULT_CHUNK_BYTES: Final = 64 << 10  # small, so that a fault can cut within a payload
_ROOM_NOTICE_BYTES: Final = 64 << 10  # freed queue space after which a possibly waiting sender is woken
_OURS: Final = frozenset(
    int(kind) for kind in (FrameKind.CHUNK, FrameKind.FINISH, FrameKind.HELLO)
)  # kinds that never reach a sink
_BOTH_FINISHED: Final = "both sides have finished"


class MemoryCarrier(Carrier):
    """One end of an in-process connection."""

    scheme = "memory"
    _sink: Sink  # written by attach(); read at every call, because a sink may replace itself

    def __init__(
        self,
        host: MemoryTransport,
        network: MemoryNetwork,
        peer: Peer,
        direction: Direction,
        *,
        out: Pipe,
        inbound: Pipe,
        dialed: bool,
    ) -> None:
        self.peer = peer
        self.dialed = dialed
        self._host = host
        self._network = network
        self._direction = direction  # direction of received data
        self._out = out
        self._in = inbound
        self._twin: MemoryCarrier = self  # written once, by join()
        self._attached = False  # written by attach(), after the sink
        self._decode: Decode = decode if peer.verified else decode_unverified  # replaced by admit(), any thread
        self._error: CarrierLost | None = None  # why it ended; written once, under the lock of _out
        self._scheduled = False  # queued at its node; set by senders, cleared by the driver
        self._left = threading.Event()  # set by the driver when it leaves a carrier that has ended

    def join(self, twin: MemoryCarrier) -> None:
        """Call it before another thread knows either carrier."""
        self._twin, twin._twin = twin, self

    def attach(self, sink: Sink) -> None:
        self._sink = sink
        self._attached = True
        self.schedule()

    def admit(self) -> None:
        self._decode = decode

    # -- sending -----------------------------------------------------------------------------------------------

    def send_frame(self, lane: Lane, communicator: int, header: bytes, *body: Buffer) -> None:
        # One queue per lane, so communicators share an order: stronger than the contract.
        copied = bytes(body[0]) if len(body) == 1 else b"".join(body)
        due = 0.0 if self._network.fault_model is None else self._due()
        out = self._out
        with out.lock:
            if self._error is not None or out.finished:
                self._check_sending()
            out.put_frame(lane, (header, copied, due))
        self._twin.schedule()

    def queued_bytes(self, lane: Lane) -> int:
        self._check()
        return self._out.queued_bytes(lane)

    def send_payload(self, transfer: int, data: memoryview) -> None:
        due = self._due()
        with self._out.lock:
            self._check_sending()
            if transfer in self._out.outgoing:
                raise ValueError(f"payload {transfer} is being sent already")
            if not self._out.unread:
                self._out.outgoing[transfer] = OutgoingTransfer(data, due)
        self._twin.schedule()

    def withdraw_payload(self, transfer: int) -> None:
        self._check()
        self._out.withdraw(transfer)
        self._twin.schedule()  # a half-close may wait behind it

    def finish(self) -> None:
        due = self._due()
        with self._out.lock:
            self._check()
            if self._out.finished:
                return
            self._out.finished = True
            self._out.endings.append(PipeEnd(None, due))
        self._twin.schedule()

    def _due(self) -> float:
        network = self._network
        fault_model = network.fault_model
        if fault_model is None:
            return 0.0
        return network.clock.now() + fault_model.delay(Direction(self._direction.destination, self._direction.source))

    def _check(self) -> None:
        error = self._error
        if error is not None:  # a new object each time: a second raise would extend the first traceback
            raise CarrierLost(error.kind, error.reason)

    def _check_sending(self) -> None:
        self._check()
        if self._out.finished:
            raise CarrierLost("closed", "this side has finished")

    # -- receiving ---------------------------------------------------------------------------------------------

    def expect_payload(self, transfer: int, into: memoryview) -> None:
        if into.readonly:
            raise ValueError(f"payload {transfer} cannot be received into read-only memory")
        with self._in.lock:  # closing takes this lock after setting the error, so nothing is added afterwards
            self._check()
            self._in.expect(transfer, into)

    def redirect_payload(self, transfer: int, into: memoryview | None) -> Redirected:
        with self._in.lock:
            self._check()
            return self._in.redirect(transfer, into)

    # -- being driven ------------------------------------------------------------------------------------------

    def schedule(self) -> None:
        """Any thread; idempotent."""
        if not self._scheduled:
            self._scheduled = True
            self._host.make_ready(self)

    def drive(self) -> None:
        """Deliver frames, then one chunk. Driver only."""
        self._scheduled = False  # cleared before taking items, so that later sends schedule again
        if not self._attached or self._error is not None:
            return
        fault_model = self._network.fault_model
        try:
            if fault_model is not None:
                self._drive_in(fault_model)
            elif self._take_frames():
                self._take_payload_or_ending(MAX_CHUNK_BYTES)
        except PipeBroken as broken:
            self.fail(CarrierLost(broken.kind, broken.reason))
        except BaseException as error:
            self.fail(CarrierLost("fault", f"its sink raised {error!r}"))
            raise

    def driver_left(self) -> None:
        if self._error is not None:
            self._left.set()

    def _take_frames(self) -> bool:
        """Returns False if the carrier has ended."""
        taken_bytes = 0
        for _ in range(_FRAMES_PER_TURN):
            item = self._in.take_frame()
            if item is None:
                break
            taken_bytes += len(item[1])
            self._deliver(item)
            if self._error is not None:
                return False
        else:
            self.schedule()
        if taken_bytes >= _ROOM_NOTICE_BYTES:
            self._twin._host.waker.wake()
        return True

    def _deliver(self, item: QueuedItem) -> None:
        header, body, _ = item
        if len(header) != HEADER_BYTES:
            raise PipeBroken("misbehaved", f"a frame with a header of {len(header)} bytes")
        try:
            frame = self._decode(header, 0)
        except FrameError as error:
            raise PipeBroken("misbehaved", str(error)) from None
        if frame.body != len(body):
            raise PipeBroken("misbehaved", f"a frame of {len(body)} bytes that claims {frame.body}")
        if frame.kind in _OURS:
            raise PipeBroken("misbehaved", f"a frame of kind {frame.kind} is not allowed here")
        self._sink.frame_arrived(self, frame, memoryview(body))

    def _take_payload_or_ending(self, limit: int) -> None:
        pipe = self._in
        if pipe.outgoing:
            if self._decode is not decode:
                raise PipeBroken("misbehaved", "a payload from a peer that is not authenticated")
            transfer = pipe.copy_chunk(limit)
            if transfer is not None and self._error is None:
                self._sink.payload_arrived(self, transfer)
        elif pipe.endings and not pipe.waiting():
            self._take_ending(pipe.endings.popleft())
        if pipe.outgoing or pipe.endings:
            self.schedule()

    def _take_ending(self, ending: PipeEnd) -> None:
        if ending.reason is not None:
            raise PipeBroken("peer", ending.reason)
        self._sink.carrier_finished(self)
        self._in.drained = True  # each side sets its own flag before reading the other's, so one of them sees both
        if self._out.drained:
            self._close(CarrierLost("closed", _BOTH_FINISHED))
            self._twin._close(CarrierLost("closed", _BOTH_FINISHED))

    # -- fault model -------------------------------------------------------------------------------------------

    def _drive_in(self, fault_model: FaultModel) -> None:
        while self._error is None:
            decision = fault_model.decide(self._direction, self._in.taken_frames, self._in.payload_bytes)
            if decision is DeliveryFault.CUT:
                raise PipeBroken("peer", "the connection was cut")
            if decision is DeliveryFault.HOLD:
                return
            now = self._network.clock.now()
            item = self._in.take_due_frame(now)
            if item is not None:
                self._deliver(item)
            else:
                self._take_what_is_due(now)
                return

    def _take_what_is_due(self, now: float) -> None:
        if self._in.rest_due() <= now:
            self._take_payload_or_ending(_FAULT_CHUNK_BYTES)
        due = self._in.next_due()
        if now < due < NEVER:
            self._host.drive_at(self, due)

    # -- the end -----------------------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        if self._close(CarrierLost("closed", reason)):
            self._end_twin(reason)
        while self._host.is_driven_elsewhere(self):
            self._left.wait()

    def fail(self, error: CarrierLost) -> None:
        """Driver only."""
        if self._close(error):
            self._end_twin(error.reason)
            if self._attached:
                self._sink.carrier_lost(self, CarrierLost(error.kind, error.reason))

    def _close(self, error: CarrierLost) -> bool:
        """Returns False if it had already ended."""
        with self._out.lock:
            if self._error is not None:
                return False
            self._error = error
            self._out.stop_sending()
        self._in.stop_receiving()
        self._host.forget(self)
        return True

    def _end_twin(self, reason: str) -> None:
        due = self._due()
        with self._out.lock:
            self._out.endings.append(PipeEnd(reason, due))
        self._twin.schedule()

    def abandon(self) -> None:
        self._error = CarrierLost("closed", "this process is a fork of the one that made the carrier")

    def stats(self) -> dict[str, float]:
        return {
            "bytes_sent": sum(self._out.sent_bytes) + self._out.payload_bytes,
            "bytes_received": sum(self._in.taken_bytes) + self._in.payload_bytes,
            "frames_sent": self._out.sent_frames,
            "frames_received": self._in.taken_frames,
            "payload_bytes_sent": self._out.payload_bytes,
            "payload_bytes_received": self._in.payload_bytes,
        }
