"""QUIC and TLS of one node at one port number."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from nexar.cluster.transports import bind_ports
from nexar.config import Config
from nexar.errors import ConfigError
from nexar.transport.address import format_address, parse_address
from nexar.transport.tls import TlsTransport
from tests.conformance.harness import Node, Pair, Side, dial
from tests.conformance.transports import LEFT, RIGHT, World, absent
from tests.ports import free_port

REASON = absent("nexar.transport.quic.transport")()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"quic: {REASON}")

Both = tuple[Node, Node]


class Opener:
    """Opens the two transports of a node at one address, and closes them when the test ends."""

    def __init__(self, world: World, stack: ExitStack) -> None:
        self._world = world
        self._stack = stack

    def open_at(self, address: str, number: int = RIGHT) -> Both:
        from nexar.transport.quic.transport import QuicTransport

        credentials, trust = self._world.credentials[number], self._world.trust
        quic = QuicTransport(credentials, trust, bind=address)
        first, second = Node(number, quic, quic), Node(number, TlsTransport(quic, credentials, trust), quic)
        try:
            host, _ = parse_address(address)
            _, port = parse_address(quic.listen(address, first))
            second.transport.listen(format_address(host, port), second)
        except OSError:
            second.close()
            first.close()
            raise
        self._stack.callback(first.close)
        self._stack.callback(second.close)
        return first, second


@pytest.fixture
def opener(world: World) -> Iterator[Opener]:
    with ExitStack() as stack:
        yield Opener(world, stack)


def port_of(node: Node) -> int:
    return parse_address(str(node.transport.address))[1]


@pytest.mark.parametrize("bind", [None, "127.0.0.1"])
def test_both_listen_at_the_same_number_and_can_be_dialed(opener: Opener, bind: str | None) -> None:
    theirs = bind_ports(Config(bind=bind), opener.open_at)
    ours = bind_ports(Config(bind="127.0.0.1"), lambda address: opener.open_at(address, LEFT))
    assert port_of(theirs[0]) == port_of(theirs[1])
    for near, far in zip(ours, theirs, strict=True):
        ends = dial(near, far, f"127.0.0.1:{port_of(far)}")
        pair = Pair(Side(near, ends[0]), Side(far, ends[1]))
        for side in (pair.left, pair.right):
            side.carrier.attach(side.received)
        pair.check_usable()


@pytest.mark.parametrize("kind", [socket.SOCK_DGRAM, socket.SOCK_STREAM], ids=["udp", "tcp"])
def test_a_port_that_one_of_them_cannot_have_is_refused_and_let_go(opener: Opener, kind: int) -> None:
    port = free_port()
    with socket.socket(type=kind) as taken:
        taken.bind(("127.0.0.1", port))
        if kind == socket.SOCK_STREAM:
            taken.listen()
        with pytest.raises(ConfigError, match=f"(?s)NEXAR_PORT = {port} .* another process uses it"):
            bind_ports(Config(port=port, bind="127.0.0.1"), opener.open_at)
    quic, _ = bind_ports(Config(port=port, bind="127.0.0.1"), opener.open_at)
    assert port_of(quic) == port


def test_the_next_port_of_the_range_is_taken_if_one_is_not_free_for_both(opener: Opener) -> None:
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        quic, tls = bind_ports(Config(port_range=(port, min(port + 50, 65535)), bind="127.0.0.1"), opener.open_at)
    assert port < port_of(quic) == port_of(tls)


def test_an_address_that_is_not_of_this_host_is_refused(opener: Opener) -> None:
    for bind in ("192.0.2.99", "no-such-host.invalid"):
        with pytest.raises(ConfigError) as refused:
            bind_ports(Config(bind=bind), opener.open_at)
        assert refused.value.variable == "NEXAR_BIND"
