"""What a stream that is being read needs of the connection it belongs to.

Payloads on their way in: each on a stream of its own, read straight into the memory it was expected in.

Law: `_expected` holds every transfer whose last byte has not landed. Its memory is touched only by the one read that is
posted into it, and who cancels that read owns the memory again. So a transfer is in one of three states: no stream yet
(nothing posted), a read posted, or a read done whose handler is about to run; if that was the last one, it is too late.
A read knows its payload, so a payload forgets a read that is over: in a ring of the two, memory that has landed would
stay until the collector finds it.

A stream may come for a transfer that nobody expects any more, because the link refused it on the way: it is stopped.
Such transfers are remembered, but not all of them for ever; so a peer may surprise us as often as we forgot one.
Any other payload that was never expected breaks the protocol, as does one of another size.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Final, Protocol
from weakref import ref

from nexar.native import quic
from nexar.transport.base import Carrier, Redirected, Sink
from nexar.transport.payload_table import RecentTransfers
from nexar.wire.frame import Decode


class StreamReceiver(Protocol):
    """The receiving half of a carrier, as its streams see it. They call it in the driving thread only."""

    completions: quic.Completions
    frames_received: int
    sink: Sink
    """Looked up at every call, never kept: abort() puts the silent one in its place, a sink its successor."""
    decode: Decode
    """Judges headers; looked up for every frame, because a stranger may be admitted between two."""
    inside: bool
    """Set before the sink is looked up, and lowered by leave(): see abort()."""

    @property
    def carrier(self) -> Carrier | None:
        """None once it has ended and nobody holds it: then nobody hears what arrives."""

    def leave(self) -> None:
        """The call of the sink has returned."""

    def tell(self, call: Callable[[Sink], None]) -> None:
        """Call the sink: `inside`, the look, the call, and leave()."""

    def finish_announced(self, streams: int) -> None:
        """The peer sends no more; it opened this many streams, all types together."""

    def farewell_arrived(self) -> None:
        """The peer has everything we announced."""

    def stream_over(self) -> None:
        """One stream has ended, whichever way; all in it was delivered or dropped. Callable from any thread."""

    def misbehaved(self, reason: str) -> None:
        """The peer broke the protocol: give up the connection."""

    def read_failed(self, error: quic.QuicError) -> None:
        """A stream that must not break did."""

    def interrupted(self, error: BaseException) -> None:
        """See Handler."""


PIECE_BYTES: Final = 2 << 20
"""One read: how much of a payload is taken in between two looks at everything else. Native code fills it, and the
window behind it, while nobody drives."""
MAX_ABANDONED: Final = 4096
"""Transfers given up before their stream came: remembered, the oldest forgotten, because it may never come."""


class IncomingPayloads:
    """The payloads one peer may send us. Verbs from any thread; `begin` from the driving one."""

    def __init__(self, receiver: StreamReceiver, check: Callable[[], None]) -> None:
        """`check` raises once the carrier has ended, which is before `clear` is called.

        The receiver owns the table. The table does not keep it alive: in a ring of the two, an ended carrier would stay
        until the collector finds it.
        """
        self.unexpected = 0  # payloads that nobody expected any more; written by the driving thread
        self.lock = Lock()
        self._owner = ref(receiver)
        self._check = check
        self._expected: dict[int, IncomingPayload] = {}  # under lock
        self._recent_transfers = RecentTransfers()  # under lock
        self._forsaken: dict[int, None] = {}  # under lock
        self._forgotten = 0  # forsaken transfers that are not remembered any more; under lock

    @property
    def _receiver(self) -> StreamReceiver:
        receiver = self._owner()
        assert receiver is not None, "whoever calls the table holds its receiver"
        return receiver

    def expect(self, transfer: int, into: memoryview) -> None:
        """A stream for `transfer` may come from now on."""
        with self.lock:
            self._check()
            if transfer in self._expected:
                raise ValueError(f"transfer {transfer} is expected already")
            self._expected[transfer] = IncomingPayload(self, self._receiver, transfer, into)
            self._recent_transfers.forget(transfer)

    def redirect(self, transfer: int, into: memoryview | None) -> Redirected:
        """See Carrier.redirect_payload."""
        with self.lock:
            self._check()
            payload = self._expected.get(transfer)
            if payload is None:
                return Redirected.LANDED if transfer in self._recent_transfers else Redirected.UNKNOWN
            if not (payload.drop() if into is None else payload.move(into)):
                return Redirected.LANDED
            stopped = self._give_up(transfer, payload) if into is None else None
        if stopped is not None:
            self._discard(stopped)
        return Redirected.MOVED

    def _give_up(self, transfer: int, payload: IncomingPayload) -> quic.Stream | None:
        """Under the lock: a payload that was dropped. The stream to stop, if there is one."""
        del self._expected[transfer]
        if payload.stream is None:
            self._forsake(transfer)
        return payload.stream

    def begin(self, stream: quic.Stream, transfer: int, size: int) -> None:
        """The stream of `transfer` has come."""
        with self.lock:
            payload = self._expected.get(transfer)
            if payload is None:
                forgiven = self._forgive(transfer)
            else:
                fault = payload.take(stream, size)
                if not (size or fault):
                    self.complete(transfer)
        if payload is None:
            return self._turn_away(stream, transfer, forgiven=forgiven)
        if fault is not None:
            return self._receiver.misbehaved(fault)
        return None if size else payload.landed(stream)

    def complete(self, transfer: int) -> None:
        """Under the lock: the last byte has landed, it is too late for a redirect."""
        self._expected.pop(transfer, None)  # gone already if the carrier ended meanwhile
        self._recent_transfers.add(transfer)

    def clear(self) -> None:
        """The carrier has ended: nothing is touched any more."""
        with self.lock:
            for payload in self._expected.values():
                payload.drop()
            self._expected.clear()
            self._forsaken.clear()
            self._recent_transfers.clear()

    def abandon(self) -> None:
        """In a forked child, where the lock may be held for ever, and no native call is possible."""
        self.lock = Lock()
        self._expected.clear()

    def _forsake(self, transfer: int) -> None:
        self._forsaken[transfer] = None
        if len(self._forsaken) > MAX_ABANDONED:
            del self._forsaken[next(iter(self._forsaken))]
            self._forgotten += 1

    def _forgive(self, transfer: int) -> bool:
        if transfer in self._forsaken:
            del self._forsaken[transfer]
            return True
        self._forgotten -= 1
        return self._forgotten >= 0

    def _turn_away(self, stream: quic.Stream, transfer: int, *, forgiven: bool) -> None:
        if not forgiven:
            return self._receiver.misbehaved(f"payload {transfer}, which nobody expects")
        self.unexpected += 1
        return self._discard(stream)

    def _discard(self, stream: quic.Stream) -> None:
        try:
            stream.stop()
        except quic.StreamError:
            return self._receiver.stream_over()  # it has ended by itself
        except quic.QuicError as error:
            return self._receiver.read_failed(error)
        return self._receiver.stream_over()


class IncomingPayload:
    """One expected payload. Its attributes are written under the table's lock."""

    __slots__ = ("_dropped", "_into", "_operation", "_received", "_receiver", "_size", "_table", "_transfer", "stream")

    def __init__(self, table: IncomingPayloads, receiver: StreamReceiver, transfer: int, into: memoryview) -> None:
        self.stream: quic.Stream | None = None
        self._table = table
        self._receiver = receiver
        self._transfer = transfer
        self._into = into  # once all has landed its owner may have released it, so it is not looked at then
        self._size = len(into)
        self._received = 0  # bytes that landed before the read that is posted
        self._operation: quic.Operation | None = None
        self._dropped = False  # nobody wants it any more; a handler that comes later has nothing to do

    def take(self, stream: quic.Stream, size: int) -> str | None:
        """Read from this stream, or say what is wrong with it."""
        if self.stream is not None:
            return f"a second stream for payload {self._transfer}"
        if size != self._size:
            return f"payload {self._transfer} has {size} bytes instead of {self._size}"
        self.stream = stream
        if size:
            self._post()
        return None

    def drop(self) -> bool:
        """Stop reading. False: too late, everything has landed."""
        operation = self._operation
        if operation is not None and not operation.cancel() and self._is_whole(operation):
            return False
        self._operation = None
        self._dropped = True
        return True

    def move(self, into: memoryview) -> bool:
        """Read the rest elsewhere. False: too late."""
        if len(into) != self._size:
            raise ValueError(f"payload {self._transfer} has {self._size} bytes; it cannot land in {len(into)}")
        operation = self._operation
        if operation is not None:
            if not operation.cancel():
                return self._move_done(operation, into)
            self._received += operation.transferred
        into[: self._received] = self._into[: self._received]
        self._into = into
        if self.stream is not None:
            self._post()
        return True

    def filled(self, operation: quic.Operation) -> None:
        """The read is done, one way or another."""
        try:
            count = operation.result()
        except quic.Cancelled:
            return None  # redirected or dropped; who did it has seen to the rest
        except quic.StreamError:
            return self._withdrawn()
        except quic.QuicError as error:
            return self._receiver.read_failed(error)
        return self._advance(count)

    def interrupted(self, error: BaseException) -> None:
        """See Handler."""
        self._receiver.interrupted(error)

    def _advance(self, count: int) -> None:
        with self._table.lock:
            self._operation = None
            stream, asked = self.stream, min(PIECE_BYTES, self._size - self._received)
            self._received += count
            missing = self._size - self._received
            if self._dropped:
                return None
            if missing and count == asked:
                return self._post()
            if not missing:
                self._table.complete(self._transfer)
        if missing or stream is None:
            return self._receiver.misbehaved(f"payload {self._transfer} ends {missing} bytes short")
        return self.landed(stream)

    def _piece(self) -> memoryview:
        return self._into[self._received : self._received + PIECE_BYTES]

    def _post(self) -> None:
        assert self.stream is not None
        try:
            self._operation = self.stream.post_read(self._piece(), self._receiver.completions, token=self.filled)
        except quic.QuicError:
            self._operation = None  # the connection is gone; its end is reported by who waits for it

    def _is_whole(self, operation: quic.Operation) -> bool:
        return self._received + operation.transferred == self._size

    def _move_done(self, operation: quic.Operation, into: memoryview) -> bool:
        """The read is done, and its handler about to run: it will go on, or start again, in the new memory."""
        if self._is_whole(operation):
            return False
        arrived = self._received + operation.transferred
        into[:arrived] = self._into[:arrived]
        self._into = into
        return True

    def landed(self, stream: quic.Stream) -> None:
        """Every byte is there."""
        StreamEnd(self._receiver, stream)
        carrier = self._receiver.carrier
        if carrier is not None:
            self._receiver.tell(lambda sink: sink.payload_arrived(carrier, self._transfer))

    def _withdrawn(self) -> None:
        """The peer took it back. Its link tells ours; until then the transfer stays expected, from the start."""
        with self._table.lock:
            if self._dropped:
                return
            self.stream = None
            self._operation = None
            self._received = 0
        self._receiver.stream_over()


class StreamEnd:
    """Sees a payload's stream to its end: the byte behind the last must not come."""

    __slots__ = ("_receiver",)

    def __init__(self, receiver: StreamReceiver, stream: quic.Stream) -> None:
        self._receiver = receiver
        try:
            stream.post_read(bytearray(1), receiver.completions, token=self.ended)
        except quic.QuicError as error:
            receiver.read_failed(error)

    def ended(self, operation: quic.Operation) -> None:
        """The end, or one byte too many."""
        try:
            count = operation.result()
        except quic.StreamError:
            return self._receiver.stream_over()  # reset although complete: the bytes are here all the same
        except quic.QuicError as error:
            return self._receiver.read_failed(error)
        if count:
            return self._receiver.misbehaved("a payload longer than announced")
        return self._receiver.stream_over()

    def interrupted(self, error: BaseException) -> None:
        """See Handler."""
        self._receiver.interrupted(error)
