"""A carrier between two nodes of one process: two pipes, and the twin at the other end.

Who does what: a verb changes a pipe and puts the twin on its node's list of carriers to look at; the twin's driving
thread takes things out and calls the sink. `drive` is the only function that calls a sink.

No lock is held while a sink runs, and yet none runs after abort(): the driving thread first names the carrier it
enters and then looks whether it has ended; abort first ends the carrier and then looks whether it is entered. One of
the two sees the other, and abort waits until the driving thread has left.
"""

from __future__ import annotations

import threading
from typing import Final, Protocol

from nexar.clock import Clock
from nexar.transport.base import Buffer, Carrier, CarrierLost, Peer, Redirected, Sink, Waker
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

_FRAMES_PER_TURN: Final = 256  # then the node's other carriers have their turn
_FAULT_CHUNK_BYTES: Final = 64 << 10  # small, so that a cut can come in the middle of a payload
_ROOM_NOTICE_BYTES: Final = (
    64 << 10
)  # a sender may be waiting for its queue to shrink: tell it when it did by this much
_OURS: Final = frozenset(
    int(kind) for kind in (FrameKind.CHUNK, FrameKind.FINISH, FrameKind.HELLO)
)  # a transport's own kinds
_BOTH_FINISHED: Final = "both sides have finished"


class CarrierNetwork(Protocol):
    """What a carrier asks of its network."""

    clock: Clock
    fault_model: FaultModel | None


class CarrierHost(Protocol):
    """What a carrier asks of its own node's transport."""

    waker: Waker

    def make_ready(self, carrier: MemoryCarrier) -> None:
        """Any thread: the driving thread shall look at this carrier."""

    def hold(self, carrier: MemoryCarrier, due: float) -> None:
        """Driving thread: look at this carrier again at `due`."""

    def forget(self, carrier: MemoryCarrier) -> None:
        """Any thread: the carrier has ended."""

    def is_driven_elsewhere(self, carrier: MemoryCarrier) -> bool:
        """Whether another thread may be inside a sink of this carrier, and this one may wait for it."""
        ...


class MemoryCarrier(Carrier):
    """See the module's law."""

    scheme = "memory"
    _sink: Sink
    """Written by attach(), and looked up at every call: a sink may hand over to another."""

    def __init__(
        self,
        home: CarrierHost,
        network: CarrierNetwork,
        peer: Peer,
        way: Direction,
        *,
        out: Pipe,
        inbound: Pipe,
        dialed: bool,
    ) -> None:
        self.peer = peer
        self.dialed = dialed
        self._home = home
        self._network = network
        self._way = way  # of what comes in
        self._out = out
        self._in = inbound
        self._twin: MemoryCarrier = self  # written once, by join()
        self._attached = False  # written by attach(), after the sink
        self._decode: Decode = decode if peer.verified else decode_unverified  # any thread, by admit()
        self._error: CarrierLost | None = None  # why it ended; written once, under the lock of _out
        self._scheduled = False  # on the list of its node; set by senders, cleared by the driving thread
        self._left = threading.Event()  # set by the driving thread whenever it leaves a carrier that has ended

    def join(self, twin: MemoryCarrier) -> None:
        """Name the other end, before anybody else knows the two."""
        self._twin, twin._twin = twin, self

    def attach(self, sink: Sink) -> None:
        self._sink = sink
        self._attached = True
        self.schedule()

    def admit(self) -> None:
        self._decode = decode

    # -- sending -----------------------------------------------------------------------------------------------

    def send_frame(self, lane: Lane, communicator: int, header: bytes, *body: Buffer) -> None:
        # A lane keeps all its communicators in one order, which is more than was promised.
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
            if transfer in self._out.departures:
                raise ValueError(f"payload {transfer} is being sent already")
            if not self._out.unread:
                self._out.departures[transfer] = OutgoingTransfer(data, due)
        self._twin.schedule()

    def withdraw_payload(self, transfer: int) -> None:
        self._check()
        self._out.withdraw(transfer)
        self._twin.schedule()  # a half-close may have waited behind it

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
        return network.clock.now() + fault_model.delay(Direction(self._way.destination, self._way.source))

    def _check(self) -> None:
        error = self._error
        if (
            error is not None
        ):  # a new object each time: one that is raised twice would carry the first one's frames along
            raise CarrierLost(error.kind, error.reason)

    def _check_sending(self) -> None:
        self._check()
        if self._out.finished:
            raise CarrierLost("closed", "this side has finished")

    # -- receiving ---------------------------------------------------------------------------------------------

    def expect_payload(self, transfer: int, into: memoryview) -> None:
        if into.readonly:
            raise ValueError(f"payload {transfer} cannot land in memory that is read-only")
        with self._in.lock:  # which the end takes too, after it has said why: nothing gets in behind it
            self._check()
            self._in.expect(transfer, into)

    def redirect_payload(self, transfer: int, into: memoryview | None) -> Redirected:
        with self._in.lock:
            self._check()
            return self._in.redirect(transfer, into)

    # -- being driven ------------------------------------------------------------------------------------------

    def schedule(self) -> None:
        """Any thread: there is, or may be, something for this carrier's driving thread. Twice does no harm."""
        if not self._scheduled:
            self._scheduled = True
            self._home.make_ready(self)

    def drive(self) -> None:
        """Driving thread only: take in what is there, frames first, then one chunk."""
        self._scheduled = False  # before looking: what is sent from now on schedules again
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

    def left(self) -> None:
        """The driving thread is out of this carrier."""
        if self._error is not None:
            self._left.set()

    def _take_frames(self) -> bool:
        """False: the carrier has ended."""
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
            self._twin._home.waker.wake()
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
            raise PipeBroken("misbehaved", f"a frame of kind {frame.kind} where none belongs")
        self._sink.frame_arrived(self, frame, memoryview(body))

    def _take_payload_or_ending(self, limit: int) -> None:
        pipe = self._in
        if pipe.departures:
            if self._decode is not decode:
                raise PipeBroken("misbehaved", "a payload from a peer that has not proven who it is")
            transfer = pipe.copy_chunk(limit)
            if transfer is not None and self._error is None:
                self._sink.payload_arrived(self, transfer)
        elif pipe.endings and not pipe.waiting():
            self._take_ending(pipe.endings.popleft())
        if pipe.departures or pipe.endings:
            self.schedule()

    def _take_ending(self, ending: PipeEnd) -> None:
        if ending.reason is not None:
            raise PipeBroken("peer", ending.reason)
        self._sink.carrier_finished(self)
        self._in.drained = True  # each side says so first and looks at the other then: one of them sees both
        if self._out.drained:
            self._close(CarrierLost("closed", _BOTH_FINISHED))
            self._twin._close(CarrierLost("closed", _BOTH_FINISHED))

    # -- weather -----------------------------------------------------------------------------------------------

    def _drive_in(self, fault_model: FaultModel) -> None:
        while self._error is None:
            verdict = fault_model.judge(self._way, self._in.taken_frames, self._in.payload_bytes)
            if verdict is DeliveryFault.CUT:
                raise PipeBroken("peer", "the connection was cut")
            if verdict is DeliveryFault.HOLD:
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
            self._home.hold(self, due)

    # -- the end -----------------------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        if self._close(CarrierLost("closed", reason)):
            self._tell_twin(reason)
        while self._home.is_driven_elsewhere(self):
            self._left.wait()

    def fail(self, error: CarrierLost) -> None:
        """Driving thread: it is lost."""
        if self._close(error):
            self._tell_twin(error.reason)
            if self._attached:
                self._sink.carrier_lost(self, CarrierLost(error.kind, error.reason))

    def _close(self, error: CarrierLost) -> bool:
        """End this side: none of its memory is touched afterwards. False if it had ended before."""
        with self._out.lock:
            if self._error is not None:
                return False
            self._error = error
            self._out.stop_sending()
        self._in.stop_receiving()
        self._home.forget(self)
        return True

    def _tell_twin(self, reason: str) -> None:
        due = self._due()
        with self._out.lock:
            self._out.endings.append(PipeEnd(reason, due))
        self._twin.schedule()

    def abandon(self) -> None:
        """In a forked child, where a lock may be held by a thread that is not there: end without touching anything."""
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
