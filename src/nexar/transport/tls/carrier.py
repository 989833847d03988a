"""A TLS carrier: a control connection (lanes CONTROL and RPC) and a data connection (other lanes, payloads).

The driver holds `_delivering` while it may call the sink. Only `abort` waits for it, so no sink call follows an abort.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import RLock
from typing import Final

from nexar.transport.base import SILENT_SINK, Buffer, Carrier, CarrierLost, Peer, Redirected, Sink
from nexar.transport.payload_table import PayloadTable
from nexar.transport.tls.connection import CarrierEnd, TlsConnection, TlsReceiver, carrier_lost_of
from nexar.transport.tls.sockets import READABLE, WRITABLE, Selector
from nexar.wire.frame import Lane, decode, encode_finish

_LAST_CONTROL_LANE: Final = int(Lane.RPC)
_FINISH: Final = encode_finish(0)  # TCP loses nothing, so there is nothing to count


class TlsCarrier(Carrier):
    """The two connections to one peer."""

    def __init__(
        self,
        peer: Peer,
        control: TlsConnection,
        data: TlsConnection,
        selector: Selector,
        *,
        scheme: str,
        dialed: bool,
        forget: Callable[[TlsCarrier], None],
    ) -> None:
        """Takes ownership of both connections."""
        self.scheme = scheme
        self.peer = peer
        self.dialed = dialed
        self._selector = selector
        self._forget = forget
        self._control = control
        self._data = data
        self._inbox = PayloadTable()  # guarded by the data connection's lock
        self._ending = CarrierEnd()
        self._receivers = (TlsReceiver(control, self._ending), TlsReceiver(data, self._ending, self._inbox))
        self._sink: Sink | None = None  # written by attach, like those of the receivers
        self._finish_reported = False  # written by the driver
        self._delivering = RLock()

    # --- methods for any thread

    def attach(self, sink: Sink) -> None:
        first, self._sink = self._sink is None, sink
        for receiver in self._receivers:
            receiver.sink = sink
        if first:
            self._begin()

    def _begin(self) -> None:
        for receiver in self._receivers:
            receiver.connection.watch(partial(self._ready, receiver))
            self._look_again(receiver)
        if self._ending.is_broken:
            self._selector.call_soon(self._receive_rest_and_end)

    def admit(self) -> None:
        self._control.reader.decode = self._data.reader.decode = decode

    def send_frame(self, lane: Lane, communicator: int, header: bytes, *body: Buffer) -> None:
        try:
            self._connection(lane).send(lane, b"".join((header, *body)) if body else header)
        except OSError as error:
            raise self._refusal(error) from error

    def queued_bytes(self, lane: Lane) -> int:
        connection = self._connection(lane)
        with connection.lock:
            self._check()
            return connection.send_queue.queued_bytes(lane)

    def expect_payload(self, transfer: int, into: memoryview) -> None:
        """Raises ValueError for unusable memory or a number in use."""
        with self._data.lock:  # the inbox is cleared under this lock after the end is recorded
            self._check()
            self._inbox.expect(transfer, into.cast("B"))

    def redirect_payload(self, transfer: int, into: memoryview | None) -> Redirected:
        with self._data.lock:
            self._check()
            return self._inbox.redirect(transfer, None if into is None else into.cast("B"))

    def send_payload(self, transfer: int, data: memoryview) -> None:
        try:
            self._data.send_payload(transfer, data.cast("B"))
        except OSError as error:
            raise self._refusal(error) from error

    def withdraw_payload(self, transfer: int) -> None:
        with self._data.lock:
            self._check()
            self._data.send_queue.withdraw(transfer)

    def finish(self) -> None:
        self._check()
        try:
            self._control.finish(_FINISH)
            self._data.finish(_FINISH)
        except OSError as error:
            raise self._refusal(error) from error
        self._selector.call_soon(self._settle)

    def abort(self, reason: str) -> None:
        self._close(self._ending.lose_silently(CarrierLost("closed", reason)))
        with self._delivering:
            self._drop_sink()

    def stats(self) -> dict[str, float]:
        both = (self._control, self._data)
        return {
            "bytes_sent": sum(connection.bytes_sent for connection in both),
            "bytes_received": sum(connection.bytes_received for connection in both),
            "frames_sent": sum(connection.frames_sent for connection in both),
            "frames_received": sum(receiver.frames_received for receiver in self._receivers),
        }

    def abandon(self) -> None:
        self._control.abandon()
        self._data.abandon()

    def _connection(self, lane: int) -> TlsConnection:
        return self._control if lane <= _LAST_CONTROL_LANE else self._data

    def _check(self) -> None:
        """Raise the carrier's error, not that of a single connection."""
        lost = self._ending.lost
        if lost is not None:  # a new object each time: a second raise would extend the first traceback
            raise CarrierLost(lost.kind, lost.reason)

    def _refusal(self, error: OSError) -> CarrierLost:
        if isinstance(error, CarrierLost):
            lost = self._ending.lost or error
            return CarrierLost(lost.kind, lost.reason)
        return self._break_off(error)

    def _break_off(self, error: OSError) -> CarrierLost:
        why, is_new = self._ending.break_off(carrier_lost_of(error))
        if is_new and self._sink is not None:
            self._selector.call_soon(self._receive_rest_and_end)
        return why

    # --- driver

    def _ready(self, receiver: TlsReceiver, events: int) -> bool:
        with self._delivering:
            try:
                return self._exchange(receiver, events)
            except BaseException as error:
                self.fail(CarrierLost("fault", f"its sink raised {error!r}"))
                raise

    def _exchange(self, receiver: TlsReceiver, events: int) -> bool:
        happened = bool(events & WRITABLE)
        if happened:
            self._pump(receiver.connection)
        if events & ~WRITABLE:
            happened |= receiver.receive(self)
            self._look_again(receiver)
        if receiver.peer_finished or self._ending.lost is not None:
            happened |= self._settle()
        return happened

    def fail(self, why: CarrierLost) -> None:
        """Driver only."""
        self._ending.lose(why)
        self._settle()

    def _look_again(self, receiver: TlsReceiver) -> None:
        if receiver.holds_input:
            self._selector.call_soon(partial(self._ready, receiver, READABLE))

    def _pump(self, connection: TlsConnection) -> None:
        try:
            connection.pump()
        except OSError as error:
            self._break_off(error)

    def _receive_rest_and_end(self) -> bool:
        with self._delivering:
            try:
                self._receive_rest()
                return self._settle()
            except BaseException as error:
                self.fail(CarrierLost("fault", f"its sink raised {error!r}"))
                raise

    def _receive_rest(self) -> None:
        for receiver in self._receivers:
            while receiver.receive(self):
                continue
        self._ending.lose()

    def _settle(self) -> bool:
        with self._delivering:
            if self._ending.lost is None and all(receiver.peer_finished for receiver in self._receivers):
                self._close_if_both_finished()
            why = self._ending.take_report()
            if why is None:
                return False
            self._close(why)
            if self._sink is not None:
                self._sink.carrier_lost(self, why)
            self._drop_sink()
            return True

    def _close_if_both_finished(self) -> None:
        # A payload that is incomplete now was withdrawn: it is dropped with the carrier and not reported.
        if not self._finish_reported and self._sink is not None:
            self._finish_reported = True
            self._report_finished(self._sink)
        if self._control.close_notice_sent and self._data.close_notice_sent:
            self._close(self._ending.lose_silently(CarrierLost("closed", "both sides have finished")))
            self._drop_sink()

    def _report_finished(self, sink: Sink) -> None:
        try:
            sink.carrier_finished(self)
        except BaseException as error:
            self.fail(CarrierLost("fault", f"its sink raised {error!r}"))
            raise

    def _drop_sink(self) -> None:
        """The caller holds `_delivering`, so no sink call runs except its own."""
        if self._sink is not None:
            self.attach(SILENT_SINK)

    def _close(self, why: CarrierLost) -> None:
        self._control.close(why)
        self._data.close(why)
        with self._data.lock:
            self._inbox.clear()
        self._forget(self)
