"""The receiving half of a QUIC carrier: ordered streams, stream types, and the end of all streams.

Ordered streams: one read is always posted into the free part of one buffer; `_start.._end` holds nothing or one
incomplete frame. Frames are delivered without a copy. Buffers start small (a peer may open thousands of streams),
double only when nearly full, and shrink to KEPT_BYTES, enough for an eager message.

End: FINISH announces the number of streams that the peer opened, except ALL_RECEIVED. Every stream ends exactly once
here: read to its end, reset, or stopped. Once that many have ended, carrier_finished is called.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Lock
from typing import Final
from weakref import ref

from nexar.native import quic
from nexar.transport.base import SILENT_SINK, Carrier, CarrierLost, Sink
from nexar.transport.quic.driver import CompletionDriver, is_driving
from nexar.transport.quic.payloads import IncomingPayloads
from nexar.transport.quic.protocol import PREAMBLE_BYTES, Preamble, PreambleError, StreamType, decode_preamble
from nexar.transport.unverified import decode_unverified
from nexar.wire.frame import MAX_FRAME_BYTES, Decode, Frame, FrameError, FrameKind, decode, next_frame

FIRST_BYTES: Final = 4 << 10
KEPT_BYTES: Final = 128 << 10
# Plain integers: an enum lookup costs as much as a small decode.
_FIRST_PRIVATE: Final = int(FrameKind.CHUNK)  # CHUNK, FINISH and HELLO do not reach sinks
_LAST_PRIVATE: Final = int(FrameKind.HELLO)


class OrderedReader:
    """Reads one ordered stream. Driver only."""

    __slots__ = ("_end", "_minimum", "_receiver", "_size", "_start", "_stream", "_view")

    def __init__(self, receiver: ReceiveStreams, stream: quic.Stream) -> None:
        self._receiver = receiver
        self._stream = stream
        self._view = memoryview(bytearray(FIRST_BYTES))
        self._size = FIRST_BYTES
        self._start = self._end = 0
        self._minimum = 1
        self._post(self._view, self.arrived)

    @property
    def buffer_bytes(self) -> int:
        return self._size

    def arrived(self, operation: quic.Operation) -> None:
        try:
            count = operation.result()
        except quic.QuicError as error:
            return self._receiver.read_failed(error)
        if count < self._minimum:
            return self._over(count)
        receiver = self._receiver
        receiver.inside = True
        try:
            start = self._deliver(self._start, self._end + count)
        finally:
            receiver.leave()
        if start < 0:
            return None
        if start == self._end < self._size <= KEPT_BYTES:  # all delivered, with room to spare: the usual case
            self._start = self._end = 0
            return self._post(self._view, operation.token)
        return self._post(self._make_room(start), operation.token)

    def interrupted(self, error: BaseException) -> None:
        self._receiver.interrupted(error)

    def _deliver(self, start: int, end: int) -> int:
        """Returns the start of the next frame, -1 to stop reading."""
        self._end = end
        self._minimum = 1
        view, receiver = self._view, self._receiver
        carrier = receiver.carrier
        if carrier is None:
            return -1
        while start < end:
            try:
                found = next_frame(view, start, end, receiver.decode)
            except FrameError as error:
                return self._refuse(str(error))
            if isinstance(found, int):
                self._minimum = found
                break
            frame, body, start = found
            if _FIRST_PRIVATE <= frame.kind <= _LAST_PRIVATE:
                if not self._take_private(frame):
                    return -1
            else:
                receiver.frames_received += 1
                receiver.sink.frame_arrived(carrier, frame, view[body:start])
        return start

    def _take_private(self, frame: Frame) -> bool:
        if frame.kind == FrameKind.FINISH:
            self._receiver.finish_announced(frame.count)
            return True
        self._refuse(f"a frame of kind {FrameKind(frame.kind).name}, which has no meaning on QUIC")
        return False

    def _refuse(self, reason: str) -> int:
        self._receiver.misbehaved(reason)
        return -1

    def _post(self, room: memoryview, token: object) -> None:
        try:
            self._stream.post_read(room, self._receiver.completions, minimum=self._minimum, token=token)
        except quic.QuicError as error:
            self._receiver.read_failed(error)

    def _over(self, count: int) -> None:
        held = self._end - self._start + count
        if held:
            return self._receiver.misbehaved(f"an ordered stream that ends {held} bytes into a frame")
        return self._receiver.stream_ended()

    def _make_room(self, start: int) -> memoryview:
        """Invalidates earlier views."""
        held = self._end - start
        if not held:
            self._replace(start, min(2 * self._size, KEPT_BYTES))
        elif self._end + self._minimum <= self._size:
            self._start = start  # the rest of the frame fits behind
        elif 4 * (self._size - held) < self._size < held + self._minimum:
            self._replace(start, min(2 * self._size, MAX_FRAME_BYTES))
        else:
            self._view[:held] = self._view[start : self._end]
            self._start, self._end = 0, held
        self._minimum = min(self._minimum, self._size - self._end)
        return self._view[self._end :]

    def _replace(self, start: int, size: int) -> None:
        held = self._end - start
        view = memoryview(bytearray(size))
        view[:held] = self._view[start : self._end]
        self._view, self._size = view, size
        self._start, self._end = 0, held


MAX_UNVERIFIED_STREAMS: Final = 8  # enough for the few control messages of an unverified peer


class ReceiveStreams:
    """The streams that the peer opens. Driver only, unless a method says otherwise."""

    def __init__(
        self,
        carrier: Carrier,
        connection: quic.Connection,
        driver: CompletionDriver,
        *,
        fail: Callable[[CarrierLost], None],
        settle: Callable[[], None],
        check: Callable[[], None],
    ) -> None:
        """The reference to the carrier, the owner, is weak: a cycle would keep an ended carrier until the garbage
        collector runs.
        """
        self._carrier = ref(carrier)
        self.completions = driver.completions
        # Read at every call: abort() and the sink change it. Written under _lock, except by the driver at the end.
        self.sink: Sink = SILENT_SINK
        self.decode: Decode = decode if carrier.peer.verified else decode_unverified  # replaced by admit(), any thread
        self.payloads = IncomingPayloads(self, check)
        self.inside = False  # the driver may be in a sink call; written by it
        self.frames_received = 0  # this and the next two: driver only
        self.finished = False  # carrier_finished was called
        self.peer_has_all = False  # the peer has everything that we announced
        self._streams = 0  # streams opened by the peer; driver only
        self._connection = connection
        self._driver = driver
        self._left = Event()  # set by the driver when it leaves the sink of an aborted carrier
        self._fail = fail
        self._settle = settle
        self._lock = Lock()
        self._started = False  # a sink was attached; under _lock
        self._silenced = False  # under _lock, once: the sink must not be called again
        self._over = 0  # ended streams; any thread, under _lock
        self._announced: int | None = None  # written by the driver, under _lock

    @property
    def carrier(self) -> Carrier | None:
        """None once the carrier has ended and nobody holds it."""
        return self._carrier()

    def deliver_to(self, sink: Sink) -> bool:
        """Set the sink unless silenced. Returns whether it is the first."""
        with self._lock:
            if not self._silenced:
                self.sink = sink
            first, self._started = not self._started, True
        return first

    def start(self) -> None:
        self._connection.post_accept_uni(self.completions, token=self.accepted)

    def admit(self) -> None:
        self.decode = decode

    def call_sink(self, call: Callable[[Sink], None]) -> None:
        self.inside = True
        try:
            call(self.sink)
        finally:
            self.leave()

    def leave(self) -> None:
        self.inside = False
        if self.sink is SILENT_SINK:
            self._left.set()

    def silence(self) -> None:
        """On return no sink call starts, and none runs except the caller's own: the driver sets `inside` before it
        reads the sink; this method removes the sink before it reads `inside`.
        """
        with self._lock:
            self._silenced = True
            self.sink = SILENT_SINK
        while self.inside and not is_driving():
            self._left.wait()

    def accepted(self, operation: quic.Operation) -> None:
        try:
            stream = operation.result()
            self.start()
        except quic.QuicError as error:
            return self.read_failed(error)
        self._streams += 1
        if self._streams > MAX_UNVERIFIED_STREAMS and self._is_unverified:
            return self.misbehaved(f"{self._streams} streams from a peer that is not authenticated")
        UntypedStream(self, stream)
        return None

    def typed(self, stream: quic.Stream, preamble: Preamble) -> None:
        if preamble.type is StreamType.ORDERED:
            OrderedReader(self, stream)
        elif preamble.type is StreamType.PAYLOAD and self._is_unverified:
            self.misbehaved(f"payload {preamble.number} from a peer that is not authenticated")
        elif preamble.type is StreamType.PAYLOAD:
            self.payloads.begin(stream, preamble.number, preamble.size)
        else:
            self.all_received_arrived()

    @property
    def _is_unverified(self) -> bool:
        return self.decode is not decode

    def finish_announced(self, streams: int) -> None:
        """The peer has finished after opening this many streams of all types."""
        with self._lock:
            again, self._announced = self._announced is not None, streams
        if again:
            return self.misbehaved("a second FINISH")
        return self._driver.defer(self._check)  # deferred: frames of the current read come first

    def all_received_arrived(self) -> None:
        self.peer_has_all = True
        self._settle()

    def stream_ended(self) -> None:
        """The data of an ended stream was delivered or dropped. Any thread."""
        with self._lock:
            self._over += 1
            announced = self._announced is not None
        if announced:
            self._driver.defer(self._check)  # deferred: this may be any thread, and only the driver calls the sink

    def misbehaved(self, reason: str) -> None:
        self._fail(CarrierLost("misbehaved", reason))

    def read_failed(self, error: quic.QuicError) -> None:
        """A lost connection is reported once, by the handler of its end."""
        if isinstance(error, quic.StreamError):
            self.misbehaved(f"a stream broke unexpectedly: {error}")
        elif not isinstance(error, quic.ConnectionLost | quic.EndpointClosed | quic.Cancelled):
            self._fail(CarrierLost("fault", str(error)))

    def interrupted(self, error: BaseException) -> None:
        self._fail(CarrierLost("fault", f"reading was interrupted: {error!r}"))

    def _check(self) -> None:
        if self._announced is None or self._over < self._announced:
            return None
        if self._over > self._announced:
            return self.misbehaved(f"{self._over} streams after {self._announced} were announced")
        carrier = self.carrier
        if self.finished or carrier is None:
            return None
        self.finished = True
        self.call_sink(lambda sink: sink.carrier_finished(carrier))
        return self._settle()


class UntypedStream:
    """A stream whose preamble has not arrived."""

    __slots__ = ("_buffer", "_inbound", "_stream")

    def __init__(self, inbound: ReceiveStreams, stream: quic.Stream) -> None:
        self._inbound = inbound
        self._stream = stream
        self._buffer = bytearray(PREAMBLE_BYTES)
        try:
            stream.post_read(self._buffer, inbound.completions, token=self.arrived)
        except quic.QuicError as error:
            inbound.read_failed(error)

    def arrived(self, operation: quic.Operation) -> None:
        try:
            count = operation.result()
        except quic.StreamError:
            return self._inbound.stream_ended()  # a payload withdrawn before its first byte
        except quic.QuicError as error:
            return self._inbound.read_failed(error)
        if count < PREAMBLE_BYTES:
            return self._inbound.misbehaved(f"a stream that ends after {count} bytes, in its preamble")
        try:
            preamble = decode_preamble(self._buffer)
        except PreambleError as error:
            return self._inbound.misbehaved(str(error))
        return self._inbound.typed(self._stream, preamble)

    def interrupted(self, error: BaseException) -> None:
        self._inbound.interrupted(error)
