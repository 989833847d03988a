"""The sending half of a carrier: the streams we open, and what is still on its way into them.

Law of order: a (lane, communicator) is bound to one stream at its first frame and stays with it. It gets a stream of
its own while there are few; beyond MAX_ORDERED_STREAMS, or where the peer allows no more, it shares one of its lane,
and if the lane has none, the control stream, which is always opened first. So frames never wait for a stream.
Payloads do: the peer's stream limit is their queue.

Everything here may be called from any thread; `_lock` covers all but the writers, which are only looked up outside it.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Final, TypeAlias

from nexar.native import quic
from nexar.transport.base import CarrierLost
from nexar.transport.quic.protocol import StreamType, encode_preamble, finished_already, retryable
from nexar.wire.frame import Lane, encode_finish

Write: TypeAlias = Callable[..., None]

MAX_ORDERED_STREAMS: Final = 1024
_TOP_PRIORITY: Final = 16  # of lane 0; each lane below has one less, payloads have 0


class SendStreams:
    """The streams that we open."""

    def __init__(
        self, connection: quic.Connection, completions: quic.Completions, fail: Callable[[CarrierLost], None]
    ) -> None:
        self.writers: dict[tuple[int, int], Write] = {}
        """The write method of each bound (lane, communicator). Emptied when nothing may be sent any more."""
        self.finishing = False
        """finish() was called: nothing new may be sent."""
        self.finished = False
        """FINISH has been sent: everything is in the hands of the protocol."""
        self._connection = connection
        self._completions = completions
        self._fail = fail
        self._lock = Lock()
        self._refusal: CarrierLost | None = None  # why nothing new may be sent
        self._opened = 0  # streams of all types
        self._lanes: dict[
            int, list[quic.Stream]
        ] = {}  # ordered streams; those of CONTROL begin with the control stream
        self._payloads: dict[int, OutgoingPayload] = {}  # borrowed memory
        self._waiting: dict[int, memoryview] = {}  # payloads for which there is no stream yet, in order
        self._opening = False  # an operation waits for the peer to allow one more stream

    def bind(self, lane: int, communicator: int) -> Write:
        """The write method for frames that have none yet. Raises CarrierLost after finish() or the end."""
        with self._lock:
            self._check()
            stream = self._choose(lane, communicator)
            return self.writers.setdefault((lane, communicator), stream.write)

    def queued_bytes(self, lane: int) -> int:
        """What was written on this lane and the protocol has not taken yet."""
        with self._lock:
            streams = tuple(self._lanes.get(lane, ()))
        return sum(stream.queued_bytes for stream in streams)

    def send_payload(self, transfer: int, data: memoryview) -> None:
        """Start, or queue, a payload."""
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
        """Stop sending it; on return its memory is free."""
        with self._lock:
            self._waiting.pop(transfer, None)
            payload = self._payloads.pop(transfer, None)
            if payload is not None:
                payload.withdraw()

    def finish(self) -> None:
        """Nothing new may be sent; once every payload has a stream, say so to the peer."""
        with self._lock:
            if self._refusal is None:
                self.finishing = True
                self._refusal = finished_already()
                self.writers.clear()
                self._finish_if_drained()

    def end(self, error: CarrierLost) -> None:
        """Let go of everything; from now on `error` is raised."""
        with self._lock:
            self._refusal = error
            self.writers.clear()
            self._waiting.clear()
            for payload in self._payloads.values():
                payload.release()
            self._payloads.clear()
            self._lanes.clear()

    def abandon(self, error: CarrierLost) -> None:
        """In a forked child, where the lock may be held for ever."""
        self._lock = Lock()
        self._refusal = error
        self.writers.clear()

    def stream_opened(self, operation: quic.Operation) -> None:
        """The peer allowed one more stream."""
        with self._lock:
            self._opening = False
            try:
                self._use(operation.result())
                self._finish_if_drained()
            except quic.QuicError:
                return  # the connection is gone; its end is reported by who waits for it

    def handed_over(self, payload: OutgoingPayload) -> None:
        """The protocol has copied all of it, or the peer does not want it: the memory is free."""
        with self._lock:
            if self._payloads.get(payload.transfer) is payload:
                del self._payloads[payload.transfer]
            payload.release()

    def interrupted(self, error: BaseException) -> None:
        """See Handler."""
        self._fail(CarrierLost("fault", f"sending was interrupted: {error!r}"))

    # ---------------------------------------------------------------- under the lock

    def _check(self) -> None:
        if self._refusal is not None:
            raise retryable(self._refusal)

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
        """Give streams to the payloads that wait, as many as there are."""
        self._opened += 1
        while self._waiting and stream is not None:
            transfer = next(iter(self._waiting))
            self._start(stream, transfer, self._waiting.pop(transfer))
            stream = self._try_open() if self._waiting else None
            if self._waiting and stream is None:
                return self._wait_for_stream()
        if stream is not None:
            stream.reset()  # whom it was for was withdrawn meanwhile; the peer counts it as ended
        return None

    def _start(self, stream: quic.Stream, transfer: int, data: memoryview) -> None:
        try:
            stream.priority = 0
            stream.write(encode_preamble(StreamType.PAYLOAD, transfer, size=len(data)))
            if len(data):
                self._payloads[transfer] = OutgoingPayload(self, transfer, stream, data, self._completions)
            stream.finish()
        except quic.StreamError:
            return  # the peer wants none of it, and was quick to say so

    def _finish_if_drained(self) -> None:
        if not self.finishing or self._waiting or self._opening or self.finished:
            return
        self._control().write(encode_finish(self._opened))
        for streams in self._lanes.values():
            for stream in streams:
                stream.finish()
        self.finished = True


class OutgoingPayload:
    """Memory of ours that the protocol reads from."""

    __slots__ = ("_operation", "_outbound", "_stream", "transfer")

    def __init__(
        self, outbound: SendStreams, transfer: int, stream: quic.Stream, data: memoryview, completions: quic.Completions
    ) -> None:
        self.transfer = transfer
        self._outbound = outbound
        self._stream = stream
        # None once the memory is free; written under the outbound's lock. The write knows us by its token.
        self._operation: quic.Operation | None = stream.post_write(data, completions, token=self.done)

    def withdraw(self) -> None:
        """Give the memory back, and tell the peer that what it has got is worthless.

        The reset comes first: without the write, the end that is queued behind it would go out as if all was sent.
        """
        try:
            self._stream.reset()
        except quic.QuicError:
            return self.release()  # everything has arrived, or the connection is gone
        return self.release()

    def release(self) -> None:
        """Give the memory back."""
        operation, self._operation = self._operation, None
        if operation is not None:
            operation.cancel()

    def done(self, _operation: quic.Operation) -> None:
        """However it ended: that the connection is gone is reported by who waits for that."""
        self._outbound.handed_over(self)

    def interrupted(self, error: BaseException) -> None:
        """See Handler."""
        self._outbound.interrupted(error)
