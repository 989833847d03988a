"""What unauthenticated peers do at a seed. Each gives back what it holds open, to be closed by its `with` block."""

import secrets
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from nexar_tools.transports import why_unavailable
from tests.cluster.joiners import EVENT_TIMEOUT

Place = tuple[str, int]


def has_quic() -> bool:
    return why_unavailable("quic") is None


def blind_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def connect(place: Place) -> socket.socket:
    return socket.create_connection(place, EVENT_TIMEOUT)


def connect_tls(place: Place) -> ssl.SSLSocket:
    return blind_context().wrap_socket(connect(place))


@contextmanager
def silent_tcp(place: Place, count: int) -> Iterator[None]:
    """Connections without a byte."""
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(connect(place))
        yield


@contextmanager
def silent_tls(place: Place, count: int) -> Iterator[None]:
    """Handshakes, and nothing after them."""
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(connect_tls(place))
        yield


@contextmanager
def quic_endpoint(credentials: Any = None) -> Iterator[Any]:
    from nexar_native import quic

    with quic.Endpoint(("127.0.0.1", 0), credentials, quic.Trust()) as endpoint:
        yield endpoint


def connect_quic(endpoint: Any, place: Place, *, anonymous: bool = True) -> Any:
    return endpoint.connect(place, "whoever.there.nexar", EVENT_TIMEOUT, verify=False, anonymous=anonymous)


@contextmanager
def silent_quic(place: Place, count: int) -> Iterator[None]:
    """Handshakes, and nothing after them."""
    with quic_endpoint() as endpoint:
        held = [connect_quic(endpoint, place) for _ in range(count)]
        yield
        held.clear()


# -- garbage ------------------------------------------------------------------------------------------------


def initial_of_nobody() -> bytes:
    """A datagram that looks like the first one of a QUIC connection."""
    header = bytes([0xC0 | secrets.randbelow(16)]) + struct.pack(">I", 1)
    header += b"\x08" + secrets.token_bytes(8) + b"\x08" + secrets.token_bytes(8) + b"\0"
    rest = 1200 - len(header) - 2
    return header + struct.pack(">H", 0x4000 | rest) + secrets.token_bytes(rest)


def datagram(number: int) -> bytes:
    kinds = (
        lambda: secrets.token_bytes(1 + secrets.randbelow(1400)),
        initial_of_nobody,
        lambda: b"\xc0" + struct.pack(">I", 0xFADE0000 + number) + secrets.token_bytes(1195),  # an unknown version
        lambda: b"\x40" + secrets.token_bytes(40),  # of a connection that never was
    )
    return kinds[number % len(kinds)]()


def junk(number: int) -> bytes:
    kinds = (
        lambda: secrets.token_bytes(700),
        lambda: b"\x16\x03\x01\x02\x00" + secrets.token_bytes(512),  # a TLS record with a hello that is none
        lambda: b"\x17\x03\x03\x40\x00" + secrets.token_bytes(2000),  # data before any handshake
        lambda: b"GET / HTTP/1.1\r\nHost: seed\r\n\r\n",
    )
    return kinds[number % len(kinds)]()


class Noise:
    """Garbage on UDP and TCP until it is stopped, in a thread: as much as peers send that look for other services."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._stop = threading.Event()
        self.datagrams = self.connections = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with socket.socket(type=socket.SOCK_DGRAM) as udp:
            while not self._stop.wait(0.005):
                for _ in range(10):
                    self.datagrams += 1
                    udp.sendto(datagram(self.datagrams), self._place)
                self._say_junk()

    def _say_junk(self) -> None:
        with connect(self._place) as tcp:
            tcp.sendall(junk(self.connections))
            tcp.shutdown(socket.SHUT_WR)
            self.connections += 1
            if self.connections % 2:  # some read the refusal, some are gone before
                self._drain(tcp)

    def _drain(self, tcp: socket.socket) -> None:
        try:
            while tcp.recv(1 << 12):
                pass
        except ConnectionError:
            return  # that is an answer too

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


@contextmanager
def noise(place: Place) -> Iterator[Noise]:
    made = Noise(place)
    try:
        yield made
    finally:
        made.stop()
