"""Reference talker over blocking stdlib sockets, plain TCP or mutual TLS.

TCP_NODELAY, one `sendall` per message, `recv_into` into the destination. Two threads must not use a TLS socket at once,
so each direction has its own connection.
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
    """Two connections to one peer, one for each direction of large data; small messages use the first."""

    def __init__(self, first: socket.socket, second: socket.socket, *, dialed: bool) -> None:
        self.first = first
        self.out, self.into = (first, second) if dialed else (second, first)
        for connection in (first, second):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(60.0)


class SocketNode:
    """Implements PeerNode. The scheme is `plain` or `tls`."""

    def __init__(self, credentials: Credentials, trust: Trust, schemes: Sequence[str], *, host: str, **_: Any) -> None:
        self._secure = list(schemes) == ["tls"]
        self._credentials, self._trust = credentials, trust
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._open: list[socket.socket] = [self._listener]

    def addresses_for(self, peer: int) -> dict[str, str]:
        host, port = self._listener.getsockname()[:2]
        return {"sockets": f"{host} {port}"}

    def connect(self, peer: int, addresses: Mapping[str, str], timeout: float) -> SocketLine:
        host, port = addresses["sockets"].split()
        name = node_name(peer, self._credentials.cluster)
        plain = [socket.create_connection((host, int(port)), timeout) for _ in range(2)]
        context = client_context(self._credentials, self._trust)
        first, second = (self._keep(c, lambda c: context.wrap_socket(c, server_hostname=name)) for c in plain)
        return SocketLine(first, second, dialed=True)

    def accept(self, timeout: float) -> SocketLine:
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
        for kept in self._open:
            kept.close()


class SocketTalker:
    """Implements Talker."""

    def __init__(self, node: SocketNode, line: SocketLine) -> None:
        self._state = line

    def prepare(self, size: int) -> None:
        self.outgoing, self.incoming = memoryview(bytearray(size)), memoryview(bytearray(size))

    def expect(self) -> None:
        """Nothing to do: the kernel buffers."""

    def say(self) -> None:
        self._state.first.sendall(self.outgoing)

    def hear(self) -> None:
        fill(self._state.first, self.incoming)

    def stream(self, size: int, out: int, into: int) -> None:
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
    """Receives exactly `len(place)` bytes."""
    filled = 0
    while filled < len(place):
        received = connection.recv_into(place[filled:])
        if not received:
            raise ConnectionError("the peer closed in the middle of a message")
        filled += received
