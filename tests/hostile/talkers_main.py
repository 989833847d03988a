"""A process that opens connections without end and never authenticates: `KIND HOST PORT SOURCES RATE`.

KIND `byte`: TCP connections that send one byte. `hello`: TLS, two connections each, that say both hellos and no more.
They come from SOURCES loopback addresses, RATE connections a second, as far as the machine allows.
Each line on the standard input is answered by the number so far.
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

from nexar.transport.tls.hello import Half
from nexar.transport.tls.hello import Hello as TransportHello
from nexar.transport.tls.hello import encode_hello as encode_transport_hello
from nexar.wire.frame import HEADER_BYTES, Frame, Kind, decode, encode
from nexar.wire.handshake import Hello, encode_hello
from tests.hostile.strangers import blind_context

Place = tuple[str, int]
HELD = 1000
"""Connections kept open at once; the oldest is closed for a new one."""
THREADS = 8


def join_hello() -> bytes:
    body = encode_hello(Hello(secrets.randbelow(1 << 60) + 1, "candidate", frozenset({"tls"}), secrets.token_bytes(32)))
    return encode(Frame(kind=Kind.CONTROL, body=len(body))) + body


class Talkers:
    """Connections of one kind, opened by several threads at a common pace."""

    def __init__(self, kind: str, place: Place, sources: int, rate: float) -> None:
        self._place = place
        self._sources = [f"127.0.1.{number + 1}" for number in range(sources)]
        self._numbers = count()
        self._held: deque[list[socket.socket]] = deque()
        self.opened = 0
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
            with suppress(OSError):
                self._held.append(self._talk(source))
            self.opened += self._each
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
        halves[0].sendall(join_hello())
        return list(halves)


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


def main(kind: str, host: str, port: str, sources: str, rate: str) -> None:
    place = (host, int(port))
    made = Talkers(kind, place, int(sources), float(rate))
    made.start()
    for _ in sys.stdin:
        print(made.opened, flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
