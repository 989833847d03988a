"""One TCP connection of a carrier: its send queue, its receiver, and the end of the carrier.

Sending order: the rest of an item that has begun; then the lowest lane with a frame; then one chunk of the next
payload, in turns; FINISH last.

A carrier ends once, for one reason, reported to its sink at most once:

    open ──── send failed ────▶ broken ──── rest received ────▶ lost ── reported ──▶ over
      ├────── end of stream, protocol violation ─────────────▶ lost ── reported ──▶ over
      └────── aborted, or both sides finished ───────────────────── not reported ──▶ over

The connection's lock guards its channel and send queue. It is held for a few system calls, never during a sink call.
Any thread sends; only the driver receives.
"""

from __future__ import annotations

import errno
import ssl
from collections import deque
from dataclasses import dataclass
from threading import Lock
from typing import Final

from nexar.transport.base import Carrier, CarrierLost, Sink
from nexar.transport.payload_table import PayloadTable
from nexar.transport.tls.sockets import READABLE, WRITABLE, Channel, Ready, Selector
from nexar.wire.frame import HEADER_BYTES, Frame, FrameError, FrameKind, FrameReader, Lane, encode_chunk

_NO_LANE: Final = -1


@dataclass(slots=True)
class _Payload:
    transfer: int
    data: memoryview
    sent: int = 0

    def next_chunk(self, size_bytes: int) -> tuple[bytes, memoryview]:
        body = self.data[self.sent : self.sent + size_bytes]
        header = encode_chunk(self.transfer, self.sent, len(body))
        self.sent += len(body)
        return header, body

    @property
    def done(self) -> bool:
        return self.sent >= len(self.data)


class SendQueue:
    """Frames and payloads waiting for one connection, whose lock guards it."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._lanes: tuple[deque[bytes], ...] = tuple(deque() for _ in Lane)
        self._bytes = [0] * len(Lane)
        self._frames = 0  # in all lanes
        self._payloads: deque[_Payload] = deque()
        self._begun: deque[memoryview] = deque()  # parts of the item being sent
        self._begun_lane = _NO_LANE
        self._begun_transfer: int | None = None
        self._close_notice: bytes | None = None

    @property
    def empty(self) -> bool:
        return not (self._begun or self._frames or self._payloads or self._close_notice)

    def queued_bytes(self, lane: int) -> int:
        return self._bytes[lane]

    def push(self, lane: int, frame: bytes | memoryview) -> None:
        self._lanes[lane].append(frame)  # type: ignore[arg-type]
        self._bytes[lane] += len(frame)
        self._frames += 1

    def resume(self, lane: int, rest: memoryview) -> None:
        """Queue the rest of a frame. Only when the queue is empty."""
        self._begun.append(rest)
        self._begun_lane = lane
        self._bytes[lane] += len(rest)

    def push_payload(self, transfer: int, data: memoryview) -> None:
        """Raises ValueError if the transfer is queued already."""
        if any(payload.transfer == transfer for payload in self._payloads):
            raise ValueError(f"payload {transfer} is being sent already")
        self._payloads.append(_Payload(transfer, data))

    def withdraw(self, transfer: int) -> None:
        """Release the payload's memory; the rest of a chunk that has begun is copied."""
        self._payloads = deque(p for p in self._payloads if p.transfer != transfer)
        if self._begun_transfer == transfer:
            self._begun = deque(memoryview(bytes(part)) for part in self._begun)
            self._begun_transfer = None

    def send_close_notice(self, frame: bytes) -> None:
        self._close_notice = frame

    def next(self) -> tuple[memoryview, bool] | None:
        """Return the next bytes and whether more of the item follows; None when empty."""
        if not self._begun and not self._begin():
            return None
        return self._begun[0], len(self._begun) > 1

    def taken(self, count: int) -> None:
        part = self._begun[0]
        if count < len(part):
            self._begun[0] = part[count:]
        else:
            self._begun.popleft()
        if self._begun_lane != _NO_LANE:
            self._bytes[self._begun_lane] -= count

    def clear(self) -> None:
        for frames in self._lanes:
            frames.clear()
        self._bytes = [0] * len(Lane)
        self._frames = 0
        self._payloads.clear()
        self._begun.clear()
        self._begun_lane, self._begun_transfer = _NO_LANE, None
        self._close_notice = None

    def _begin(self) -> bool:
        self._begun_lane, self._begun_transfer = _NO_LANE, None
        if self._frames:
            self._begin_frame()
        elif self._payloads:
            self._begin_chunk()
        elif self._close_notice is not None:
            self._begun.append(memoryview(self._close_notice))
            self._close_notice = None
        return bool(self._begun)

    def _begin_frame(self) -> None:
        lane = next(number for number, frames in enumerate(self._lanes) if frames)
        self._begun.append(memoryview(self._lanes[lane].popleft()))
        self._begun_lane = lane
        self._frames -= 1

    def _begin_chunk(self) -> None:
        payload = self._payloads.popleft()
        header, body = payload.next_chunk(self._chunk_bytes)
        self._begun.append(memoryview(header))
        if len(body):
            self._begun.append(body)
        self._begun_transfer = payload.transfer
        if not payload.done:
            self._payloads.append(payload)


class CarrierEnd:
    """The end of a carrier. Thread-safe; each step happens once."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._broken: CarrierLost | None = None
        self._reported = False
        self.lost: CarrierLost | None = None  # once set, nothing more is delivered

    def lose(self, why: CarrierLost | None = None) -> CarrierLost:
        """The first reason counts."""
        with self._lock:
            if self.lost is None:
                self.lost = self._broken or why or CarrierLost("closed", "the carrier has ended")
            return self.lost

    def lose_silently(self, why: CarrierLost) -> CarrierLost:
        with self._lock:
            self._reported = True
        return self.lose(why)

    def break_off(self, why: CarrierLost) -> tuple[CarrierLost, bool]:
        """Return the reason and whether it is new."""
        with self._lock:
            if self._broken is not None:
                return self._broken, False
            self._broken = self.lost or why
            return self._broken, True

    @property
    def is_broken(self) -> bool:
        return self._broken is not None

    def take_report(self) -> CarrierLost | None:
        """Return the loss to report to the sink, at most once."""
        with self._lock:
            if self.lost is None or self._reported:
                return None
            self._reported = True
            return self.lost


class TlsConnection:
    """Methods that send raise OSError if the stream is broken."""

    def __init__(self, channel: Channel, reader: FrameReader, selector: Selector) -> None:
        self._selector = selector
        self.lock = Lock()
        self.channel = channel  # used under lock
        self.send_queue = SendQueue(channel.chunk_bytes)  # used under lock
        self.reader = reader  # used by the driver only
        self.descriptor = channel.socket.fileno()
        self.bytes_sent = 0  # written under lock
        self.bytes_received = 0  # written by the driving thread
        self.frames_sent = 0  # written under lock
        self.ended: CarrierLost | None = None  # written under lock, once
        self._finished = False  # written under lock
        self._watched = False  # written under lock: registered with the selector
        self._wants_write = False  # written under lock: the selector waits for WRITABLE

    def watch(self, ready: Ready) -> None:
        """Let the driver call `ready(events)`."""
        with self.lock:
            if self.ended is None:
                self._watched = True
                self._selector.add(self.descriptor, ready, self._events())

    @property
    def holds_input(self) -> bool:
        """Whether bytes wait that the socket no longer shows; half a frame does not count."""
        return self.channel.buffered

    def send(self, lane: int, frame: bytes) -> None:
        with self.lock:
            self._check()
            self.frames_sent += 1
            if self.send_queue.empty:
                self._send_first(lane, memoryview(frame))
            else:
                self.send_queue.push(lane, frame)

    def _send_first(self, lane: int, frame: memoryview) -> None:
        taken = self.channel.write(frame)
        self.bytes_sent += taken
        if taken < len(frame):
            self.send_queue.resume(lane, frame[taken:])
            self._pump()
        elif not self.channel.flush():
            self._want_write(True)

    def send_payload(self, transfer: int, data: memoryview) -> None:
        with self.lock:
            self._check()
            self.send_queue.push_payload(transfer, data)
            self._pump()

    def finish(self, close_notice: bytes) -> None:
        with self.lock:
            if not self._finished:
                self.check_open()
                self._finished = True
                self.send_queue.send_close_notice(close_notice)
                self._pump()

    def pump(self) -> bool:
        """Send within the budget. Returns whether nothing is left."""
        with self.lock:
            return self.ended is not None or self._pump()

    @property
    def close_notice_sent(self) -> bool:
        with self.lock:
            return self.ended is not None or (self._finished and self.send_queue.empty and self.channel.flush())

    def check_open(self) -> None:
        """The caller holds the lock."""
        if self.ended is not None:  # a new object each time: a second raise would extend the first traceback
            raise CarrierLost(self.ended.kind, self.ended.reason)

    def _check(self) -> None:
        self.check_open()
        if self._finished:
            raise CarrierLost("closed", "this side has finished")

    def _pump(self) -> bool:
        budget = self.channel.burst_bytes
        while budget > 0 and (part := self.send_queue.next()) is not None:
            taken = self.channel.write(part[0], more=part[1])
            if not taken:
                break
            self.send_queue.taken(taken)
            self.bytes_sent += taken
            budget -= taken
        drained = self.send_queue.empty and self.channel.flush()
        self._want_write(not drained)
        return drained

    def _want_write(self, wanted: bool) -> None:
        if wanted != self._wants_write:
            self._wants_write = wanted
            if self._watched:
                self._selector.change(self.descriptor, self._events())

    def _events(self) -> int:
        return READABLE | (WRITABLE if self._wants_write else 0)

    def fill(self, limit: int | None) -> int:
        """Return the bytes read, at most `limit`. Raises EOFError, OSError."""
        room = self.reader.room()
        with self.lock:
            if self.ended is not None:
                return 0
            count = self.channel.read_into(room if limit is None else room[:limit])
        self.reader.filled(count)
        self.bytes_received += count
        return count

    def close(self, why: CarrierLost) -> None:
        """Idempotent."""
        with self.lock:
            if self.ended is not None:
                return
            self.ended = why
            if self._watched:
                self._selector.remove(self.descriptor)
            self.channel.socket.close()
            self.channel.release()
            self.send_queue.clear()

    def abandon(self) -> None:
        self.channel.socket.close()


def carrier_lost_of(error: OSError | EOFError) -> CarrierLost:
    """Translate the end of a stream."""
    if isinstance(error, EOFError):
        return CarrierLost("peer", "the peer closed the connection")
    if isinstance(error, ssl.SSLError):
        return CarrierLost("misbehaved", f"the encrypted stream is broken: {error.reason or error}")
    reason = error.strerror or str(error)
    if error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH):
        return CarrierLost("timeout", reason)
    return CarrierLost("peer" if isinstance(error, ConnectionError) else "fault", reason)


_CHUNK, _FINISH = int(FrameKind.CHUNK), int(FrameKind.FINISH)
_OURS: Final = frozenset({_CHUNK, _FINISH, int(FrameKind.HELLO)})


class TlsReceiver:
    """Receives on one connection; driver only. Read errors and exceptions of the sink end the carrier. Without an
    inbox, payloads are violations.
    """

    sink: Sink  # set before anything is received; read at every call, because a sink may replace itself

    def __init__(self, connection: TlsConnection, ending: CarrierEnd, inbox: PayloadTable | None = None) -> None:
        self.connection = connection
        self.peer_finished = False
        self.frames_received = 0
        self._ending = ending
        self._inbox = inbox  # used under the connection's lock
        self._header_next = False  # a chunk has just ended

    def receive(self, carrier: Carrier) -> bool:
        """Receive within the budget. Returns whether any bytes came."""
        received = 0
        channel = self.connection.channel
        while self._ending.lost is None and received < channel.burst_bytes:
            count = self._take(carrier)
            received += count
            if not count or (channel.exhausted and not channel.buffered):
                break
        return received > 0

    @property
    def holds_input(self) -> bool:
        return self._ending.lost is None and self.connection.holds_input

    def _take(self, carrier: Carrier) -> int:
        if self._inbox is not None and self._inbox.missing:
            count, complete = self._read_chunk(self._inbox)
            if complete is not None and self._ending.lost is None:
                self.sink.payload_arrived(carrier, complete)
            return count
        count = self._fill()
        self._dispatch(carrier)
        return count

    def _fill(self) -> int:
        # After a chunk another is likely: read only its header, so that its body need not be copied.
        limit = HEADER_BYTES if self._header_next else None
        self._header_next = False
        try:
            return self.connection.fill(limit)
        except (EOFError, OSError) as error:
            return self._end_of_stream(error)

    def _read_chunk(self, inbox: PayloadTable) -> tuple[int, int | None]:
        connection = self.connection
        try:
            with connection.lock:
                if connection.ended is not None:
                    return 0, None
                place = inbox.destination()
                if place is None:  # discard into the reader's memory: the reader is empty now
                    place = connection.reader.room()[: inbox.missing]
                count = connection.channel.read_into(place)
                complete = inbox.took(count)
        except (EOFError, OSError) as error:
            return self._end_of_stream(error), None
        connection.bytes_received += count
        self._header_next = not inbox.missing
        return count, complete

    def _end_of_stream(self, error: EOFError | OSError) -> int:
        if isinstance(error, EOFError) and self.peer_finished and self.connection.close_notice_sent:
            # The peer has everything and closed first. The other connection will show the same.
            self.connection.close(CarrierLost("closed", "both sides have finished"))
        else:
            self._ending.lose(carrier_lost_of(error))
        return 0

    def _dispatch(self, carrier: Carrier) -> None:
        while self._ending.lost is None and (found := self._next()) is not None:
            frame, body = found
            if frame.kind in _OURS or self.peer_finished:
                self._handle(carrier, frame, body)
            else:
                self.frames_received += 1
                self.sink.frame_arrived(carrier, frame, body)

    def _next(self) -> tuple[Frame, memoryview] | None:
        try:
            return self.connection.reader.next()
        except FrameError as error:
            self._ending.lose(CarrierLost("misbehaved", str(error)))
            return None

    def _handle(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        if self.peer_finished:
            self._ending.lose(CarrierLost("misbehaved", f"a frame of kind {frame.kind} after FINISH"))
        elif frame.kind == _FINISH:
            self.peer_finished = True
        elif frame.kind == _CHUNK and self._inbox is not None:
            complete = self._begin_chunk(self._inbox, frame, body)
            if complete is not None:
                self.sink.payload_arrived(carrier, complete)
        else:
            self._ending.lose(CarrierLost("misbehaved", f"a frame of kind {frame.kind} is not allowed here"))

    def _begin_chunk(self, inbox: PayloadTable, frame: Frame, body: memoryview) -> int | None:
        try:
            with self.connection.lock:
                complete = inbox.begin(frame, body)
        except CarrierLost as error:
            self._ending.lose(error)
            return None
        self._header_next = not inbox.missing
        return complete
