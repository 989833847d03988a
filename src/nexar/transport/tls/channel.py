"""A TCP socket and what it does to bytes: TLS, or nothing.

The TLS engine works on memory, not on the socket. So one system call brings several records and one takes several
away, the engine never decides when to read, and after the engine is shut down not a byte of the stream behind it is
lost: what it has not consumed lies in our buffer.

Neither class locks anything. Both are used by one thread at a time, which their connection sees to.
"""

from __future__ import annotations

import socket
import ssl
from threading import local
from typing import Final, Protocol, TypeAlias

from nexar.wire.codec import MAX_CHUNK_BYTES

Buffer: TypeAlias = bytes | bytearray | memoryview

PIECE_BYTES: Final = 64 << 10
"""Taken per read and per write: four full TLS records. Measured: more costs cache misses, less costs system calls."""


class _Staging(local):
    """Where sealed bytes lie between socket and engine: one per thread, because a fresh buffer per read costs more."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(PIECE_BYTES))


_staging: Final = _Staging()
_MSG_MORE: Final = getattr(socket, "MSG_MORE", 0)


class Channel(Protocol):
    """Bytes of one connection, in order, never blocking."""

    socket: socket.socket
    exhausted: bool
    """The last read took all there was: the next one would only find that out again, at the price of a system call."""
    burst_bytes: int
    """Sent, and taken in, in one go at most, so that whoever does it gets back to its other work."""
    chunk_bytes: int
    """Of a payload, between which frames may go. A choice: each chunk costs a header and a few system calls."""

    def read_into(self, view: memoryview) -> int:
        """Bytes put into `view`; 0: none for now. EOFError when the peer has closed; OSError when it is broken."""

    def write(self, data: memoryview, *, more: bool = False) -> int:
        """How much of `data` was taken. `more`: something follows at once, so nothing need leave yet."""

    def flush(self) -> bool:
        """Try to send what was taken; True when nothing is left."""

    @property
    def buffered(self) -> bool:
        """Something may be readable although the socket is not."""

    def release(self) -> None:
        """Free its memory; nothing is read or written any more. Not left to the garbage collector, which counts objects
        and not bytes: connections that come and go quickly would pile up.
        """


class TlsChannel:
    """Bytes through TLS.

    A burst takes a quarter of a millisecond. (With 1 MiB a small message beside a transfer took 3 ms instead of 1, and
    one in a hundred 10.) A frame waits for one chunk at most: half a millisecond at a gigabyte per second.
    """

    burst_bytes = 256 << 10
    chunk_bytes = 512 << 10

    def __init__(
        self, connection: socket.socket, context: ssl.SSLContext, *, server_side: bool, server_name: str | None = None
    ) -> None:
        """Takes the socket over; nothing is sent or read yet."""
        self.socket = connection
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self.engine = context.wrap_bio(self._incoming, self._outgoing, server_side, server_name)
        self.exhausted = False
        self._unsent: memoryview | None = None  # sealed bytes the socket has not taken
        self._dry = True  # the engine has nothing to give before more bytes come

    def receive(self) -> bool:
        """Fetch what the socket has; False if that is nothing. EOFError at its end."""
        staging = _staging.view
        try:
            count = self.socket.recv_into(staging)
        except BlockingIOError:
            return False
        if not count:
            raise EOFError
        self._incoming.write(staging[:count])
        self.exhausted = count < PIECE_BYTES
        self._dry = False
        return True

    def read_into(self, view: memoryview) -> int:
        """See Channel.read_into."""
        if not self._dry and (count := self._open(view)):
            return count
        return self._open(view) if self.receive() else 0

    def _open(self, view: memoryview) -> int:
        read, incoming, size, got = self.engine.read, self._incoming, len(view), 0
        try:
            while got < size:
                count: int = read(size - got, view[got:])  # type: ignore[assignment]  # typeshed forgets this form
                if not count:
                    return self._end_of_stream(got)
                got += count
                # Exceptions are slow: look first whether the next read would only say "want more".
                if not incoming.pending and not self.engine.pending():
                    self._dry = True
                    break
        except ssl.SSLWantReadError:
            self._dry = True
        return got

    def _end_of_stream(self, got: int) -> int:
        if not got:
            raise EOFError
        return got

    def write(self, data: memoryview, *, more: bool = False) -> int:
        """See Channel.write."""
        if self._unsent is not None and not self.flush():
            return 0
        taken = self.engine.write(data[:PIECE_BYTES])
        if not more:
            self.flush()
        return taken

    def flush(self) -> bool:
        """See Channel.flush."""
        if self._unsent is None:
            if not self._outgoing.pending:
                return True
            self._unsent = memoryview(self._outgoing.read())
        try:
            rest = self._unsent[self.socket.send(self._unsent) :]
        except BlockingIOError:
            return False
        self._unsent = rest if len(rest) else None
        return self._unsent is None

    @property
    def buffered(self) -> bool:
        """See Channel.buffered."""
        return not self._dry

    @property
    def holds_output(self) -> bool:
        """Sealed bytes wait for the socket."""
        return self._unsent is not None or self._outgoing.pending > 0

    def release(self) -> None:
        """See Channel.release."""
        del self.engine
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._unsent = None

    def remainder(self) -> bytes:
        """After TLS was shut down: bytes of the plain stream that came along."""
        return self._incoming.read()


class PlainChannel:
    """Bytes as they are: large payloads, which no frame waits behind. What is left to save is turns of the thread that
    drives, which cost it the core of whoever computes.
    """

    burst_bytes = 1 << 20
    chunk_bytes = MAX_CHUNK_BYTES

    def __init__(self, connection: socket.socket, first: bytes = b"") -> None:
        """`first`: bytes of the stream that were read already."""
        self.socket = connection
        self.exhausted = False
        self._first = memoryview(first)

    def read_into(self, view: memoryview) -> int:
        """See Channel.read_into."""
        if self._first:
            return self._replay(view)
        try:
            count = self.socket.recv_into(view)
        except BlockingIOError:
            return 0
        if not count:
            raise EOFError
        self.exhausted = count < len(view)
        return count

    def _replay(self, view: memoryview) -> int:
        count = min(len(view), len(self._first))
        view[:count] = self._first[:count]
        self._first = self._first[count:]
        return count

    def write(self, data: memoryview, *, more: bool = False) -> int:
        """See Channel.write."""
        try:
            return self.socket.send(data, _MSG_MORE if more else 0)
        except BlockingIOError:
            return 0

    def flush(self) -> bool:
        """See Channel.flush."""
        return True

    @property
    def buffered(self) -> bool:
        """See Channel.buffered."""
        return len(self._first) > 0

    def release(self) -> None:
        """See Channel.release."""
        self._first = memoryview(b"")
