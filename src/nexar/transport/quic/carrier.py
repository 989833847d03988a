"""A carrier over one QUIC connection.

End: `_error` is set once, under `_lock`; every method then raises it. The connection is closed, and the handler of its
`post_closed` operation, in the driver, is the only caller of carrier_lost. Abort removes the sink first.

Orderly end: a side that has finished and received everything sends ALL_RECEIVED; its peer then closes. Acknowledgements
are not enough: closing a connection loses acknowledged but unread bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import ParamSpec
from weakref import WeakMethod

from nexar.native import quic
from nexar.transport.base import SILENT_SINK, Buffer, Carrier, CarrierLost, Peer, Redirected, Sink
from nexar.transport.quic.driver import CompletionDriver
from nexar.transport.quic.protocol import (
    CloseCode,
    StreamType,
    close_code,
    encode_preamble,
    finished_error,
    forked_error,
    fresh_copy,
    orderly_end,
    shorten,
    to_carrier_lost,
)
from nexar.transport.quic.receive_streams import ReceiveStreams
from nexar.transport.quic.send_streams import SendStreams
from nexar.wire.frame import Lane

_Given = ParamSpec("_Given")


def _weakly(method: Callable[_Given, None]) -> Callable[_Given, None]:
    """Return `method` without a strong reference to its owner."""
    reference = WeakMethod(method)

    def call(*given: _Given.args, **named: _Given.kwargs) -> None:
        found = reference()
        if found is not None:
            found(*given, **named)

    return call


class QuicCarrier(Carrier):
    """One QUIC connection to a peer."""

    scheme = "quic"

    def __init__(
        self, connection: quic.Connection, peer: Peer, driver: CompletionDriver, forget: Callable[[QuicCarrier], None]
    ) -> None:
        self.peer = peer
        self.dialed = connection.dialed
        self._connection = connection
        self._driver = driver
        self._forget = forget
        fail = _weakly(self.fail)
        self._inbound = ReceiveStreams(
            self, connection, driver, fail=fail, settle=_weakly(self._settle), check=_weakly(self._check)
        )
        self._outbound = SendStreams(connection, driver.completions, fail)
        self._writers = self._outbound.writers  # read only
        self._frames_sent = 0  # any thread
        self._all_received_sent = False  # driver only
        self._lock = Lock()
        self._error: CarrierLost | None = None  # set once, under _lock

    def attach(self, sink: Sink) -> None:
        if not self._inbound.deliver_to(sink):
            return
        try:
            self._connection.post_closed(self._driver.completions, token=self.closed)
            self._inbound.start()
        except (quic.QuicError, quic.ForkedError) as error:
            raise self._refusal(error) from error

    def admit(self) -> None:
        self._inbound.admit()
        try:
            self._connection.lift_limits()
        except (quic.QuicError, quic.ForkedError):
            return  # it has ended; its sink is notified

    # ---------------------------------------------------------------- sending

    def send_frame(self, lane: Lane, communicator: int, header: bytes, *body: Buffer) -> None:
        try:
            write = self._writers.get((lane, communicator)) or self._outbound.bind(lane, communicator)
            write(header, *body)
        except (quic.QuicError, quic.ForkedError) as error:
            raise self._refusal(error) from error
        self._frames_sent += 1

    def queued_bytes(self, lane: Lane) -> int:
        self._check()
        try:
            return self._outbound.queued_bytes(lane)
        except (quic.QuicError, quic.ForkedError) as error:
            raise self._refusal(error) from error

    def send_payload(self, transfer: int, data: memoryview) -> None:
        try:
            self._outbound.send_payload(transfer, data)
        except (quic.QuicError, quic.ForkedError) as error:
            raise self._refusal(error) from error

    def withdraw_payload(self, transfer: int) -> None:
        self._check()
        try:
            self._outbound.withdraw_payload(transfer)
        except quic.ForkedError as error:
            raise self._refusal(error) from error

    # ---------------------------------------------------------------- receiving

    def expect_payload(self, transfer: int, into: memoryview) -> None:
        if into.readonly:
            raise ValueError(f"payload {transfer} cannot be received into read-only memory")
        self._inbound.payloads.expect(transfer, into)

    def redirect_payload(self, transfer: int, into: memoryview | None) -> Redirected:
        try:
            return self._inbound.payloads.redirect(transfer, into)
        except quic.ForkedError as error:
            raise self._refusal(error) from error

    # ---------------------------------------------------------------- ending

    def finish(self) -> None:
        self._check()
        if self._outbound.finishing:
            return
        try:
            self._outbound.finish()
        except (quic.QuicError, quic.ForkedError) as error:
            raise self._refusal(error) from error
        self._driver.defer(self._settle)

    def abandon(self) -> None:
        self._lock = Lock()
        self._error = forked_error()
        self._inbound.sink = SILENT_SINK
        self._inbound.payloads.abandon()
        self._outbound.abandon(self._error)

    def abort(self, reason: str) -> None:
        self._end(CarrierLost("closed", reason), CloseCode.ABORTED)
        self._inbound.silence()

    def fail(self, error: CarrierLost) -> None:
        """End the carrier; the driver notifies the sink later. Any thread."""
        self._end(error, close_code(error))

    def stats(self) -> dict[str, float]:
        counters: dict[str, float] = {
            "frames_sent": self._frames_sent,
            "frames_received": self._inbound.frames_received,
            "unexpected_payloads": self._inbound.payloads.unexpected,
        }
        return self._connection.stats() | counters

    def closed(self, operation: quic.Operation) -> None:
        try:
            operation.result()
        except (quic.QuicError, quic.ForkedError) as error:
            lost = self._set_error(orderly_end() if self._both_finished else to_carrier_lost(error))
        else:
            lost = self._set_error(CarrierLost("fault", "the connection ended without a reason"))
        self._release(lost)
        self._driver.defer(self._report)  # after the reads that completed before the end

    def _report(self) -> None:
        try:
            if not self._both_finished:
                self._inbound.call_sink(self._report_loss)
        finally:
            self._inbound.sink = SILENT_SINK

    def _report_loss(self, sink: Sink) -> None:
        if self._error is not None:
            sink.carrier_lost(self, self._error)

    def interrupted(self, error: BaseException) -> None:
        self.fail(CarrierLost("fault", f"the end was interrupted: {error!r}"))

    def all_received_opened(self, operation: quic.Operation) -> None:
        try:
            stream = operation.result()
            stream.write(encode_preamble(StreamType.ALL_RECEIVED))
            stream.finish()
        except (quic.ConnectionLost, quic.StreamError):
            return  # the peer has everything and closed first

    @property
    def _both_finished(self) -> bool:
        return self._inbound.finished and self._outbound.finished

    def _settle(self) -> None:
        """Continue the orderly end if possible. Driver only."""
        if self._error is not None or not self._both_finished:
            return
        if self._inbound.peer_has_all:
            self._inbound.sink = SILENT_SINK
            self._end(orderly_end(), CloseCode.DONE)
            self._forget(self)
        elif not self._all_received_sent:
            self._all_received_sent = True
            self._send_all_received()

    def _send_all_received(self) -> None:
        try:
            self._connection.post_open_uni(self._driver.completions, token=self.all_received_opened)
        except quic.QuicError as error:
            self._set_error(to_carrier_lost(error))

    def _end(self, error: CarrierLost, code: CloseCode) -> None:
        lost = self._set_error(error)
        try:
            self._connection.close(code, shorten(lost.reason))
            # after closing: streams released earlier would be reset, and the peer would see that first
            self._release(lost)
        except quic.ForkedError:
            return  # the connection belongs to the parent and continues there

    def _release(self, error: CarrierLost) -> None:
        self._outbound.end(error)
        self._inbound.payloads.clear()
        self._forget(self)

    def _set_error(self, error: CarrierLost) -> CarrierLost:
        with self._lock:
            if self._error is None:
                self._error = error
            return self._error

    def _refusal(self, error: quic.QuicError | quic.ForkedError) -> CarrierLost:
        if isinstance(error, quic.StreamError):
            return self._stream_refusal(error)
        return fresh_copy(self._set_error(to_carrier_lost(error)))

    def _stream_refusal(self, error: quic.StreamError) -> CarrierLost:
        if self._error is not None:
            return fresh_copy(self._error)
        if error.kind == "closed":
            return finished_error()  # another thread called finish() after the writer was looked up
        lost = CarrierLost("misbehaved", f"the peer does not read an ordered stream: {error}")
        self.fail(lost)
        return lost

    def _check(self) -> None:
        if self._error is not None:
            raise fresh_copy(self._error)
