"""Peers for the tests: an endpoint beside a TCP port, both ends of a channel, and a dialer that sends any bytes."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import certificates
from nexar_native import bulk, quic

EVENT_TIMEOUT = 60.0
"""Seconds until a test gives up. Nothing takes long by itself, but a starved process may sleep for many seconds."""
HERE = Path(__file__).parent
HELLO = b"who I am"
CHUNK = bulk.CHUNK_BYTES


class Peer:
    """An endpoint, and a thread that gives it the connections which arrive at `address`."""

    def __init__(
        self,
        name: str = "a",
        *,
        threads: int = 2,
        allow_plain: bool = True,
        trust: quic.Trust | None = None,
        credentials: quic.Credentials | None = None,
        **options: Any,
    ) -> None:
        self.endpoint = bulk.Endpoint(
            credentials or certificates.node(name).credentials,
            trust or certificates.trust(),
            threads=threads,
            allow_plain=allow_plain,
            **options,
        )
        self.events: list[tuple[int, int, int, Any]] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._wake, self._woken = socket.socketpair()
        self.address: tuple[str, int] = self._listener.getsockname()
        self._thread = threading.Thread(target=self._accept, name=f"accept-{name}")
        self._thread.start()

    def _accept(self) -> None:
        while True:
            ready, _, _ = select.select([self._listener, self._woken], [], [])
            if self._woken in ready:
                return
            accepted, _ = self._listener.accept()
            try:
                self.endpoint.adopt(accepted.detach())
            except bulk.EndpointClosed:
                return

    def event(self, *codes: int, channel: int | None = None, timeout: float = EVENT_TIMEOUT) -> Any:
        """Wait for the next event with one of these codes; others stay in `events`."""
        deadline = time.monotonic() + timeout
        while True:
            for at, event in enumerate(self.events):
                if event[0] in codes and channel in (None, event[1]):
                    return self.events.pop(at)
            left = deadline - time.monotonic()
            assert left > 0, f"no event {codes} in time, but {self.events}"
            select.select([self.endpoint], [], [], left)
            self.events += self.endpoint.poll()

    def poll(self) -> list[tuple[int, int, int, Any]]:
        self.events += self.endpoint.poll()
        return self.events

    def close(self) -> None:
        if self._thread.is_alive():
            self._wake.send(b"!")
            self._thread.join()
        self.endpoint.close()
        for each in (self._listener, self._wake, self._woken):
            each.close()


class Channels:
    """Both ends of a channel."""

    def __init__(self, a: Peer, b: Peer, near: bulk.Channel, far: bulk.Channel) -> None:
        self.a, self.b, self.near, self.far = a, b, near, far


def connect(a: Peer, b: Peer, *, address: tuple[str, int] | None = None, **options: Any) -> Channels:
    near = dial(a, b, address=address, **options)
    far = b.event(bulk.ACCEPTED)[3]
    return Channels(a, b, near, far)


def dial(
    a: Peer,
    b: Peer,
    *,
    address: tuple[str, int] | None = None,
    name: str = "b",
    pin: bytes | None = None,
    hello: bytes = HELLO,
    timeout: float = EVENT_TIMEOUT,
    **options: Any,
) -> bulk.Channel:
    return a.endpoint.connect([address or b.address], name, pin, hello, timeout=timeout, **options)


def pattern(size: int, seed: int = 1) -> bytearray:
    return bytearray(random.Random(seed).randbytes(size))


def until(condition: Callable[[], bool]) -> None:
    """Look again and again until it holds."""
    deadline = time.monotonic() + EVENT_TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.0005)


def native_threads() -> int:
    """Workers in this process (each names itself as it starts)."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            names.append(path.read_text().strip())
    return names.count("nexar-bulk")


def memory() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# -- bytes on the wire ------------------------------------------------------------------------------------

CHUNK_FRAME, WITHDRAWN_FRAME, FINISH_FRAME, ABORT_FRAME = 1, 2, 3, 4


def header(kind: int, length: int = 0, transfer: int = 0, offset: int = 0, total: int = 0) -> bytes:
    return struct.pack(">B3xIQQQ", kind, length, transfer, offset, total)


def chunk(transfer: int, data: bytes, *, offset: int = 0, total: int | None = None) -> bytes:
    return header(CHUNK_FRAME, len(data), transfer, offset, len(data) if total is None else total) + data


def hello(
    *,
    plain: bool = False,
    index: int = 0,
    count: int = 1,
    nonce: bytes = b"n" * 16,
    text: bytes = HELLO,
    version: int = 1,
) -> bytes:
    return b"NXBH" + struct.pack(">BBBB16sH", version, plain, index, count, nonce, len(text)) + text


class RawDialer:
    """A dialer made of Python's ssl: valid certificate, any bytes."""

    def __init__(self, address: tuple[str, int], name: str | None = "a", leaf: certificates.Leaf | None = None) -> None:
        self.socket = socket.create_connection(address, timeout=EVENT_TIMEOUT)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["nexar-bulk/1"])
        leaf = leaf or (certificates.node(name) if name is not None else None)
        if leaf is not None:
            with tempfile.NamedTemporaryFile() as file:
                file.write(leaf.pem + leaf.key_pem)
                file.flush()
                context.load_cert_chain(file.name)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def shake_hands(self) -> None:
        self.socket.sendall(bulk.PREAMBLE)
        while True:
            try:
                self._tls.do_handshake()
                self.flush()
                return
            except ssl.SSLWantReadError:
                self.flush()
                self._receive()

    def sealed(self, *records: bytes) -> bytes:
        """The records of these plaintexts, not sent."""
        for each in records:
            self._tls.write(each)
        return self._outgoing.read()

    def send(self, *records: bytes) -> None:
        self.socket.sendall(self.sealed(*records))

    def flush(self) -> None:
        self.socket.sendall(self._outgoing.read())

    def _receive(self) -> None:
        data = self.socket.recv(65536)
        if not data:
            raise EOFError("the peer closed the connection")
        self._incoming.write(data)

    def receive(self) -> bytes:
        """The next plaintext; EOFError or ssl.SSLError at the end."""
        while True:
            try:
                data = self._tls.read(65536)
            except ssl.SSLWantReadError:
                self._receive()
                continue
            if not data:
                raise EOFError("the peer closed the TLS connection")
            return data

    def open(self, **fields: Any) -> RawDialer:
        """A whole handshake of a channel with one connection."""
        self.shake_hands()
        self.send(hello(**fields))
        assert self.receive()[:6] == b"NXBW\x01" + bytes([fields.get("plain", False)])
        return self

    def ended(self) -> None:
        """Read until the peer has closed the connection."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                self._receive()


# -- proxies and processes ----------------------------------------------------------------------------------


class Proxy:
    """Forwards TCP connections, and can cut one of them or stop forwarding."""

    def __init__(self, target: tuple[str, int], limit: int | None = None) -> None:
        """`limit`: bytes from the dialer that are forwarded before the connection is cut."""
        self._target = target
        self._limit = limit
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address: tuple[str, int] = self._listener.getsockname()
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self.pairs.append((near, far))
            for source, sink, limit in ((near, far, self._limit), (far, near, None)):
                thread = threading.Thread(target=_forward, args=(source, sink, limit))
                thread.start()
                self._threads.append(thread)

    def cut(self, index: int) -> None:
        for each in self.pairs[index]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for index in range(len(self.pairs)):
            self.cut(index)
        for thread in self._threads:
            thread.join()
        for pair in self.pairs:
            for each in pair:
                each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _forward(source: socket.socket, sink: socket.socket, limit: int | None) -> None:
    left = limit
    with contextlib.suppress(OSError):
        while left is None or left > 0:
            data = source.recv(65536 if left is None else min(65536, left))
            if not data:
                break
            sink.sendall(data)
            left = None if left is None else left - len(data)
    for each in (sink, source) if left == 0 else (sink,):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR if left == 0 else socket.SHUT_WR)


def spawn(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Run `code` in a process of its own, with the test tools on its path."""
    paths = [str(HERE), str(HERE.parent / "quic")]
    prologue = f"import sys; sys.path[:0] = {paths!r}\n"
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", prologue + textwrap.dedent(code), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], given: str | None = None) -> tuple[int, str, str]:
    """Wait for a spawned process: its exit code, output and errors."""
    try:
        out, err = process.communicate(given, timeout=EVENT_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, out, err


CHILD = """
import json, sys
from nexar_native import bulk
given = json.loads(sys.stdin.readline())
credentials = bulk.Credentials(given["chain"].encode(), given["key"].encode())
trust = bulk.Trust(given["authorities"].encode())
endpoint = bulk.Endpoint(credentials, trust, threads=1, allow_plain=True)
def dial(**options):
    options = {"connections": 2, "timeout": 60.0} | options
    return endpoint.connect([(sys.argv[1], int(sys.argv[2]))], "b", None, b"child", **options)
"""
"""The beginning of a child that dials."""


def identity(name: str) -> str:
    """The line that a CHILD reads first."""
    import json

    leaf = certificates.node(name)
    given = {"chain": leaf.pem, "key": leaf.key_pem, "authorities": certificates.authority().pem}
    return json.dumps({key: value.decode() for key, value in given.items()}) + "\n"


def dialing_child(code: str, to: Peer) -> subprocess.Popen[str]:
    child = spawn(CHILD + textwrap.dedent(code), to.address[0], str(to.address[1]))
    assert child.stdin is not None
    child.stdin.write(identity("a"))
    child.stdin.flush()
    return child
