"""A carrier is one QUIC connection: an outbound half, an inbound half, and how the whole ends.

Law of the end: `_error` is set once, under `_lock`, by whoever is first; every verb raises it from then on. Whether it
was abort(), a peer that misbehaved or the network, the connection is closed and its `post_closed` operation finishes:
its handler, in the driving thread, is the only place that calls carrier_lost. An abort has silenced the sink before.

The polite end: each side that has finished *and* received everything the other announced sends a farewell. Who has the
other's farewell knows that nothing of its own is on the way any more, closes, and by that tells the other. That the
transport acknowledged it all would not do: bytes acknowledged, but not read yet, are lost when the connection closes.
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
    ended_politely,
    finished_already,
    is_forked,
    retryable,
    shorten,
    to_carrier_lost,
)
from nexar.transport.quic.receive_streams import ReceiveStreams
from nexar.transport.quic.send_streams import SendStreams
from nexar.wire.frame import Lane

_Given = ParamSpec("_Given")


def _weakly(method: Callable[_Given, None]) -> Callable[_Given, None]:
    """A function that calls `method` and does not keep its owner alive. Without effect once the owner is gone."""
    reference = WeakMethod(method)

    def call(*given: _Given.args, **named: _Given.kwargs) -> None:
        found = reference()
        if found is not None:
            found(*given, **named)

    return call


class QuicCarrier(Carrier):
    """See Carrier."""

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
        self._writers = self._outbound.writers  # only looked up here
        self._frames_sent = 0  # any thread
        self._farewell_sent = False  # the driving thread's
        self._lock = Lock()
        self._error: CarrierLost | None = None  # set once, under _lock

    def attach(self, sink: Sink) -> None:
        """See Carrier."""
        if not self._inbound.deliver_to(sink):
            return
        try:
            self._connection.post_closed(self._driver.completions, token=self.closed)
            self._inbound.start()
        except (quic.QuicError, quic.ForkedError) as error:
            raise self._refusal(error) from error

    def admit(self) -> None:
        """See Carrier."""
        self._inbound.admit()
        try:
            self._connection.lift_limits()
        except (quic.QuicError, quic.ForkedError):
            return  # it has ended, which its sink is told

    # ---------------------------------------------------------------- sending

    def send_frame(self, lane: Lane, communicator: int, header: bytes, *body: Buffer) -> None:
        """See Carrier."""
        try:
            write = self._writers.get((lane, communicator)) or self._outbound.bind(lane, communicator)
            write(header, *body)
        except (quic.QuicError, quic.ForkedError) as error:
            raise self._refusal(error) from error
        self._frames_sent += 1

    def queued_bytes(self, lane: Lane) -> int:
        """See Carrier."""
        self._check()
        try:
            return self._outbound.queued_bytes(lane)
        except (quic.QuicError, quic.ForkedError) as error:
            raise self._refusal(error) from error

    def send_payload(self, transfer: int, data: memoryview) -> None:
        """See Carrier."""
        try:
            self._outbound.send_payload(transfer, data)
        except (quic.QuicError, quic.ForkedError) as error:
            raise self._refusal(error) from error

    def withdraw_payload(self, transfer: int) -> None:
        """See Carrier."""
        self._check()
        try:
            self._outbound.withdraw_payload(transfer)
        except quic.ForkedError as error:
            raise self._refusal(error) from error

    # ---------------------------------------------------------------- receiving

    def expect_payload(self, transfer: int, into: memoryview) -> None:
        """See Carrier."""
        if into.readonly:
            raise ValueError(f"payload {transfer} cannot land in memory that is read-only")
        self._inbound.payloads.expect(transfer, into)

    def redirect_payload(self, transfer: int, into: memoryview | None) -> Redirected:
        """See Carrier."""
        try:
            return self._inbound.payloads.redirect(transfer, into)
        except quic.ForkedError as error:
            raise self._refusal(error) from error

    # ---------------------------------------------------------------- ending

    def finish(self) -> None:
        """See Carrier."""
        self._check()
        if self._outbound.finishing:
            return
        try:
            self._outbound.finish()
        except (quic.QuicError, quic.ForkedError) as error:
            raise self._refusal(error) from error
        self._driver.defer(self._settle)

    def abandon(self) -> None:
        """In a forked child: no native call, and no lock that a thread of the parent may have held."""
        self._lock = Lock()
        self._error = is_forked()
        self._inbound.sink = SILENT_SINK
        self._inbound.payloads.abandon()
        self._outbound.abandon(self._error)

    def abort(self, reason: str) -> None:
        """See Carrier."""
        self._end(CarrierLost("closed", reason), CloseCode.ABORTED)
        self._inbound.silence()

    def fail(self, error: CarrierLost) -> None:
        """End it because of `error`; the sink hears of it in its turn. Callable from any thread."""
        self._end(error, close_code(error))

    def stats(self) -> dict[str, float]:
        """See Carrier."""
        counters: dict[str, float] = {
            "frames_sent": self._frames_sent,
            "frames_received": self._inbound.frames_received,
            "unexpected_payloads": self._inbound.payloads.unexpected,
        }
        return self._connection.stats() | counters

    def closed(self, operation: quic.Operation) -> None:
        """The connection is gone."""
        try:
            operation.result()
        except (quic.QuicError, quic.ForkedError) as error:
            lost = self._set_error(ended_politely() if self._both_finished else to_carrier_lost(error))
        else:
            lost = self._set_error(CarrierLost("fault", "the connection ended without a reason"))
        self._release(lost)
        self._driver.defer(self._report)  # behind the reads that got what had arrived before the end

    def _report(self) -> None:
        try:
            if not self._both_finished:
                self._inbound.tell(self._tell_loss)
        finally:
            self._inbound.sink = SILENT_SINK

    def _tell_loss(self, sink: Sink) -> None:
        if self._error is not None:
            sink.carrier_lost(self, self._error)

    def interrupted(self, error: BaseException) -> None:
        """See Handler."""
        self.fail(CarrierLost("fault", f"the end was interrupted: {error!r}"))

    def farewell_opened(self, operation: quic.Operation) -> None:
        """There is a stream for our farewell."""
        try:
            stream = operation.result()
            stream.write(encode_preamble(StreamType.FAREWELL))
            stream.finish()
        except (quic.ConnectionLost, quic.StreamError):
            return  # the peer, who has everything, was faster and closed

    @property
    def _both_finished(self) -> bool:
        return self._inbound.finished and self._outbound.finished

    def _settle(self) -> None:
        """In the driving thread, whenever a condition of the polite end may have become true."""
        if self._error is not None or not self._both_finished:
            return
        if self._inbound.farewell:
            self._inbound.sink = SILENT_SINK
            self._end(ended_politely(), CloseCode.DONE)
            self._forget(self)
        elif not self._farewell_sent:
            self._farewell_sent = True
            self._say_farewell()

    def _say_farewell(self) -> None:
        try:
            self._connection.post_open_uni(self._driver.completions, token=self.farewell_opened)
        except quic.QuicError as error:
            self._set_error(to_carrier_lost(error))

    def _end(self, error: CarrierLost, code: CloseCode) -> None:
        lost = self._set_error(error)
        try:
            self._connection.close(code, shorten(lost.reason))
            self._release(lost)  # afterwards: streams let go before would be reset, and the peer see that first
        except quic.ForkedError:
            return  # the connection is the parent's, and it goes on there

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
        """What a verb raises instead of `error`."""
        if isinstance(error, quic.StreamError):
            return self._stream_refusal(error)
        return retryable(self._set_error(to_carrier_lost(error)))

    def _stream_refusal(self, error: quic.StreamError) -> CarrierLost:
        if self._error is not None:
            return retryable(self._error)
        if error.kind == "closed":
            return finished_already()  # another thread called finish() after we had looked up the writer
        lost = CarrierLost("misbehaved", f"the peer does not read an ordered stream: {error}")
        self.fail(lost)
        return lost

    def _check(self) -> None:
        if self._error is not None:
            raise retryable(self._error)
