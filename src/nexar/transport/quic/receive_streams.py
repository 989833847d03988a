"""Reading an ordered stream: bytes in, frames out, without a copy where a frame fits into the buffer.

Law: one read is always posted, into the free part of one buffer, which belongs to the driving thread. `_start.._end` of
the buffer has arrived and was not delivered yet: nothing, or one frame that is not whole. A read waits for the bytes
that make it whole, no fewer.
Memory follows the bytes that arrived. The buffer starts small, because a peer may open thousands of streams; it doubles
only when it is nearly full, up to the largest frame, and falls back to KEPT_BYTES, which holds an eager message whole.

The receiving half of a carrier: which streams came, what they are, and when all of them are through.

Law of the end: the peer announces in its FINISH frame how many streams it has opened, of all types. Every stream ends
exactly once here: read to its end, reset by the peer, or stopped by us. When as many have ended as were announced,
everything the peer ever sent has been delivered, and only then the sink hears carrier_finished. Farewells are not
counted: they come after the announcement.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Lock
from typing import Final
from weakref import ref

from nexar.native import quic
from nexar.transport.base import SILENT_SINK, Carrier, CarrierLost, Sink
from nexar.transport.quic.driver import CompletionDriver, is_driving
from nexar.transport.quic.payloads import IncomingPayloads, StreamReceiver
from nexar.transport.quic.protocol import PREAMBLE_BYTES, Preamble, PreambleError, StreamType, decode_preamble
from nexar.transport.unverified import decode_unverified
from nexar.wire.frame import MAX_FRAME_BYTES, Decode, Frame, FrameError, FrameKind, decode, next_frame

FIRST_BYTES: Final = 4 << 10
KEPT_BYTES: Final = 128 << 10
# Plain numbers: looking a member up in an enum class costs as much as a small decode.
_FIRST_PRIVATE: Final = int(FrameKind.CHUNK)  # CHUNK, FINISH and HELLO are between carriers, not for sinks
_LAST_PRIVATE: Final = int(FrameKind.HELLO)


class OrderedReader:
    """One ordered stream of the peer. Everything here runs in the driving thread."""

    __slots__ = ("_end", "_minimum", "_receiver", "_size", "_start", "_stream", "_view")

    def __init__(self, receiver: StreamReceiver, stream: quic.Stream) -> None:
        self._receiver = receiver
        self._stream = stream
        self._view = memoryview(bytearray(FIRST_BYTES))
        self._size = FIRST_BYTES
        self._start = self._end = 0
        self._minimum = 1
        self._post(self._view, self.arrived)

    @property
    def buffer_bytes(self) -> int:
        """Memory held."""
        return self._size

    def arrived(self, operation: quic.Operation) -> None:
        """Bytes have come, or the stream is over."""
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
        if start == self._end < self._size <= KEPT_BYTES:  # all delivered, with room to spare: by far the usual case
            self._start = self._end = 0
            return self._post(self._view, operation.token)
        return self._post(self._make_room(start), operation.token)

    def interrupted(self, error: BaseException) -> None:
        """See Handler."""
        self._receiver.interrupted(error)

    def _deliver(self, start: int, end: int) -> int:
        """Hand over every whole frame; where the next one starts, or -1 if nothing more is to be read: the peer has
        broken the protocol, or nobody holds the carrier.
        """
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
        return self._receiver.stream_over()

    def _make_room(self, start: int) -> memoryview:
        """A free part of the buffer for the next read. Views handed out before are void."""
        held = self._end - start
        if not held:
            self._replace(start, min(2 * self._size, KEPT_BYTES))
        elif self._end + self._minimum <= self._size:
            self._start = start  # the rest of the frame fits behind what is there
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


MAX_UNVERIFIED_STREAMS: Final = 8
"""A peer that has proven nothing says a few control messages; it needs no more, and gets no more of our memory."""


class ReceiveStreams:
    """The streams that the peer opens."""

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
        """The carrier owns this. Neither this nor the callbacks keep it alive: in a ring of the two, an ended carrier
        and its native connection would stay until the collector finds them.
        """
        self._carrier = ref(carrier)
        self.completions = driver.completions
        self.sink: Sink = SILENT_SINK  # written under _lock, unless by the driving thread at the very end
        self.decode: Decode = decode if carrier.peer.verified else decode_unverified  # any thread, by admit()
        self.payloads = IncomingPayloads(self, check)
        self.inside = False  # the driving thread may be in a call of the sink; written by it
        self.frames_received = 0  # the driving thread's, like the next two
        self.finished = False  # the sink has heard carrier_finished
        self.farewell = False  # the peer has everything we announced
        self._streams = 0  # that came; the driving thread's
        self._connection = connection
        self._driver = driver
        self._left = Event()  # set by the driving thread when it leaves the sink of an aborted carrier
        self._fail = fail
        self._settle = settle
        self._lock = Lock()
        self._started = False  # a sink was attached; under _lock
        self._silenced = False  # under _lock, once: nobody is to hear any more
        self._over = 0  # streams that have ended; any thread, under _lock
        self._announced: int | None = None  # written by the driving thread, under _lock

    @property
    def carrier(self) -> Carrier | None:
        """See Receiver. The transport holds every carrier that has not ended."""
        return self._carrier()

    def deliver_to(self, sink: Sink) -> bool:
        """Call this sink from now on, unless silenced. True if there was none before."""
        with self._lock:
            if not self._silenced:
                self.sink = sink
            first, self._started = not self._started, True
        return first

    def start(self) -> None:
        """Take in streams from now on."""
        self._connection.post_accept_uni(self.completions, token=self.accepted)

    def admit(self) -> None:
        """The peer is no stranger any more."""
        self.decode = decode

    def tell(self, call: Callable[[Sink], None]) -> None:
        """See Receiver."""
        self.inside = True
        try:
            call(self.sink)
        finally:
            self.leave()

    def leave(self) -> None:
        """See Receiver."""
        self.inside = False
        if self.sink is SILENT_SINK:
            self._left.set()

    def silence(self) -> None:
        """No call of the sink begins from now on, and none is running when this returns, except the caller's own.

        The driving thread first says that it is inside and then looks for the sink; we first take the sink away and
        then look whether it is inside. One of the two sees the other.
        """
        with self._lock:
            self._silenced = True
            self.sink = SILENT_SINK
        while self.inside and not is_driving():
            self._left.wait()

    def accepted(self, operation: quic.Operation) -> None:
        """A stream has come."""
        try:
            stream = operation.result()
            self.start()
        except quic.QuicError as error:
            return self.read_failed(error)
        self._streams += 1
        if self._streams > MAX_UNVERIFIED_STREAMS and self._is_stranger:
            return self.misbehaved(f"{self._streams} streams of a peer that has not proven who it is")
        UntypedStream(self, stream)
        return None

    def introduce(self, stream: quic.Stream, preamble: Preamble) -> None:
        """A stream has said what it is."""
        if preamble.type is StreamType.ORDERED:
            OrderedReader(self, stream)
        elif preamble.type is StreamType.PAYLOAD and self._is_stranger:
            self.misbehaved(f"payload {preamble.number} from a peer that has not proven who it is")
        elif preamble.type is StreamType.PAYLOAD:
            self.payloads.begin(stream, preamble.number, preamble.size)
        else:
            self.farewell_arrived()

    @property
    def _is_stranger(self) -> bool:
        return self.decode is not decode

    def finish_announced(self, streams: int) -> None:
        """See Receiver."""
        with self._lock:
            again, self._announced = self._announced is not None, streams
        if again:
            return self.misbehaved("a second FINISH")
        return self._driver.defer(self._check)  # we are inside a read, whose frames come first

    def farewell_arrived(self) -> None:
        """See Receiver."""
        self.farewell = True
        self._settle()

    def stream_over(self) -> None:
        """See Receiver."""
        with self._lock:
            self._over += 1
            announced = self._announced is not None
        if announced:
            self._driver.defer(self._check)  # this may be any thread, and the sink belongs to the driving one

    def misbehaved(self, reason: str) -> None:
        """See Receiver."""
        self._fail(CarrierLost("misbehaved", reason))

    def read_failed(self, error: quic.QuicError) -> None:
        """See Receiver. That the connection is gone is told by who waits for its end, once."""
        if isinstance(error, quic.StreamError):
            self.misbehaved(f"a stream that must not break did: {error}")
        elif not isinstance(error, quic.ConnectionLost | quic.EndpointClosed | quic.Cancelled):
            self._fail(CarrierLost("fault", str(error)))

    def interrupted(self, error: BaseException) -> None:
        """See Handler."""
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
        self.tell(lambda sink: sink.carrier_finished(carrier))
        return self._settle()


class UntypedStream:
    """A stream that has not said yet what it is."""

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
        """The preamble has come, or never will."""
        try:
            count = operation.result()
        except quic.StreamError:
            return self._inbound.stream_over()  # a payload withdrawn before a byte of it was sent
        except quic.QuicError as error:
            return self._inbound.read_failed(error)
        if count < PREAMBLE_BYTES:
            return self._inbound.misbehaved(f"a stream that ends after {count} bytes, in its preamble")
        try:
            preamble = decode_preamble(self._buffer)
        except PreambleError as error:
            return self._inbound.misbehaved(str(error))
        return self._inbound.introduce(self._stream, preamble)

    def interrupted(self, error: BaseException) -> None:
        """See Handler."""
        self._inbound.interrupted(error)
