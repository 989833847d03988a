"""Which descriptors of this transport have news, in one system call.

The transport keeps its own list beside the Waker's: the Waker ends a sleep without saying why, and a thread that does
not sleep must learn what there is to do for the price of one call, whatever the number of peers.

TCP sockets as this transport needs them: made from addresses, tuned, with reasons in words.

A TCP socket and what it does to bytes: TLS, or nothing.

The TLS engine works on memory, not on the socket. So one system call brings several records and one takes several
away, the engine never decides when to read, and after the engine is shut down not a byte of the stream behind it is
lost: what it has not consumed lies in our buffer.

Neither class locks anything. Both are used by one thread at a time, which their connection sees to.
"""

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

Ready: TypeAlias = Callable[[int], bool]
"""Called by the driving thread with the events of a descriptor; True if anything happened."""

READABLE: Final = select.POLLIN
WRITABLE: Final = select.POLLOUT


class Selector:
    """Descriptors and what to call for them. Every method but `turn` may be called from any thread."""

    def __init__(self, waker: Waker) -> None:
        self._waker = waker
        # epoll and poll number their events alike, and a timeout of 0 means the same to both.
        self._poller = select.epoll() if hasattr(select, "epoll") else select.poll()
        self._ready: dict[int, Ready] = {}  # any thread, one step at a time
        # Work that no descriptor shows: bytes that are in our memory already, ends to be told. Any thread appends.
        self._again: deque[Callable[[], bool]] = deque()

    def add(self, descriptor: int, ready: Ready, events: int = READABLE) -> None:
        """Watch a descriptor until it is removed."""
        self._ready[descriptor] = ready
        self._poller.register(descriptor, events)
        self._waker.watch(descriptor, readable=bool(events & READABLE), writable=bool(events & WRITABLE))

    def change(self, descriptor: int, events: int) -> None:
        """Watch it for something else."""
        self._poller.modify(descriptor, events)
        self._waker.watch(descriptor, readable=bool(events & READABLE), writable=bool(events & WRITABLE))

    def remove(self, descriptor: int) -> None:
        """Must be called before the descriptor is closed."""
        self._waker.unwatch(descriptor)
        self._poller.unregister(descriptor)
        del self._ready[descriptor]

    def again(self, work: Callable[[], bool]) -> None:
        """Have the driving thread call `work` at its next turn."""
        self._again.append(work)
        self._waker.wake()

    @property
    def has_more(self) -> bool:
        """Something waits that no descriptor shows."""
        return bool(self._again)

    def turn(self) -> bool:
        """Look once, without waiting, and call whoever has news. True if anything happened."""
        happened = False
        for _ in range(len(self._again)):
            happened |= self._again.popleft()()
        for descriptor, events in self._poller.poll(0):
            # Another thread may have closed it meanwhile, and even have opened a new one under the same number: that
            # one then finds nothing to read, which is no harm.
            ready = self._ready.get(descriptor)
            if ready is not None:
                happened |= ready(events)
        return happened

    def close(self) -> None:
        """Free the descriptor, if there is one. In a forked child this leaves the parent's registrations alone."""
        if isinstance(self._poller, select.epoll):
            self._poller.close()


SocketAddress: TypeAlias = tuple[str, int] | tuple[str, int, int, int]

# A frame waits behind whatever the two kernels hold of a payload that left before it. The sender's may hold little that
# is unsent. The receiver's would grow to tens of megabytes under a reader slower than the wire; a fixed size prevents
# that, but caps the speed at size / round trip, so only near peers get one, where that cap is above any speed we reach.
_UNSENT_BYTES: Final = 128 << 10
_UNREAD_BYTES: Final = 1 << 20
# A connection on which no frame waits may hold a whole payload unsent: each time it asks for more, somebody must wake.
_UNSENT_BULK_BYTES: Final = 2 << 20
_TOP_SPEED: Final = 2e9
"""Bytes per second."""
_LARGEST_BUFFER: Final = Path("/proc/sys/net/core/rmem_max")
_ROUND_TRIP: Final = struct.Struct("=68xI")
"""tcpi_rtt, in microseconds, in Linux's tcp_info."""
_RETRY: Final = (44, 1000)
"""TCP_RTO_MAX_MS of Linux 6.15, which Python does not name, and a second, the least it takes."""
_RETRY_AS_USUAL: Final = 120_000
_BACKLOG: Final = 1024
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
"""A host that vanished is noticed after 30 s on an idle connection, where nobody noticed earlier."""


def resolve(text: str) -> list[tuple[int, SocketAddress]]:
    """Every (family, socket address) that `text` names. OSError if there is none."""
    host, port = parse_address(text)
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))  # type: ignore[misc]


def open_listener(text: str) -> socket.socket:
    """A listening socket. An empty host, or `[::]`, takes both IPv4 and IPv6. OSError if it cannot."""
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
    """Send a socket on its way to `address`: writable once it is there, or has failed. OSError if it cannot even go."""
    tune(dialing)
    request_fast_retry(dialing)
    number = dialing.connect_ex(address)
    if number not in (0, errno.EINPROGRESS):
        raise OSError(number, os.strerror(number))


def tune(connection: socket.socket) -> None:
    """Non-blocking, sending at once, with a short queue of unsent bytes."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    _limit_unsent(connection, _UNSENT_BYTES)


def widen(connection: socket.socket) -> None:
    """It carries large payloads and nothing else: let it take more of one at a time."""
    _limit_unsent(connection, _UNSENT_BULK_BYTES)


def _limit_unsent(connection: socket.socket, size_bytes: int) -> None:
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, size_bytes)


def request_fast_retry(connection: socket.socket) -> None:
    """Repeat what was lost every second, while a connection is being made; those a listener accepts do as it does.

    TCP waits twice as long each time, so as not to drown a network in data. A handshake is a few packets, and where a
    third is lost, several rounds of them have to come through. Kernels that cannot be told so go about it as usual.
    """
    _retry(connection, *_RETRY)


def restore_retry(connection: socket.socket) -> None:
    """It is made: from now on as usual."""
    _retry(connection, _RETRY[0], _RETRY_AS_USUAL)


def _retry(connection: socket.socket, option: int, milliseconds: int) -> None:
    if sys.platform == "linux":
        with suppress(OSError):  # older than 6.15
            connection.setsockopt(socket.IPPROTO_TCP, option, milliseconds)


def limit_unread(connection: socket.socket) -> None:
    """Keep the queue of received bytes short, if the peer is near enough for that to cost no speed."""
    if not (hasattr(socket, "TCP_INFO") and _LARGEST_BUFFER.exists()):
        return
    size = min(_UNREAD_BYTES, int(_LARGEST_BUFFER.read_text()))
    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP.size)
    (microseconds,) = _ROUND_TRIP.unpack(information)
    if size / _TOP_SPEED >= microseconds / 1e6:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)


def address_text(place: tuple[Any, ...]) -> str:
    """The text of a socket address, of any family."""
    return format_address(str(place[0]), int(place[1]))


def pending_error(connection: socket.socket) -> str | None:
    """Why a dial failed; None if it did not."""
    number = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return os.strerror(number) if number else None


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
