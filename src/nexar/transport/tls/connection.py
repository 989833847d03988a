"""One of a carrier's two TCP connections, once it is authenticated.

Everything that touches the channel or the outbox happens under the connection's lock; it is held for the time of a few
system calls and never while a sink is called. Reading is done by the driving thread alone, writing by whoever sends.
"""

from __future__ import annotations

import errno
import ssl
from threading import Lock

from nexar.transport.base import CarrierLost
from nexar.transport.tls.channel import Channel
from nexar.transport.tls.outbox import Outbox
from nexar.transport.tls.reactor import READABLE, WRITABLE, Reactor, Ready
from nexar.wire.codec import FrameReader


class Connection:
    """A byte stream to the peer, with its queue. OSError from any method that sends: the stream is broken."""

    def __init__(self, channel: Channel, reader: FrameReader, reactor: Reactor) -> None:
        """`reader` may hold bytes that came along with the handshake."""
        self._reactor = reactor
        self.lock = Lock()
        self.channel = channel  # used under lock
        self.outbox = Outbox(channel.chunk_bytes)  # used under lock
        self.reader = reader  # used by the driving thread only
        self.descriptor = channel.socket.fileno()
        self.bytes_sent = 0  # written under lock
        self.bytes_received = 0  # written by the driving thread
        self.frames_sent = 0  # written under lock
        self.ended: CarrierLost | None = None  # written under lock, once
        self._finished = False  # written under lock
        self._watched = False  # written under lock: the reactor knows us
        self._wants_write = False  # written under lock: the reactor was told to wait for room to write

    def watch(self, ready: Ready) -> None:
        """From now on the driving thread calls `ready(events)` when the socket has news."""
        with self.lock:
            if self.ended is None:
                self._watched = True
                self._reactor.add(self.descriptor, ready, self._events())

    @property
    def holds_input(self) -> bool:
        """Bytes wait to be read that the socket does not show any more. (Half a frame in the reader waits for more.)"""
        return self.channel.buffered

    def send(self, lane: int, frame: bytes) -> None:
        """Send a frame now if nothing is waiting and the socket takes it, else later."""
        with self.lock:
            self._check()
            self.frames_sent += 1
            if self.outbox.empty:
                self._send_first(lane, memoryview(frame))
            else:
                self.outbox.push(lane, frame)

    def _send_first(self, lane: int, frame: memoryview) -> None:
        taken = self.channel.write(frame)
        self.bytes_sent += taken
        if taken < len(frame):
            self.outbox.resume(lane, frame[taken:])
            self._pump()
        elif not self.channel.flush():
            self._want_write(True)

    def send_payload(self, transfer: int, data: memoryview) -> None:
        """Queue a payload and send what the socket takes of it."""
        with self.lock:
            self._check()
            self.outbox.push_payload(transfer, data)
            self._pump()

    def finish(self, farewell: bytes) -> None:
        """Queue the last frame and send it if nothing is waiting. Idempotent."""
        with self.lock:
            if not self._finished:
                self.check_open()
                self._finished = True
                self.outbox.say_farewell(farewell)
                self._pump()

    def pump(self) -> bool:
        """Send what is queued, as far as the socket and the budget go; True if all is gone."""
        with self.lock:
            return self.ended is not None or self._pump()

    @property
    def said_farewell(self) -> bool:
        """This side has finished, and its last byte has left."""
        with self.lock:
            return self.ended is not None or (self._finished and self.outbox.empty and self.channel.flush())

    def check_open(self) -> None:
        """Raise CarrierLost if it was closed. Under lock."""
        if self.ended is not None:  # a new object each time: one raised twice would carry the first one's frames along
            raise CarrierLost(self.ended.kind, self.ended.reason)

    def _check(self) -> None:
        self.check_open()
        if self._finished:
            raise CarrierLost("closed", "this side has finished")

    def _pump(self) -> bool:
        budget = self.channel.burst_bytes
        while budget > 0 and (part := self.outbox.next()) is not None:
            taken = self.channel.write(part[0], more=part[1])
            if not taken:
                break
            self.outbox.taken(taken)
            self.bytes_sent += taken
            budget -= taken
        drained = self.outbox.empty and self.channel.flush()
        self._want_write(not drained)
        return drained

    def _want_write(self, wanted: bool) -> None:
        if wanted != self._wants_write:
            self._wants_write = wanted
            if self._watched:
                self._reactor.change(self.descriptor, self._events())

    def _events(self) -> int:
        return READABLE | (WRITABLE if self._wants_write else 0)

    def fill(self, limit: int | None) -> int:
        """Read into the frame reader, up to `limit` bytes; how many came. EOFError, OSError as the channel."""
        room = self.reader.room()
        with self.lock:
            if self.ended is not None:
                return 0
            count = self.channel.read_into(room if limit is None else room[:limit])
        self.reader.filled(count)
        self.bytes_received += count
        return count

    def close(self, why: CarrierLost) -> None:
        """Close the socket and let all memory go; sending raises `why` from now on. Idempotent."""
        with self.lock:
            if self.ended is not None:
                return
            self.ended = why
            if self._watched:
                self._reactor.remove(self.descriptor)
            self.channel.socket.close()
            self.channel.release()
            self.outbox.clear()

    def abandon(self) -> None:
        """In a forked child: the descriptor and nothing else; the lock may be held by a thread that is not here."""
        self.channel.socket.close()


def as_loss(error: OSError | EOFError) -> CarrierLost:
    """What the end of a stream says about the peer."""
    if isinstance(error, EOFError):
        return CarrierLost("peer", "the peer closed the connection")
    if isinstance(error, ssl.SSLError):
        return CarrierLost("misbehaved", f"the encrypted stream is broken: {error.reason or error}")
    reason = error.strerror or str(error)
    if error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH):
        return CarrierLost("timeout", reason)
    return CarrierLost("peer" if isinstance(error, ConnectionError) else "fault", reason)
