"""Sockets of the TLS transport: the selector, socket options, and channels that encrypt or pass bytes through."""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import struct
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import local
from typing import Any, Final, Protocol, TypeAlias

from nexar.transport.address import format_address, parse_address
from nexar.transport.base import Waker
from nexar.wire.frame import MAX_CHUNK_BYTES

Ready: TypeAlias = Callable[[int], bool]  # called by the driver with a descriptor's events; True if anything happened

READABLE: Final = select.POLLIN
WRITABLE: Final = select.POLLOUT


class Selector:
    """Callbacks by descriptor. Any thread, except `run_once`."""

    def __init__(self, waker: Waker) -> None:
        self._waker = waker
        # epoll and poll use the same event bits, and a timeout of 0 means the same to both.
        self._poller = select.epoll() if hasattr(select, "epoll") else select.poll()
        self._ready: dict[int, Ready] = {}  # any thread; single dict operations
        # Work that no descriptor shows: buffered bytes, ends to report. Any thread appends.
        self._soon: deque[Callable[[], bool]] = deque()

    def add(self, descriptor: int, ready: Ready, events: int = READABLE) -> None:
        self._ready[descriptor] = ready
        self._poller.register(descriptor, events)
        self._waker.watch(descriptor, readable=bool(events & READABLE), writable=bool(events & WRITABLE))

    def change(self, descriptor: int, events: int) -> None:
        self._poller.modify(descriptor, events)
        self._waker.watch(descriptor, readable=bool(events & READABLE), writable=bool(events & WRITABLE))

    def remove(self, descriptor: int) -> None:
        """Call it before closing the descriptor."""
        self._waker.unwatch(descriptor)
        self._poller.unregister(descriptor)
        del self._ready[descriptor]

    def call_soon(self, work: Callable[[], bool]) -> None:
        """Let the driver call `work` in its next round."""
        self._soon.append(work)
        self._waker.wake()

    @property
    def has_more(self) -> bool:
        return bool(self._soon)

    def run_once(self) -> bool:
        """Call what is ready, without blocking. Returns whether anything happened."""
        happened = False
        for _ in range(len(self._soon)):
            happened |= self._soon.popleft()()
        for descriptor, events in self._poller.poll(0):
            # Another thread may have closed the descriptor and reused its number: the new owner finds nothing to read.
            ready = self._ready.get(descriptor)
            if ready is not None:
                happened |= ready(events)
        return happened

    def close(self) -> None:
        """In a forked child the parent's registrations remain."""
        if isinstance(self._poller, select.epoll):
            self._poller.close()


SocketAddress: TypeAlias = tuple[str, int] | tuple[str, int, int, int]

# A frame waits behind the payload bytes that both kernels hold. Limiting unsent bytes bounds the sender's part. The
# receiver's buffer would grow to tens of megabytes under a slow reader. A fixed size prevents that but caps the speed
# at size / round trip, so only near peers get one, where the cap exceeds any speed we reach.
_UNSENT_BYTES: Final = 128 << 10
_UNREAD_BYTES: Final = 1 << 20
# Without frames that wait, a connection may hold a whole payload unsent: each refill costs a wakeup.
_UNSENT_BULK_BYTES: Final = 2 << 20
_TOP_SPEED: Final = 2e9  # bytes per second
_LARGEST_BUFFER: Final = Path("/proc/sys/net/core/rmem_max")
_ROUND_TRIP: Final = struct.Struct("=68xI")  # tcpi_rtt (microseconds) in Linux's tcp_info
_RETRY: Final = (44, 1000)  # TCP_RTO_MAX_MS of Linux 6.15, which Python does not name, and its minimum of one second
_RETRY_AS_USUAL: Final = 120_000
_BACKLOG: Final = 1024
# an idle connection to a vanished host ends after 30 s
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))


def resolve(text: str) -> list[tuple[int, SocketAddress]]:
    """Return every (family, socket address). Raises OSError."""
    host, port = parse_address(text)
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))  # type: ignore[misc]


def open_listener(text: str) -> socket.socket:
    """An empty host or `[::]` accepts IPv4 and IPv6. Raises OSError."""
    host, port = parse_address(text)
    if host in ("", "::"):
        listener = _dual_stack(port)
    else:
        family, address = resolve(text)[0]
        listener = socket.create_server(address, family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    request_fast_retry(listener)
    return listener


def _dual_stack(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", port), backlog=_BACKLOG)


def begin_dial(dialing: socket.socket, address: SocketAddress) -> None:
    """Start connecting; the socket becomes writable on success or failure. Raises OSError."""
    tune(dialing)
    request_fast_retry(dialing)
    number = dialing.connect_ex(address)
    if number not in (0, errno.EINPROGRESS):
        raise OSError(number, os.strerror(number))


def tune(connection: socket.socket) -> None:
    """Non-blocking, no Nagle, keepalive, few unsent bytes."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    _limit_unsent(connection, _UNSENT_BYTES)


def widen(connection: socket.socket) -> None:
    """Allow more unsent bytes on a connection that carries only large payloads."""
    _limit_unsent(connection, _UNSENT_BULK_BYTES)


def _limit_unsent(connection: socket.socket, size_bytes: int) -> None:
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, size_bytes)


def request_fast_retry(connection: socket.socket) -> None:
    """Retransmit every second while connecting, without exponential backoff. Accepted sockets inherit it. Older kernels
    keep their default.
    """
    _retry(connection, *_RETRY)


def restore_retry(connection: socket.socket) -> None:
    """Undo `request_fast_retry` after the handshake."""
    _retry(connection, _RETRY[0], _RETRY_AS_USUAL)


def _retry(connection: socket.socket, option: int, milliseconds: int) -> None:
    if sys.platform == "linux":
        with suppress(OSError):  # Linux before 6.15
            connection.setsockopt(socket.IPPROTO_TCP, option, milliseconds)


def limit_unread(connection: socket.socket) -> None:
    """Limit the receive buffer of a near peer, where this does not limit the speed."""
    if not (hasattr(socket, "TCP_INFO") and _LARGEST_BUFFER.exists()):
        return
    size = min(_UNREAD_BYTES, int(_LARGEST_BUFFER.read_text()))
    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP.size)
    (microseconds,) = _ROUND_TRIP.unpack(information)
    if size / _TOP_SPEED >= microseconds / 1e6:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)


def address_text(place: tuple[Any, ...]) -> str:
    """Return the text of a socket address of any family."""
    return format_address(str(place[0]), int(place[1]))


def pending_error(connection: socket.socket) -> str | None:
    """Return why a dial failed, or None."""
    number = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return os.strerror(number) if number else None


Buffer: TypeAlias = bytes | bytearray | memoryview

# bytes per read and write, four full TLS records; measured: more costs cache misses, less system calls
PIECE_BYTES: Final = 64 << 10


class _Staging(local):
    """One buffer per thread between socket and engine: allocating one per read costs more."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(PIECE_BYTES))


_staging: Final = _Staging()
_MSG_MORE: Final = getattr(socket, "MSG_MORE", 0)


class Channel(Protocol):
    """The bytes of one connection. Never blocks, takes no locks; one thread at a time."""

    socket: socket.socket
    exhausted: bool  # the last read emptied the socket; another would waste a system call
    burst_bytes: int  # limit per send and per receive, so that the caller returns to its other work
    # size of payload chunks, between which frames are sent; each costs a header and a few system calls
    chunk_bytes: int

    def read_into(self, view: memoryview) -> int:
        """Return the bytes read, 0 if none. Raises EOFError at the end of the stream, OSError."""

    def write(self, data: memoryview, *, more: bool = False) -> int:
        """Return the number of bytes taken. `more`: more follows at once."""

    def flush(self) -> bool:
        """Returns whether nothing is left to send."""

    @property
    def buffered(self) -> bool:
        """Whether data may be readable although the socket is not."""

    def release(self) -> None:
        """Free its memory now: the garbage collector counts objects, not bytes."""


class TlsChannel:
    """Bytes through TLS.

    The engine works on memory, so one system call moves several records, and bytes after the end of TLS stay in our
    buffer. A burst takes 0.25 ms. A frame waits for at most one chunk: 0.5 ms at 1 GB/s.
    """

    burst_bytes = 256 << 10
    chunk_bytes = 512 << 10

    def __init__(
        self, connection: socket.socket, context: ssl.SSLContext, *, server_side: bool, server_name: str | None = None
    ) -> None:
        self.socket = connection
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self.engine = context.wrap_bio(self._incoming, self._outgoing, server_side, server_name)
        self.exhausted = False
        self._unsent: memoryview | None = None  # encrypted bytes that the socket has not taken
        self._engine_empty = True  # the engine needs more input

    def receive(self) -> bool:
        """Returns False if the socket has nothing. Raises EOFError."""
        staging = _staging.view
        try:
            count = self.socket.recv_into(staging)
        except BlockingIOError:
            return False
        if not count:
            raise EOFError
        self._incoming.write(staging[:count])
        self.exhausted = count < PIECE_BYTES
        self._engine_empty = False
        return True

    def read_into(self, view: memoryview) -> int:
        if not self._engine_empty and (count := self._open(view)):
            return count
        return self._open(view) if self.receive() else 0

    def _open(self, view: memoryview) -> int:
        read, incoming, size, got = self.engine.read, self._incoming, len(view), 0
        try:
            while got < size:
                count: int = read(size - got, view[got:])  # type: ignore[assignment]  # typeshed lacks this overload
                if not count:
                    return self._end_of_stream(got)
                got += count
                # Avoid a slow exception: check whether the next read would only raise "want read".
                if not incoming.pending and not self.engine.pending():
                    self._engine_empty = True
                    break
        except ssl.SSLWantReadError:
            self._engine_empty = True
        return got

    def _end_of_stream(self, got: int) -> int:
        if not got:
            raise EOFError
        return got

    def write(self, data: memoryview, *, more: bool = False) -> int:
        if self._unsent is not None and not self.flush():
            return 0
        taken = self.engine.write(data[:PIECE_BYTES])
        if not more:
            self.flush()
        return taken

    def flush(self) -> bool:
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
        return not self._engine_empty

    @property
    def holds_output(self) -> bool:
        return self._unsent is not None or self._outgoing.pending > 0

    def release(self) -> None:
        del self.engine
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._unsent = None

    def remainder(self) -> bytes:
        """Return the plain bytes received after the end of TLS."""
        return self._incoming.read()


class PlainChannel:
    """Bytes unchanged, for large payloads only. Large bursts save wakeups of the driver."""

    burst_bytes = 1 << 20
    chunk_bytes = MAX_CHUNK_BYTES

    def __init__(self, connection: socket.socket, first: bytes = b"") -> None:
        self.socket = connection
        self.exhausted = False
        self._first = memoryview(first)

    def read_into(self, view: memoryview) -> int:
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
        try:
            return self.socket.send(data, _MSG_MORE if more else 0)
        except BlockingIOError:
            return 0

    def flush(self) -> bool:
        return True

    @property
    def buffered(self) -> bool:
        return len(self._first) > 0

    def release(self) -> None:
        self._first = memoryview(b"")
