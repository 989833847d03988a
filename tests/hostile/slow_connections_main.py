"""A process that opens connections without end and never authenticates: `KIND HOST PORT SOURCES RATE`.

KIND `byte`: TCP connections that send one byte. `hello`: TLS, two connections each, that say both hellos and no more.
`quic`: QUIC connections that complete the handshake, say hello and no more.
They come from SOURCES loopback addresses, RATE connections a second, as far as the machine allows.
Each line on the standard input is answered by two numbers: connections begun, and those that got as far as they meant.
"""

import secrets
import socket
import ssl
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any, Protocol

from nexar.transport.quic.protocol import StreamType, encode_preamble
from nexar.transport.tls.handshake import ConnectionHello as TransportHello
from nexar.transport.tls.handshake import Half
from nexar.transport.tls.handshake import encode_connection_hello as encode_transport_hello
from nexar.wire.frame import HEADER_BYTES, Frame, FrameKind, Lane, decode, encode
from nexar.wire.hello import Hello, encode_hello
from tests.hostile.unauthenticated_peers import blind_context

Place = tuple[str, int]
HELD = 1000
"""Connections kept open at once; the oldest is closed for a new one."""
THREADS = 8
PACKET_BYTES = 1200
"""Of QUIC: probing for larger ones would cost the attacker more than the seed."""
MAX_STREAMS = 4
"""Of QUIC, that the seed may open: room for each of them would be made with every dial."""
QUIC_TIMEOUT = 3.0
"""Seconds after which a dial is given up."""


class Attack(Protocol):
    """Connections of one kind. Both numbers only grow."""

    begun: int
    completed: int

    def start(self) -> None:
        """Open them from now on, in threads of its own."""


def join_hello(scheme: str) -> bytes:
    nonce = secrets.token_bytes(32)
    body = encode_hello(Hello(secrets.randbelow(1 << 60) + 1, "candidate", frozenset({scheme}), nonce))
    return encode(Frame(kind=FrameKind.CONTROL, body=len(body))) + body


def source_addresses(count: int) -> list[str]:
    return [f"127.0.1.{number + 1}" for number in range(count)]


class TcpTalkers:
    """Connections over TCP, opened by several threads at a common pace."""

    def __init__(self, kind: str, place: Place, sources: int, rate: float) -> None:
        self._place = place
        self._sources = source_addresses(sources)
        self._numbers = count()
        self._held: deque[list[socket.socket]] = deque()
        self.begun = self.completed = 0
        self._context = blind_context()
        talks: dict[str, tuple[Callable[[str], list[socket.socket]], int]] = {
            "byte": (self._one_byte, 1),
            "hello": (self._hello, 2),
        }
        self._talk, self._each = talks[kind]
        self._pause = THREADS * self._each / rate

    def start(self) -> None:
        for _ in range(THREADS):
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        due = time.monotonic() + secrets.randbelow(1000) / 1000 * self._pause
        while True:
            time.sleep(max(0.0, due - time.monotonic()))
            due = max(due + self._pause, time.monotonic() - 1.0)
            source = self._sources[next(self._numbers) % len(self._sources)]
            self.begun += self._each
            with suppress(OSError):
                self._held.append(self._talk(source))
                self.completed += self._each
            while len(self._held) * self._each > HELD:
                for old in self._held.popleft():
                    old.close()

    def _connect(self, source: str) -> socket.socket:
        return socket.create_connection(self._place, 5.0, source_address=(source, 0))

    def _one_byte(self, source: str) -> list[socket.socket]:
        made = self._connect(source)
        made.sendall(b"\x16")
        return [made]

    def _hello(self, source: str) -> list[socket.socket]:
        token = secrets.token_bytes(16)
        halves: list[ssl.SSLSocket] = []
        for half in (Half.CONTROL, Half.DATA):
            plain = self._connect(source)
            try:
                halves.append(self._context.wrap_socket(plain))
            except OSError:
                plain.close()
                raise
            halves[-1].sendall(encode_transport_hello(TransportHello(half, token, False)))
        _read_frame(halves[0])
        halves[0].sendall(join_hello("tls"))
        return list(halves)


class QuicTalkers:
    """Connections over QUIC, one endpoint for each source address. One thread dials all of them and never waits."""

    def __init__(self, place: Place, sources: int, rate: float) -> None:
        from nexar_native import quic

        trust, settings = quic.Trust(), quic.Settings(loopback_mtu=PACKET_BYTES, max_streams=MAX_STREAMS)
        self._endpoints = [quic.Endpoint((source, 0), None, trust, settings) for source in source_addresses(sources)]
        self._place = place
        self._pause = 1 / rate
        self._dials: list[tuple[float, Any]] = []
        self._held: deque[Any] = deque()
        self.begun = self.completed = 0

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            now = time.monotonic()
            due = max(due, now - 1.0)
            for _ in range(int((now - due) / self._pause)):
                due += self._pause
                self._dial()
            self._dials = [dial for dial in self._dials if not self._is_over(*dial)]
            time.sleep(0.005)

    def _dial(self) -> None:
        endpoint = self._endpoints[self.begun % len(self._endpoints)]
        self.begun += 1
        dial = endpoint.post_connect(self._place, "whoever.there.nexar", verify=False, anonymous=True)
        self._dials.append((time.monotonic() + QUIC_TIMEOUT, dial))

    def _is_over(self, deadline: float, dial: Any) -> bool:
        if not dial.done:
            return time.monotonic() > deadline and bool(dial.cancel())
        with suppress(OSError):  # what the native package raises is a ConnectionError
            connection = dial.result()
            stream = connection.open_uni()
            stream.write(encode_preamble(StreamType.ORDERED, lane=Lane.CONTROL), join_hello("quic"))
            self.completed += 1
            self._held.append((connection, stream))
            if len(self._held) > HELD:
                self._held.popleft()
        return True


def _read_frame(half: ssl.SSLSocket) -> None:
    header = _exactly(half, HEADER_BYTES)
    _exactly(half, decode(header).body)


def _exactly(half: ssl.SSLSocket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        piece = half.recv(size - len(got))
        if not piece:
            raise ConnectionError("it hung up")
        got += piece
    return got


def make(kind: str, place: Place, sources: int, rate: float) -> Attack:
    return QuicTalkers(place, sources, rate) if kind == "quic" else TcpTalkers(kind, place, sources, rate)


def main(kind: str, host: str, port: str, sources: str, rate: str) -> None:
    place = (host, int(port))
    made = make(kind, place, int(sources), float(rate))
    made.start()
    for _ in sys.stdin:
        print(made.begun, made.completed, flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
