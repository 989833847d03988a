"""The receiving half of a carrier: which streams came, what they are, and when all of them are through.

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

from nexar_quic import Cancelled, Connection, ConnectionLost, EndpointClosed, Operation, QuicError, Stream, StreamError

from nexar.transport.base import Carrier, CarrierLost, Sink
from nexar.transport.quic.driver import Driver, is_driving
from nexar.transport.quic.payloads import IncomingPayloads
from nexar.transport.quic.preamble import PREAMBLE_BYTES, Preamble, PreambleError, StreamType, decode_preamble
from nexar.transport.quic.streams import OrderedReader
from nexar.transport.silent_sink import SILENT
from nexar.transport.stranger import decode_from_stranger
from nexar.wire.codec import Decode
from nexar.wire.frame import decode

MAX_STREAMS_OF_A_STRANGER: Final = 8
"""A peer that has proven nothing says a few control messages; it needs no more, and gets no more of our memory."""


class Inbound:
    """The streams that the peer opens."""

    def __init__(
        self,
        carrier: Carrier,
        connection: Connection,
        driver: Driver,
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
        self.sink: Sink = SILENT  # written under _lock, unless by the driving thread at the very end
        self.decode: Decode = decode if carrier.peer.verified else decode_from_stranger  # any thread, by admit()
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
        if self.sink is SILENT:
            self._left.set()

    def silence(self) -> None:
        """No call of the sink begins from now on, and none is running when this returns, except the caller's own.

        The driving thread first says that it is inside and then looks for the sink; we first take the sink away and
        then look whether it is inside. One of the two sees the other.
        """
        with self._lock:
            self._silenced = True
            self.sink = SILENT
        while self.inside and not is_driving():
            self._left.wait()

    def accepted(self, operation: Operation) -> None:
        """A stream has come."""
        try:
            stream = operation.result()
            self.start()
        except QuicError as error:
            return self.read_failed(error)
        self._streams += 1
        if self._streams > MAX_STREAMS_OF_A_STRANGER and self._is_stranger:
            return self.misbehaved(f"{self._streams} streams of a peer that has not proven who it is")
        Newcomer(self, stream)
        return None

    def introduce(self, stream: Stream, preamble: Preamble) -> None:
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

    def read_failed(self, error: QuicError) -> None:
        """See Receiver. That the connection is gone is told by who waits for its end, once."""
        if isinstance(error, StreamError):
            self.misbehaved(f"a stream that must not break did: {error}")
        elif not isinstance(error, ConnectionLost | EndpointClosed | Cancelled):
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


class Newcomer:
    """A stream that has not said yet what it is."""

    __slots__ = ("_buffer", "_inbound", "_stream")

    def __init__(self, inbound: Inbound, stream: Stream) -> None:
        self._inbound = inbound
        self._stream = stream
        self._buffer = bytearray(PREAMBLE_BYTES)
        try:
            stream.post_read(self._buffer, inbound.completions, token=self.arrived)
        except QuicError as error:
            inbound.read_failed(error)

    def arrived(self, operation: Operation) -> None:
        """The preamble has come, or never will."""
        try:
            count = operation.result()
        except StreamError:
            return self._inbound.stream_over()  # a payload withdrawn before a byte of it was sent
        except QuicError as error:
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
