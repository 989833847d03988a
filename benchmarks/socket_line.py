"""The reference: blocking stdlib sockets, as one writes them by hand. Plain TCP, or TLS with two certificates.

Nagle off, one `sendall` per message, `recv_into` straight into the destination. A TLS socket must not be read and
written by two threads at once, so data in both directions at once uses two connections, one for each.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from memory import touched

from nexar.security.certificates import Credentials, Trust, node_name
from nexar.security.tls import client_context, server_context

_ACKNOWLEDGEMENT = b"all of it"


class SocketLine:
    """Two connections to the same peer. Large data goes out on one, comes in on the other, small use the first."""

    def __init__(self, first: socket.socket, second: socket.socket, *, dialed: bool) -> None:
        self.first = first
        self.out, self.into = (first, second) if dialed else (second, first)
        for connection in (first, second):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(60.0)


class SocketNode:
    """See Assembly. The scheme is `plain` or `tls`."""

    def __init__(self, credentials: Credentials, trust: Trust, schemes: Sequence[str], *, host: str, **_: Any) -> None:
        self._secure = list(schemes) == ["tls"]
        self._credentials, self._trust = credentials, trust
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._open: list[socket.socket] = [self._listener]

    def addresses_for(self, peer: int) -> dict[str, str]:
        """See Assembly."""
        host, port = self._listener.getsockname()[:2]
        return {"sockets": f"{host} {port}"}

    def connect(self, peer: int, addresses: Mapping[str, str], timeout: float) -> SocketLine:
        """See Assembly."""
        host, port = addresses["sockets"].split()
        name = node_name(peer, self._credentials.cluster)
        plain = [socket.create_connection((host, int(port)), timeout) for _ in range(2)]
        context = client_context(self._credentials, self._trust)
        first, second = (self._keep(c, lambda c: context.wrap_socket(c, server_hostname=name)) for c in plain)
        return SocketLine(first, second, dialed=True)

    def accept(self, timeout: float) -> SocketLine:
        """See Assembly."""
        self._listener.settimeout(timeout)
        context = server_context(self._credentials, self._trust)
        plain = [self._listener.accept()[0] for _ in range(2)]
        first, second = (self._keep(c, lambda c: context.wrap_socket(c, server_side=True)) for c in plain)
        return SocketLine(first, second, dialed=False)

    def _keep(self, plain: socket.socket, secure: Any) -> socket.socket:
        plain.settimeout(30.0)
        kept: socket.socket = secure(plain) if self._secure else plain
        self._open.append(kept)
        return kept

    def close(self) -> None:
        """See Assembly."""
        for kept in self._open:
            kept.close()


class SocketTalker:
    """See Talker."""

    def __init__(self, node: SocketNode, line: SocketLine) -> None:
        self._state = line

    def prepare(self, size: int) -> None:
        """See Talker."""
        self.outgoing, self.incoming = memoryview(bytearray(size)), memoryview(bytearray(size))

    def expect(self) -> None:
        """See Talker. The kernel is always ready."""

    def say(self) -> None:
        """See Talker."""
        self._state.first.sendall(self.outgoing)

    def hear(self) -> None:
        """See Talker."""
        fill(self._state.first, self.incoming)

    def stream(self, size: int, out: int, into: int) -> None:
        """See Talker."""
        data, place = touched(size), touched(size, 1)
        if not into:
            return self._send(data, out)
        if not out:
            return self._receive(place, into)
        sender = threading.Thread(target=self._send, args=(data, out))
        sender.start()
        self._receive(place, into)
        return sender.join()

    def _send(self, data: memoryview, count: int) -> None:
        for _ in range(count):
            self._state.out.sendall(data)
        fill(self._state.out, memoryview(bytearray(len(_ACKNOWLEDGEMENT))))

    def _receive(self, place: memoryview, count: int) -> None:
        for _ in range(count):
            fill(self._state.into, place)
        self._state.into.sendall(_ACKNOWLEDGEMENT)


def fill(connection: socket.socket, place: memoryview) -> None:
    """Receive exactly that much."""
    filled = 0
    while filled < len(place):
        received = connection.recv_into(place[filled:])
        if not received:
            raise ConnectionError("the peer closed in the middle of a message")
        filled += received
