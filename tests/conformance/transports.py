"""The transports that the suite runs on. The suite takes their names from `CASES`.

`make(number, world)` gives a node's transport and the sleeper it registers with (the same object twice, if the
transport is its own). The world is what the nodes of one test share: certificates, a directory, a memory network. It
can be pickled, so that a node of another process has it too.
"""

import importlib
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from nexar.security.authority import Authority
from nexar.security.certificates import Credentials, Trust
from nexar.transport.base import Sleeper, Transport
from nexar.transport.memory import MemoryNetwork, MemoryTransport
from nexar.transport.sleeper import PollSleeper
from nexar.transport.tls import TlsTransport
from tests.ports import free_port

LEFT, RIGHT, CHILD = 11, 22, 33
"""Node numbers. Certificates are made for these."""


@dataclass(frozen=True)
class World:
    directory: Path
    credentials: dict[int, Credentials] = field(default_factory=dict)
    trust: Trust = field(default_factory=lambda: Trust(b""))
    network: MemoryNetwork | None = None

    @classmethod
    def make(cls, directory: Path) -> "World":
        authority = Authority.create("conformance")
        credentials = {node: authority.admit(node) for node in (LEFT, RIGHT, CHILD)}
        return cls(directory, credentials, Trust(authority.certificate_pem), MemoryNetwork())

    def for_another_process(self) -> "World":
        return replace(self, network=None)


Made = tuple[Transport, Sleeper]


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[int, World], Made]
    missing: Callable[[], str | None] = lambda: None
    """Why it cannot run here, None if it can."""
    listen: Callable[[World], str] = lambda _: "127.0.0.1:0"
    between_processes: bool = True
    forms_clusters: bool = True
    """Whether a node can be started with it; false for one that only carries large payloads beside another."""
    address_is_exclusive: bool = True
    """Whether an address can be given to listen(), and belongs to one node then."""
    dead_address: Callable[[World], str] | None = None
    """An address where nobody listens."""
    silent_address: Callable[[World], object] | None = None
    """A context manager that gives an address where something listens and never answers."""
    unresponsive_host: Callable[[int], object] | None = None
    """A context manager that gives another host of this machine where that port listens and never answers; for
    transports that look names up."""
    accepts_unverified_peers: bool = True
    """Whether a peer may come in that the handshake has not verified."""
    has_certificates: bool = True
    raw_socket: Callable[[str], socket.socket] | None = None
    """An unauthenticated peer's connection to a listener, for transports that have such a thing."""


def absent(module: str) -> Callable[[], str | None]:
    """Why `module` cannot be used: it cannot be imported, or its missing_support() says so."""

    def reason() -> str | None:
        try:
            loaded = importlib.import_module(module)
        except ImportError as error:
            return str(error)
        missing_support = getattr(loaded, "missing_support", None)
        answer: str | None = missing_support() if missing_support is not None else None
        return answer

    return reason


# -- addresses of the kind host:port ---------------------------------------------------------------------------------


def closed_port(world: World) -> str:
    return f"127.0.0.1:{free_port()}"


@contextmanager
def silent_port(world: World, kind: int = socket.SOCK_STREAM) -> Iterator[str]:
    with socket.socket(type=kind) as silent:
        silent.bind(("127.0.0.1", 0))
        if kind == socket.SOCK_STREAM:
            silent.listen()
        yield f"127.0.0.1:{silent.getsockname()[1]}"


@contextmanager
def silent_host(port: int, kind: int = socket.SOCK_STREAM) -> Iterator[str]:
    with socket.socket(type=kind) as silent:
        silent.bind(("127.0.0.2", port))
        if kind == socket.SOCK_STREAM:
            silent.listen()
        yield "127.0.0.2"


def open_socket(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


# -- memory ----------------------------------------------------------------------------------------------------------


def make_memory(number: int, world: World) -> Made:
    assert world.network is not None
    sleeper = PollSleeper()
    return MemoryTransport(sleeper, number, world.network), sleeper


@contextmanager
def silent_memory(world: World) -> Iterator[str]:
    from nexar.testing import Faults, SilentDial

    assert world.network is not None
    sleeper = PollSleeper()
    silent = MemoryTransport(sleeper, 99, world.network)
    try:
        address = silent.listen("", _Nobody())
        Faults(world.network, SilentDial(destination=99))
        yield address
    finally:
        silent.close()
        sleeper.close()


class _Nobody:
    def carrier_accepted(self, carrier: object) -> None:
        raise AssertionError("a silent listener accepted")

    def candidate_refused(self, address: str, reason: str) -> None:
        raise AssertionError("a silent listener refused")


# -- tls, and tcp authenticated by tls ------------------------------------------------------------------------------


def make_tls(number: int, world: World, *, encrypt: bool = True) -> Made:
    sleeper = PollSleeper()
    return TlsTransport(sleeper, world.credentials[number], world.trust, encrypt=encrypt), sleeper


def make_tcp(number: int, world: World) -> Made:
    return make_tls(number, world, encrypt=False)


def on_tcp(name: str, make: Callable[[int, World], Made]) -> Case:
    return Case(
        name,
        make,
        dead_address=closed_port,
        silent_address=silent_port,
        unresponsive_host=silent_host,
        raw_socket=open_socket,
    )


# -- shm and quic ----------------------------------------------------------------------------------------------------


def make_shm(number: int, world: World) -> Made:
    from nexar.transport.shm.transport import ShmTransport

    sleeper = PollSleeper()
    return ShmTransport(sleeper, number, directory=str(world.directory)), sleeper


def shm_address(path: Path) -> str:
    return f"shm://{RIGHT:016x}:{'0' * 64}@{path}"


@contextmanager
def silent_shm(world: World) -> Iterator[str]:
    path = world.directory / "nexar-shm-silent" / "s"
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        yield shm_address(path)


def open_unix_socket(address: str) -> socket.socket:
    unauthenticated = socket.socket(socket.AF_UNIX)
    unauthenticated.connect(address.partition("@")[2])
    return unauthenticated


class DatagramSocket(socket.socket):
    """An unauthenticated peer's UDP socket: what it says leaves in pieces that fit into a datagram."""

    def send(self, data: memoryview, flags: int = 0) -> int:  # type: ignore[override]
        return super().send(data[:1200], flags)


def open_datagram_socket(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    unauthenticated = DatagramSocket(type=socket.SOCK_DGRAM)
    unauthenticated.connect((host, int(port)))
    return unauthenticated


def make_quic(number: int, world: World) -> Made:
    from nexar.transport.quic.transport import QuicSettings, QuicTransport

    settings = QuicSettings(idle_timeout=4.0, keep_alive_interval=1.0)  # a peer that dies is silent, and no more
    transport = QuicTransport(world.credentials[number], world.trust, bind="127.0.0.1:0", settings=settings)
    return transport, transport


CASES: dict[str, Case] = {
    "shm": Case(
        "shm",
        make_shm,
        missing=absent("nexar.transport.shm.transport"),
        listen=lambda _: "",
        address_is_exclusive=False,
        accepts_unverified_peers=False,
        has_certificates=False,
        dead_address=lambda world: shm_address(world.directory / "nexar-shm-nobody" / "s"),
        silent_address=silent_shm,
        raw_socket=open_unix_socket,
    ),
    "quic": Case(
        "quic",
        make_quic,
        missing=absent("nexar.transport.quic.transport"),
        address_is_exclusive=False,
        silent_address=partial(silent_port, kind=socket.SOCK_DGRAM),
        unresponsive_host=partial(silent_host, kind=socket.SOCK_DGRAM),
        raw_socket=open_datagram_socket,
    ),
    "tls": on_tcp("tls", make_tls),
    "tcp": replace(on_tcp("tcp", make_tcp), forms_clusters=False),
    "memory": Case(
        "memory",
        make_memory,
        listen=lambda _: "memory:0",
        between_processes=False,
        has_certificates=False,
        dead_address=lambda _: "memory:nowhere",
        silent_address=silent_memory,
    ),
}
