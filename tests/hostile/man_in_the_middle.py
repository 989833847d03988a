"""Somebody in the middle: ends the worker's encryption with a certificate of its own, begins another one to the seed,
passes everything on and remembers all it saw.
"""

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

from nexar.security.authority import Authority
from nexar.security.certificates import Trust
from nexar.security.tls import server_context
from nexar.transport.address import format_address, parse_address
from nexar.wire.frame import HEADER_BYTES, FrameKind, decode
from tests.cluster.joiners import EVENT_TIMEOUT
from tests.hostile.unauthenticated_peers import connect_quic, connect_tls

Way: TypeAlias = Literal["worker", "seed"]
"""Who said it."""

CERTIFICATE = Authority.create("middle").admit(0xBAD)
_LOOK = 0.1  # seconds between two looks whether it is over


class Middle:
    """A proxy of any kind: threads that pump, and what they saw."""

    preamble_bytes = 0
    """Of each connection or stream, before its first frame."""

    def __init__(self) -> None:
        self.address = ""
        self.saw: dict[tuple[Way, int], bytearray] = {}
        """Plaintext, by who said it and on which of its connections or streams."""
        self._numbers = itertools.count()
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments)
        self._threads.append(thread)
        thread.start()

    def remember(self, way: Way) -> bytearray:
        return self.saw.setdefault((way, next(self._numbers)), bytearray())

    def said_by(self, way: Way) -> list[bytes]:
        return [bytes(seen) for (who, _), seen in self.saw.items() if who == way]

    def control_bodies(self, way: Way) -> list[bytes]:
        """What the control frames that passed had in them."""
        return [body for seen in self.said_by(way) for body in self._control_bodies(seen)]

    def _control_bodies(self, seen: bytes) -> Iterator[bytes]:
        offset = self.preamble_bytes
        while offset + HEADER_BYTES <= len(seen):
            frame = decode(seen, offset)
            begin, offset = offset + HEADER_BYTES, offset + HEADER_BYTES + frame.body
            if frame.kind == FrameKind.CONTROL:
                yield seen[begin:offset]

    def close(self) -> None:
        self._over.set()
        self._stop()
        for thread in self._threads:
            thread.join()

    def _stop(self) -> None:
        """End what a thread might wait for longer than for its next look."""


class TlsMiddle(Middle):
    """Between TCP connections."""

    def __init__(self, seed: str) -> None:
        super().__init__()
        self._seed = parse_address(seed)
        self._context = server_context(CERTIFICATE, Trust(b"", allow_anonymous=True))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(_LOOK)
        self.address = format_address(*self._listening.getsockname())
        self.start(self._accept)

    def _accept(self) -> None:
        with self._listening:
            while not self._over.is_set():
                with contextlib.suppress(TimeoutError):
                    self.start(self._serve, self._listening.accept()[0])

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(EVENT_TIMEOUT)
        with contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            try:
                worker = stack.enter_context(self._context.wrap_socket(connection, server_side=True))
            except OSError:
                return  # the worker saw the certificate, and left
            seed = stack.enter_context(connect_tls(self._seed))
            back = threading.Thread(target=self._pump, args=("seed", seed, worker))
            back.start()
            self._pump("worker", worker, seed)
            back.join()

    def _pump(self, way: Way, source: socket.socket, sink: socket.socket) -> None:
        seen = self.remember(way)
        source.settimeout(_LOOK)
        while not self._over.is_set():
            try:
                piece = source.recv(1 << 16)
                if not piece:
                    break
                seen += piece
                sink.sendall(piece)
            except TimeoutError:
                continue
            except OSError:
                break
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


class QuicMiddle(Middle):
    """Between QUIC connections; each stream is passed on as one of its own."""

    def __init__(self, seed: str) -> None:
        from nexar_native import quic

        from nexar.transport.quic.protocol import PREAMBLE_BYTES

        super().__init__()
        self.preamble_bytes = PREAMBLE_BYTES
        self._seed = parse_address(seed)
        own = quic.Credentials(CERTIFICATE.certificate_chain, CERTIFICATE.private_key)
        self._endpoint = quic.Endpoint(("127.0.0.1", 0), own, quic.Trust(allow_anonymous=True))
        self.address = format_address(*self._endpoint.address)
        self.start(self._accept)

    def _accept(self) -> None:
        for worker in self._results(self._endpoint.post_accept):
            seed = connect_quic(self._endpoint, self._seed)
            self.start(self._pass_streams, "worker", worker, seed)
            self.start(self._pass_streams, "seed", seed, worker)

    def _results(self, post: Callable[[], Any]) -> Iterator[Any]:
        """What one operation after the other gives, until it is over."""
        from nexar_native import quic

        with contextlib.suppress(quic.QuicError):
            while not self._over.is_set():
                operation = post()
                while not operation.done and not self._over.is_set():
                    self._endpoint.wait([operation], _LOOK)
                if not operation.done:
                    return
                yield operation.result()

    def _pass_streams(self, way: Way, source: Any, sink: Any) -> None:
        for stream in self._results(source.post_accept_uni):
            self.start(self._pump, way, stream, sink.open_uni())
        sink.close(2, "the other side has closed")

    def _pump(self, way: Way, source: Any, sink: Any) -> None:
        seen, buffer = self.remember(way), bytearray(1 << 16)
        for count in self._results(lambda: source.post_read(buffer, minimum=1)):
            if not count:
                sink.finish()
                return
            seen += buffer[:count]
            sink.write(bytes(buffer[:count]))

    def _stop(self) -> None:
        self._endpoint.close()


@contextlib.contextmanager
def between(scheme: str, seed: str) -> Iterator[Middle]:
    """Somebody who stands between a worker and the seed at that address."""
    middle: Middle = TlsMiddle(seed) if scheme == "tls" else QuicMiddle(seed)
    try:
        yield middle
    finally:
        middle.close()
