"""The sending half of a QUIC carrier. Any thread; `_lock` guards everything except reading `writers`.

The first frame of a (lane, communicator) binds it to a stream: its own, up to MAX_ORDERED_STREAMS and the peer's limit;
beyond that a shared stream of its lane, or else the control stream, which is opened first. So frames never wait for a
stream. Payloads do: the peer's stream limit queues them.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Final, TypeAlias

from nexar.native import quic
from nexar.transport.base import CarrierLost
from nexar.transport.quic.protocol import StreamType, encode_preamble, finished_error, fresh_copy
from nexar.wire.frame import Lane, encode_finish

Write: TypeAlias = Callable[..., None]

MAX_ORDERED_STREAMS: Final = 1024
_TOP_PRIORITY: Final = 16  # of lane 0; one less for each further lane, 0 for payloads


class SendStreams:
    """The streams that this side opens."""

    def __init__(
        self, connection: quic.Connection, completions: quic.Completions, fail: Callable[[CarrierLost], None]
    ) -> None:
        # write methods by (lane, communicator); cleared when nothing more may be sent
        self.writers: dict[tuple[int, int], Write] = {}
        self.finishing = False  # finish() was called
        self.finished = False  # FINISH was sent
        self._connection = connection
        self._completions = completions
        self._fail = fail
        self._lock = Lock()
        self._refusal: CarrierLost | None = None  # why nothing more may be sent
        self._opened = 0  # streams of all types
        self._lanes: dict[
            int, list[quic.Stream]
        ] = {}  # ordered streams; those of CONTROL start with the control stream
        self._payloads: dict[int, OutgoingPayload] = {}  # borrowed memory
        self._waiting: dict[int, memoryview] = {}  # payloads without a stream, in order
        self._opening = False  # an open operation waits for the peer's stream limit

    def bind(self, lane: int, communicator: int) -> Write:
        """Return the write method of a stream. Raises CarrierLost after finish() or the end."""
        with self._lock:
            self._check()
            stream = self._choose(lane, communicator)
            return self.writers.setdefault((lane, communicator), stream.write)

    def queued_bytes(self, lane: int) -> int:
        with self._lock:
            streams = tuple(self._lanes.get(lane, ()))
        return sum(stream.queued_bytes for stream in streams)

    def send_payload(self, transfer: int, data: memoryview) -> None:
        with self._lock:
            self._check()
            self._control()  # payloads must not take its place
            stream = None if self._waiting else self._try_open()
            if stream is None:
                self._waiting[transfer] = data
                self._wait_for_stream()
            else:
                self._start(stream, transfer, data)

    def withdraw_payload(self, transfer: int) -> None:
        with self._lock:
            self._waiting.pop(transfer, None)
            payload = self._payloads.pop(transfer, None)
            if payload is not None:
                payload.withdraw()

    def finish(self) -> None:
        with self._lock:
            if self._refusal is None:
                self.finishing = True
                self._refusal = finished_error()
                self.writers.clear()
                self._finish_if_drained()

    def end(self, error: CarrierLost) -> None:
        """Release everything; later calls raise `error`."""
        with self._lock:
            self._refusal = error
            self.writers.clear()
            self._waiting.clear()
            for payload in self._payloads.values():
                payload.release()
            self._payloads.clear()
            self._lanes.clear()

    def abandon(self, error: CarrierLost) -> None:
        self._lock = Lock()
        self._refusal = error
        self.writers.clear()

    def stream_opened(self, operation: quic.Operation) -> None:
        with self._lock:
            self._opening = False
            try:
                self._use(operation.result())
                self._finish_if_drained()
            except quic.QuicError:
                return  # the connection is lost, which the carrier reports

    def handed_over(self, payload: OutgoingPayload) -> None:
        """The protocol has copied the memory, or the peer refuses the payload."""
        with self._lock:
            if self._payloads.get(payload.transfer) is payload:
                del self._payloads[payload.transfer]
            payload.release()

    def interrupted(self, error: BaseException) -> None:
        self._fail(CarrierLost("fault", f"sending was interrupted: {error!r}"))

    # ---------------------------------------------------------------- the caller holds the lock

    def _check(self) -> None:
        if self._refusal is not None:
            raise fresh_copy(self._refusal)

    def _choose(self, lane: int, communicator: int) -> quic.Stream:
        control = self._control()
        if (lane, communicator) == (Lane.CONTROL, 0):
            return control
        own = self._open_ordered(lane, communicator) if self._ordered_streams() < MAX_ORDERED_STREAMS else None
        if own is not None:
            return own
        shared = self._lanes.get(lane)
        return shared[communicator % len(shared)] if shared else control

    def _control(self) -> quic.Stream:
        streams = self._lanes.get(Lane.CONTROL)
        stream = streams[0] if streams else self._open_ordered(Lane.CONTROL, 0)
        if stream is None:
            raise CarrierLost("misbehaved", "the peer allows no streams")
        return stream

    def _ordered_streams(self) -> int:
        return sum(map(len, self._lanes.values()))

    def _open_ordered(self, lane: int, communicator: int) -> quic.Stream | None:
        stream = self._try_open()
        if stream is not None:
            stream.priority = _TOP_PRIORITY - lane
            stream.write(encode_preamble(StreamType.ORDERED, communicator, lane=lane))
            self._lanes.setdefault(lane, []).append(stream)
        return stream

    def _try_open(self) -> quic.Stream | None:
        try:
            stream = self._connection.open_uni()
        except BlockingIOError:
            return None
        self._opened += 1
        return stream

    def _wait_for_stream(self) -> None:
        if not self._opening:
            self._connection.post_open_uni(self._completions, token=self.stream_opened)
            self._opening = True

    def _use(self, stream: quic.Stream | None) -> None:
        self._opened += 1
        while self._waiting and stream is not None:
            transfer = next(iter(self._waiting))
            self._start(stream, transfer, self._waiting.pop(transfer))
            stream = self._try_open() if self._waiting else None
            if self._waiting and stream is None:
                return self._wait_for_stream()
        if stream is not None:
            stream.reset()  # its payload was withdrawn; the peer counts a reset stream as ended
        return None

    def _start(self, stream: quic.Stream, transfer: int, data: memoryview) -> None:
        try:
            stream.priority = 0
            stream.write(encode_preamble(StreamType.PAYLOAD, transfer, size=len(data)))
            if len(data):
                self._payloads[transfer] = OutgoingPayload(self, transfer, stream, data, self._completions)
            stream.finish()
        except quic.StreamError:
            return  # the peer has already refused it

    def _finish_if_drained(self) -> None:
        if not self.finishing or self._waiting or self._opening or self.finished:
            return
        self._control().write(encode_finish(self._opened))
        for streams in self._lanes.values():
            for stream in streams:
                stream.finish()
        self.finished = True


class OutgoingPayload:
    """A payload whose memory the protocol reads."""

    __slots__ = ("_operation", "_outbound", "_stream", "transfer")

    def __init__(
        self, outbound: SendStreams, transfer: int, stream: quic.Stream, data: memoryview, completions: quic.Completions
    ) -> None:
        self.transfer = transfer
        self._outbound = outbound
        self._stream = stream
        # None once the memory is free; written under the lock of SendStreams.
        self._operation: quic.Operation | None = stream.post_write(data, completions, token=self.done)

    def withdraw(self) -> None:
        """Resets the stream first: otherwise its queued end would look like a complete payload."""
        try:
            self._stream.reset()
        except quic.QuicError:
            return self.release()  # everything arrived, or the connection is lost
        return self.release()

    def release(self) -> None:
        operation, self._operation = self._operation, None
        if operation is not None:
            operation.cancel()

    def done(self, _operation: quic.Operation) -> None:
        self._outbound.handed_over(self)

    def interrupted(self, error: BaseException) -> None:
        self._outbound.interrupted(error)
