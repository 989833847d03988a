"""Payloads on their way in: each on a stream of its own, read straight into the memory it was expected in.

Law: `_expected` holds every transfer whose last byte has not landed. Its memory is touched only by the one read that is
posted into it, and who cancels that read owns the memory again. So a transfer is in one of three states: no stream yet
(nothing posted), a read posted, or a read done whose handler is about to run; then it is too late to redirect it.

A stream may come for a transfer that nobody expects any more, because the link refused it on the way: it is stopped.
One that was never expected is stopped too, and counted; a peer that does it again and again has broken the protocol.
"""

from __future__ import annotations

from threading import Lock
from typing import Final

from nexar_quic import Cancelled, Operation, QuicError, Stream, StreamError

from nexar.transport.quic.receiving import Receiver

MAX_UNEXPECTED: Final = 64
MAX_FORSAKEN: Final = 4096
"""Transfers given up before their stream came: remembered, the oldest forgotten, because it may never come."""


class IncomingPayloads:
    """The payloads one peer may send us. Verbs from any thread; `begin` from the driving one."""

    def __init__(self, receiver: Receiver) -> None:
        self.unexpected = 0  # written by the driving thread
        self.lock = Lock()
        self._receiver = receiver
        self._expected: dict[int, IncomingPayload] = {}  # under lock
        self._forsaken: dict[int, None] = {}  # under lock

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, transfer: int, into: memoryview) -> None:
        """A stream for `transfer` may come from now on."""
        with self.lock:
            if transfer in self._expected:
                raise ValueError(f"transfer {transfer} is expected already")
            self._expected[transfer] = IncomingPayload(self, self._receiver, transfer, into)

    def redirect(self, transfer: int, into: memoryview | None) -> bool:
        """See Carrier.redirect_payload."""
        with self.lock:
            payload = self._expected.get(transfer)
            if payload is None:
                return False
            if into is not None:
                return payload.move(into)
            if not payload.drop():
                return False
            del self._expected[transfer]
            stopped = payload.stream
            if stopped is None:
                self._forsake(transfer)
        if stopped is not None:
            self._discard(stopped)
        return True

    def begin(self, transfer: int, stream: Stream) -> None:
        """The stream of `transfer` has come."""
        with self.lock:
            payload = self._expected.get(transfer)
            if payload is not None and payload.take(stream):
                return None
            forsaken = payload is None and self._forsaken.pop(transfer, False) is None
        if payload is None:
            return self._turn_away(stream, known=forsaken)
        if payload.stream is stream:
            return payload.landed(stream)  # it has no bytes
        return self._receiver.misbehaved(f"a second stream for payload {transfer}")

    def claim(self, transfer: int) -> None:
        """The last byte has landed: too late for a redirect."""
        with self.lock:
            self._expected.pop(transfer, None)

    def clear(self) -> None:
        """The carrier has ended: nothing is touched any more."""
        with self.lock:
            for payload in self._expected.values():
                payload.drop()
            self._expected.clear()
            self._forsaken.clear()

    def _forsake(self, transfer: int) -> None:
        self._forsaken[transfer] = None
        if len(self._forsaken) > MAX_FORSAKEN:
            del self._forsaken[next(iter(self._forsaken))]

    def _turn_away(self, stream: Stream, *, known: bool) -> None:
        self.unexpected += not known
        if self.unexpected > MAX_UNEXPECTED:
            return self._receiver.misbehaved(f"{self.unexpected} payloads that nobody expected")
        return self._discard(stream)

    def _discard(self, stream: Stream) -> None:
        try:
            stream.stop()
        except StreamError:
            return self._receiver.stream_over()  # it has ended by itself
        except QuicError as error:
            return self._receiver.read_failed(error)
        return self._receiver.stream_over()


class IncomingPayload:
    """One expected payload. Its attributes are written under the table's lock."""

    __slots__ = ("_into", "_operation", "_received", "_receiver", "_table", "_transfer", "stream")

    def __init__(self, table: IncomingPayloads, receiver: Receiver, transfer: int, into: memoryview) -> None:
        self.stream: Stream | None = None
        self._table = table
        self._receiver = receiver
        self._transfer = transfer
        self._into = into
        self._received = 0  # bytes that landed before the read that is posted
        self._operation: Operation | None = None

    def take(self, stream: Stream) -> bool:
        """Read from this stream. False: there is nothing to read, or another stream is being read."""
        if self.stream is not None:
            return False
        self.stream = stream
        if len(self._into):
            self._post()
            return True
        return False

    def drop(self) -> bool:
        """Stop reading. False: too late, everything has landed."""
        operation = self._operation
        return operation is None or operation.cancel() or not self._is_whole(operation)

    def move(self, into: memoryview) -> bool:
        """Read the rest elsewhere. False: too late."""
        if len(into) != len(self._into):
            raise ValueError(f"payload {self._transfer} has {len(self._into)} bytes; it cannot land in {len(into)}")
        operation = self._operation
        if operation is not None:
            if not operation.cancel():
                return self._leave_failed(operation, into)
            self._received += operation.transferred
        into[: self._received] = self._into[: self._received]
        self._into = into
        if self.stream is not None:
            self._post()
        return True

    def filled(self, operation: Operation) -> None:
        """The read is done, one way or another."""
        try:
            count = operation.result()
        except Cancelled:
            return None  # redirected or dropped; who did it has seen to the rest
        except StreamError:
            return self._withdrawn()
        except QuicError as error:
            return self._receiver.read_failed(error)
        size = len(self._into) - self._received
        if count < size or self.stream is None:
            return self._receiver.misbehaved(f"payload {self._transfer} ends {size - count} bytes short")
        return self.landed(self.stream)

    def interrupted(self, error: BaseException) -> None:
        """See Handler."""
        self._receiver.interrupted(error)

    def _post(self) -> None:
        assert self.stream is not None
        rest = self._into[self._received :]
        try:
            self._operation = self.stream.post_read(rest, self._receiver.completions, token=self.filled)
        except QuicError:
            self._operation = None  # the connection is gone; its end is reported by who waits for it

    def _is_whole(self, operation: Operation) -> bool:
        return self._received + operation.transferred == len(self._into)

    def _leave_failed(self, operation: Operation, into: memoryview) -> bool:
        """The read is done. Whole: too late. Otherwise it failed, and nothing of it counts: it starts again."""
        if self._is_whole(operation):
            return False
        self._into = into
        return True

    def landed(self, stream: Stream) -> None:
        """Every byte is there."""
        self._table.claim(self._transfer)
        EndOfStream(self._receiver, stream)
        self._receiver.sink.payload_arrived(self._receiver.carrier, self._transfer)

    def _withdrawn(self) -> None:
        """The peer took it back. Its link tells ours; until then the transfer stays expected, from the start."""
        with self._table.lock:
            self.stream = None
            self._operation = None
            self._received = 0
        self._receiver.stream_over()


class EndOfStream:
    """Sees a payload's stream to its end: the byte behind the last must not come."""

    __slots__ = ("_receiver",)

    def __init__(self, receiver: Receiver, stream: Stream) -> None:
        self._receiver = receiver
        try:
            stream.post_read(bytearray(1), receiver.completions, token=self.ended)
        except QuicError as error:
            receiver.read_failed(error)

    def ended(self, operation: Operation) -> None:
        """The end, or one byte too many."""
        try:
            count = operation.result()
        except StreamError:
            return self._receiver.stream_over()  # reset although complete: the bytes are here all the same
        except QuicError as error:
            return self._receiver.read_failed(error)
        if count:
            return self._receiver.misbehaved("a payload longer than announced")
        return self._receiver.stream_over()

    def interrupted(self, error: BaseException) -> None:
        """See Handler."""
        self._receiver.interrupted(error)
