"""Incoming payloads: one stream each, read directly into the expected memory.

`_expected` holds every incomplete transfer. Only its posted read touches its memory; cancelling the read returns
ownership. After the last read a redirect is too late. A payload drops its finished read, because the reference cycle
would keep received memory alive.

The stream of a discarded transfer is stopped. Discarded transfers are remembered up to a limit; the peer may send one
unknown transfer for each forgotten one. Other unexpected payloads and wrong sizes are violations.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Final
from weakref import ref

from nexar.native import quic
from nexar.transport.base import Redirected
from nexar.transport.payload_table import RecentTransfers

if TYPE_CHECKING:
    from nexar.transport.quic.receive_streams import ReceiveStreams


# Size of one read, between which other work is done. Native code fills it, and the window behind it, without a driver.
PIECE_BYTES: Final = 2 << 20
MAX_ABANDONED: Final = 4096  # Discarded transfers without a stream that are remembered; their stream may never come.


class IncomingPayloads:
    """The payloads that one peer may send. Any thread, except `begin`: driver only."""

    def __init__(self, receiver: ReceiveStreams, check: Callable[[], None]) -> None:
        """`check` raises once the carrier has ended, which precedes `clear`. The reference to the owner is weak: a
        cycle would keep an ended carrier alive.
        """
        self.unexpected = 0  # discarded payloads whose stream came; written by the driver
        self.lock = Lock()
        self._owner = ref(receiver)
        self._check = check
        self._expected: dict[int, IncomingPayload] = {}  # under lock
        self._recent_transfers = RecentTransfers()  # under lock
        self._discarded: dict[int, None] = {}  # under lock
        self._forgotten = 0  # discarded transfers no longer remembered; under lock

    @property
    def _receiver(self) -> ReceiveStreams:
        receiver = self._owner()
        assert receiver is not None, "callers of the table hold its receiver"
        return receiver

    def expect(self, transfer: int, into: memoryview) -> None:
        with self.lock:
            self._check()
            if transfer in self._expected:
                raise ValueError(f"transfer {transfer} is expected already")
            self._expected[transfer] = IncomingPayload(self, self._receiver, transfer, into)
            self._recent_transfers.forget(transfer)

    def redirect(self, transfer: int, into: memoryview | None) -> Redirected:
        with self.lock:
            self._check()
            payload = self._expected.get(transfer)
            if payload is None:
                return Redirected.COMPLETE if transfer in self._recent_transfers else Redirected.UNKNOWN
            if not (payload.drop() if into is None else payload.move(into)):
                return Redirected.COMPLETE
            stopped = self._give_up(transfer, payload) if into is None else None
        if stopped is not None:
            self._discard(stopped)
        return Redirected.MOVED

    def _give_up(self, transfer: int, payload: IncomingPayload) -> quic.Stream | None:
        """Return the stream to stop, if any. The caller holds the lock."""
        del self._expected[transfer]
        if payload.stream is None:
            self._remember_discarded(transfer)
        return payload.stream

    def begin(self, stream: quic.Stream, transfer: int, size: int) -> None:
        with self.lock:
            payload = self._expected.get(transfer)
            if payload is None:
                discarded = self._was_discarded(transfer)
            else:
                fault = payload.take(stream, size)
                if not (size or fault):
                    self.complete(transfer)
        if payload is None:
            return self._reject(stream, transfer, discarded=discarded)
        if fault is not None:
            return self._receiver.misbehaved(fault)
        return None if size else payload.landed(stream)

    def complete(self, transfer: int) -> None:
        """The caller holds the lock."""
        self._expected.pop(transfer, None)  # absent if the carrier ended meanwhile
        self._recent_transfers.add(transfer)

    def clear(self) -> None:
        with self.lock:
            for payload in self._expected.values():
                payload.drop()
            self._expected.clear()
            self._discarded.clear()
            self._recent_transfers.clear()

    def abandon(self) -> None:
        self.lock = Lock()
        self._expected.clear()

    def _remember_discarded(self, transfer: int) -> None:
        self._discarded[transfer] = None
        if len(self._discarded) > MAX_ABANDONED:
            del self._discarded[next(iter(self._discarded))]
            self._forgotten += 1

    def _was_discarded(self, transfer: int) -> bool:
        if transfer in self._discarded:
            del self._discarded[transfer]
            return True
        self._forgotten -= 1
        return self._forgotten >= 0

    def _reject(self, stream: quic.Stream, transfer: int, *, discarded: bool) -> None:
        if not discarded:
            return self._receiver.misbehaved(f"payload {transfer}, which was not expected")
        self.unexpected += 1
        return self._discard(stream)

    def _discard(self, stream: quic.Stream) -> None:
        try:
            stream.stop()
        except quic.StreamError:
            return self._receiver.stream_ended()  # it ended by itself
        except quic.QuicError as error:
            return self._receiver.read_failed(error)
        return self._receiver.stream_ended()


class IncomingPayload:
    """One expected payload. The table's lock guards its attributes."""

    __slots__ = ("_dropped", "_into", "_operation", "_received", "_receiver", "_size", "_table", "_transfer", "stream")

    def __init__(self, table: IncomingPayloads, receiver: ReceiveStreams, transfer: int, into: memoryview) -> None:
        self.stream: quic.Stream | None = None
        self._table = table
        self._receiver = receiver
        self._transfer = transfer
        self._into = into  # not used once complete: its owner may have released it
        self._size = len(into)
        self._received = 0  # bytes received before the posted read
        self._operation: quic.Operation | None = None
        self._dropped = False  # discarded; a later handler call does nothing

    def take(self, stream: quic.Stream, size: int) -> str | None:
        """Returns the violation, if any."""
        if self.stream is not None:
            return f"a second stream for payload {self._transfer}"
        if size != self._size:
            return f"payload {self._transfer} has {size} bytes instead of {self._size}"
        self.stream = stream
        if size:
            self._post()
        return None

    def drop(self) -> bool:
        """Returns False if the payload is complete."""
        operation = self._operation
        if operation is not None and not operation.cancel() and self._is_whole(operation):
            return False
        self._operation = None
        self._dropped = True
        return True

    def move(self, into: memoryview) -> bool:
        """Returns False if the payload is complete."""
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
        try:
            count = operation.result()
        except quic.Cancelled:
            return None  # redirected or discarded
        except quic.StreamError:
            return self._withdrawn()
        except quic.QuicError as error:
            return self._receiver.read_failed(error)
        return self._advance(count)

    def interrupted(self, error: BaseException) -> None:
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
            self._operation = None  # the connection is lost, which the carrier reports

    def _is_whole(self, operation: quic.Operation) -> bool:
        return self._received + operation.transferred == self._size

    def _move_done(self, operation: quic.Operation, into: memoryview) -> bool:
        """Redirect a finished read; its handler, about to run, continues in the new memory."""
        if self._is_whole(operation):
            return False
        arrived = self._received + operation.transferred
        into[:arrived] = self._into[:arrived]
        self._into = into
        return True

    def landed(self, stream: quic.Stream) -> None:
        StreamEnd(self._receiver, stream)
        carrier = self._receiver.carrier
        if carrier is not None:
            self._receiver.call_sink(lambda sink: sink.payload_arrived(carrier, self._transfer))

    def _withdrawn(self) -> None:
        """The peer withdrew the payload. It stays expected, from byte 0, until the peer's link tells ours."""
        with self._table.lock:
            if self._dropped:
                return
            self.stream = None
            self._operation = None
            self._received = 0
        self._receiver.stream_ended()


class StreamEnd:
    """Checks that a payload's stream ends after its last byte."""

    __slots__ = ("_receiver",)

    def __init__(self, receiver: ReceiveStreams, stream: quic.Stream) -> None:
        self._receiver = receiver
        try:
            stream.post_read(bytearray(1), receiver.completions, token=self.ended)
        except quic.QuicError as error:
            receiver.read_failed(error)

    def ended(self, operation: quic.Operation) -> None:
        try:
            count = operation.result()
        except quic.StreamError:
            return self._receiver.stream_ended()  # reset after completion: all bytes are here
        except quic.QuicError as error:
            return self._receiver.read_failed(error)
        if count:
            return self._receiver.misbehaved("a payload longer than announced")
        return self._receiver.stream_ended()

    def interrupted(self, error: BaseException) -> None:
        self._receiver.interrupted(error)
