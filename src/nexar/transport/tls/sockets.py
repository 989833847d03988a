"""TCP sockets as this transport needs them: made from addresses, tuned, with reasons in words."""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

from nexar.transport.address import format_address, parse_address

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
    hurry(listener)
    return listener


def _dual_stack(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", port), backlog=_BACKLOG)


def begin_dial(dialing: socket.socket, address: SocketAddress) -> None:
    """Send a socket on its way to `address`: writable once it is there, or has failed. OSError if it cannot even go."""
    tune(dialing)
    hurry(dialing)
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


def hurry(connection: socket.socket) -> None:
    """Repeat what was lost every second, while a connection is being made; those a listener accepts do as it does.

    TCP waits twice as long each time, so as not to drown a network in data. A handshake is a few packets, and where a
    third is lost, several rounds of them have to come through. Kernels that cannot be told so go about it as usual.
    """
    _retry(connection, *_RETRY)


def calm(connection: socket.socket) -> None:
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
