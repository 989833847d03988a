"""A carrier: the control and the data connection to one peer.

Lanes CONTROL and RPC travel on the control connection, everything else, and the payloads, on the data connection.

How it ends. `_lost` is set once, under `_state`, by whoever notices; the driving thread then tells the sink, unless
this side aborted. A thread whose *send* fails leaves `_broken` instead: the peer may have sent something before it
went, so the driving thread first takes in what has arrived. While the driving thread may call the sink of this carrier
it holds `_delivering`, which nobody else ever waits for but an abort: so an abort knows that no call follows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Lock, RLock
from typing import ClassVar, Final

from nexar.transport.base import Buffer, Carrier, CarrierLost, Peer, Sink
from nexar.transport.tls.connection import Connection, as_loss
from nexar.transport.tls.inbox import Inbox
from nexar.transport.tls.reactor import READABLE, WRITABLE, Reactor
from nexar.wire.codec import encode_finish
from nexar.wire.frame import HEADER_BYTES, Frame, FrameError, Kind, Lane

RECEIVE_BUDGET_BYTES: Final = 1 << 20
"""Taken in per turn and connection, so that the driving thread gets round to the other peers."""
_ALL: Final = RECEIVE_BUDGET_BYTES
_CHUNK, _FINISH = int(Kind.CHUNK), int(Kind.FINISH)
_OURS: Final = frozenset({_CHUNK, _FINISH, int(Kind.HELLO)})
_LAST_CONTROL_LANE: Final = int(Lane.RPC)


class TlsCarrier(Carrier):
    """See Carrier, and the module."""

    scheme: ClassVar[str] = "tls"

    def __init__(
        self,
        peer: Peer,
        control: Connection,
        data: Connection,
        reactor: Reactor,
        *,
        dialed: bool,
        forget: Callable[[TlsCarrier], None],
    ) -> None:
        """Takes both connections over. `forget` is called once, when they are closed."""
        self.peer = peer
        self.dialed = dialed
        self._reactor = reactor
        self._forget = forget
        self._control = control
        self._data = data
        self._inbox = Inbox()  # used under the data connection's lock
        self._sink: Sink | None = None  # written once, by attach
        self._frames_received = 0  # written by the driving thread
        self._header_next = False  # written by the driving thread: a chunk has just ended, a header follows
        self._finish_told = False  # written by the driving thread
        self._state = Lock()
        self._lost: CarrierLost | None = None  # written under _state, once
        self._broken: CarrierLost | None = None  # written under _state, once
        self._told = False  # written under _state: the sink knows, or is not to be told
        self._delivering = RLock()

    # --- the verbs, for any thread

    def attach(self, sink: Sink) -> None:
        """See Carrier.attach."""
        self._sink = sink
        for connection in (self._control, self._data):
            connection.watch(partial(self._ready, connection))
            if connection.holds_input:
                self._reactor.again(partial(self._ready, connection, READABLE))
        if self._broken is not None:
            self._reactor.again(self._wind_up)

    def send_frame(self, lane: Lane, communicator: int, header: bytes, *body: Buffer) -> None:
        """See Carrier.send_frame."""
        try:
            self._connection(lane).send(lane, b"".join((header, *body)) if body else header)
        except CarrierLost:
            raise
        except OSError as error:
            raise self._break(error) from error

    def queued_bytes(self, lane: Lane) -> int:
        """See Carrier.queued_bytes."""
        connection = self._connection(lane)
        with connection.lock:
            return connection.outbox.queued_bytes(lane)

    def expect_payload(self, transfer: int, into: memoryview) -> None:
        """See Carrier.expect_payload."""
        with self._data.lock:
            if self._data.ended is not None:
                raise self._data.ended.with_traceback(None)
            self._inbox.expect(transfer, into.cast("B"))

    def redirect_payload(self, transfer: int, into: memoryview | None) -> bool:
        """See Carrier.redirect_payload."""
        with self._data.lock:
            return self._inbox.redirect(transfer, None if into is None else into.cast("B"))

    def send_payload(self, transfer: int, data: memoryview) -> None:
        """See Carrier.send_payload."""
        try:
            self._data.send_payload(transfer, data.cast("B"))
        except CarrierLost:
            raise
        except OSError as error:
            raise self._break(error) from error

    def withdraw_payload(self, transfer: int) -> None:
        """See Carrier.withdraw_payload."""
        with self._data.lock:
            self._data.outbox.withdraw(transfer)

    def finish(self) -> None:
        """See Carrier.finish."""
        try:
            self._control.finish(encode_finish(0))
            self._data.finish(encode_finish(0))
        except OSError as error:
            self._break(error)
        self._reactor.again(self._settle)

    def abort(self, reason: str) -> None:
        """See Carrier.abort."""
        with self._state:
            self._told = True
        self._close(self._lose(CarrierLost("closed", reason)))
        with self._delivering:
            return

    def stats(self) -> dict[str, float]:
        """See Carrier.stats."""
        both = (self._control, self._data)
        return {
            "bytes_sent": sum(connection.bytes_sent for connection in both),
            "bytes_received": sum(connection.bytes_received for connection in both),
            "frames_sent": sum(connection.frames_sent for connection in both),
            "frames_received": self._frames_received,
        }

    def abandon(self) -> None:
        """In a forked child: close the descriptors."""
        self._control.abandon()
        self._data.abandon()

    def _connection(self, lane: int) -> Connection:
        return self._control if lane <= _LAST_CONTROL_LANE else self._data

    # --- the driving thread

    def _ready(self, connection: Connection, events: int) -> bool:
        with self._delivering:
            if self._lost is not None:
                return self._tell()
            if events & WRITABLE:
                self._pump(connection)
            happened = bool(events & WRITABLE)
            if events & ~WRITABLE:
                happened |= self._receive(connection)
            if connection.peer_finished or self._lost is not None:
                self._settle()
            return happened

    def _pump(self, connection: Connection) -> None:
        try:
            connection.pump()
        except OSError as error:
            self._break(error)

    def _receive(self, connection: Connection) -> bool:
        """Take in what has come and tell the sink, within the budget."""
        received = 0
        self._dispatch(connection)  # what came along with the handshake, or was left by the budget
        while self._lost is None and received < RECEIVE_BUDGET_BYTES:
            count = self._take(connection)
            received += count
            if not count or (connection.channel.exhausted and not connection.channel.buffered):
                break
        else:
            if self._lost is None and connection.holds_input:
                self._reactor.again(partial(self._ready, connection, READABLE))
        return received > 0

    def _take(self, connection: Connection) -> int:
        if connection is self._data and self._inbox.missing:
            count, complete = self._read_chunk()
            if complete is not None and self._sink is not None and self._lost is None:
                self._sink.payload_arrived(self, complete)
            return count
        count = self._fill(connection)
        self._dispatch(connection)
        return count

    def _fill(self, connection: Connection) -> int:
        # Behind a chunk another one is likely: its header is read alone, so that its body need not be copied.
        limit = HEADER_BYTES if self._header_next and connection is self._data else _ALL
        self._header_next = False
        try:
            return connection.fill(limit)
        except (EOFError, OSError) as error:
            return self._end_of_stream(connection, error)

    def _read_chunk(self) -> tuple[int, int | None]:
        """Read on into the payload's own memory, or into nowhere."""
        data, inbox = self._data, self._inbox
        try:
            with data.lock:
                if data.ended is not None:
                    return 0, None
                place = inbox.destination()
                if place is None:
                    place = data.reader.room()[: inbox.missing]  # the reader is empty: its memory is a fine nowhere
                count = data.channel.read_into(place)
                complete = inbox.took(count)
        except (EOFError, OSError) as error:
            return self._end_of_stream(data, error), None
        data.bytes_received += count
        self._header_next = not inbox.missing
        return count, complete

    def _end_of_stream(self, connection: Connection, error: EOFError | OSError) -> int:
        if isinstance(error, EOFError) and connection.peer_finished and connection.said_farewell:
            # The peer has all it wants and closed first. The other connection tells the same in a moment.
            connection.close(CarrierLost("closed", "both sides have finished"))
        else:
            self._lose(as_loss(error))
        return 0

    def _dispatch(self, connection: Connection) -> None:
        while self._lost is None and (found := self._next(connection)) is not None:
            frame, body = found
            if frame.kind in _OURS or connection.peer_finished:
                self._handle(connection, frame, body)
            elif self._sink is not None:
                self._frames_received += 1
                self._sink.frame_arrived(self, frame, body)

    def _next(self, connection: Connection) -> tuple[Frame, memoryview] | None:
        try:
            return connection.reader.next()
        except FrameError as error:
            self._lose(CarrierLost("misbehaved", str(error)))
            return None

    def _handle(self, connection: Connection, frame: Frame, body: memoryview) -> None:
        """Frames that are the carrier's own business."""
        if connection.peer_finished:
            self._lose(CarrierLost("misbehaved", f"a frame of kind {frame.kind} behind the last one"))
        elif frame.kind == _FINISH:
            connection.peer_finished = True
        elif frame.kind == _CHUNK and connection is self._data:
            self._begin_chunk(frame, body)
        else:
            self._lose(CarrierLost("misbehaved", f"a frame of kind {frame.kind} where none may come"))

    def _begin_chunk(self, frame: Frame, body: memoryview) -> None:
        try:
            with self._data.lock:
                complete = self._inbox.begin(frame, body)
        except CarrierLost as error:
            self._lose(error)
            return
        self._header_next = not self._inbox.missing
        if complete is not None and self._sink is not None:
            self._sink.payload_arrived(self, complete)

    # --- the end

    def _lose(self, why: CarrierLost) -> CarrierLost:
        """Note the end; whoever notes it first decides why."""
        with self._state:
            if self._lost is None:
                self._lost = self._broken or why
            return self._lost

    def _break(self, error: OSError) -> CarrierLost:
        """Note that nothing can be sent any more, and have the driving thread see to the rest."""
        with self._state:
            first = self._broken is None
            if self._broken is None:
                self._broken = self._lost or as_loss(error)
        if first and self._sink is not None:
            self._reactor.again(self._wind_up)
        return self._broken

    def _wind_up(self) -> bool:
        with self._delivering:
            for connection in (self._control, self._data):
                while self._receive(connection):
                    continue
            if self._broken is not None:
                self._lose(self._broken)
            return self._tell()

    def _settle(self) -> bool:
        """See whether it is over, politely or not."""
        with self._delivering:
            if self._lost is not None:
                return self._tell()
            if self._sink is None or not (self._control.peer_finished and self._data.peer_finished):
                return False
            if not self._finish_told:
                self._finish_told = True
                self._sink.carrier_finished(self)
            if self._control.said_farewell and self._data.said_farewell:
                with self._state:
                    self._told = True
                self._close(self._lose(CarrierLost("closed", "both sides have finished")))
            return True

    def _tell(self) -> bool:
        with self._state:
            told, self._told = self._told, True
            why = self._lost
        if told or why is None or self._sink is None:
            return False
        self._close(why)
        self._sink.carrier_lost(self, why)
        return True

    def _close(self, why: CarrierLost) -> None:
        self._control.close(why)
        self._data.close(why)
        with self._data.lock:
            self._inbox.clear()
        self._forget(self)
