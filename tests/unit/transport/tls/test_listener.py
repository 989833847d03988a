"""The two halves of a dial on their way to one carrier."""

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from nexar.security.authority import Authority
from nexar.security.certificates import Trust
from nexar.security.tls import client_context
from nexar.transport.base import ConnectRefused, Expected, Peer
from nexar.transport.sleeper import PollSleeper
from nexar.transport.tls import TlsTransport
from nexar.transport.tls.handshake import ConnectionHello, Half, HandshakeFailed, TlsIdentity, encode_connection_hello
from nexar.transport.tls.listener import TlsListener, _UnverifiedConnection
from nexar.transport.tls.transport import HANDSHAKE_TIMEOUT
from tests.conformance.harness import EVENT_TIMEOUT, Node, Pair, Side, dial, in_thread, pump, wait_for

OURS = Authority.create("ours")
TRUST = Trust(OURS.certificate_pem)
SERVER, CLIENT = 1, 2


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """A listening server, and a client."""
    with ExitStack() as stack:
        made = []
        for number in (SERVER, CLIENT):
            sleeper = PollSleeper()
            made.append(Node(number, TlsTransport(sleeper, OURS.admit(number), TRUST), sleeper))
            stack.callback(made[-1].close)
        made[0].transport.listen("127.0.0.1:0", made[0])
        yield made


@contextmanager
def lone_half(server: Node) -> Iterator[ssl.SSLSocket]:
    """One connection of two, whose hello was received, while the server is driven."""
    host, _, port = str(server.transport.address).rpartition(":")
    context = client_context(OURS.admit(CLIENT), TRUST)
    with (
        socket.create_connection((host, int(port)), timeout=EVENT_TIMEOUT) as plain,
        server.driving(),
        context.wrap_socket(plain, server_hostname="0000000000000001.ours.nexar") as secured,
    ):
        secured.sendall(encode_connection_hello(ConnectionHello(Half.CONTROL, b"t" * 16, False)))
        wait_for(lambda: any(candidate.waits for candidate in candidates(server)), "the hello")
        yield secured


def listener(server: Node) -> TlsListener:
    assert isinstance(server.transport, TlsTransport)
    assert server.transport._listener is not None
    return server.transport._listener


def candidates(server: Node) -> list[_UnverifiedConnection]:
    return list(listener(server)._candidates.values())


def test_a_node_closes_while_a_half_waits_for_the_other(nodes: list[Node]) -> None:
    server = nodes[0]
    with lone_half(server):
        server.transport.close()
    assert (server.refused, server.accepted) == ([], [])


def test_no_half_is_welcome_before_the_other_is_there(nodes: list[Node]) -> None:
    """Else a dial could succeed whose first half was given up before its second one came."""
    with lone_half(nodes[0]) as secured:
        secured.settimeout(0.05)
        with pytest.raises(TimeoutError):
            secured.recv(1)


def test_a_half_that_hangs_up_while_it_waits_goes_at_once(nodes: list[Node]) -> None:
    server = nodes[0]
    with lone_half(server) as secured:
        secured.close()
        wait_for(lambda: server.refused, "the refusal")
        assert not candidates(server)
    assert server.refused[0][1] == "it closed the connection during the handshake"


def test_a_half_that_goes_on_before_it_was_answered_is_refused(nodes: list[Node]) -> None:
    server = nodes[0]
    with lone_half(server) as secured:
        secured.sendall(b"anything")
        wait_for(lambda: server.refused, "the refusal")
    assert server.refused[0][1] == "it sent data before it got the answer"


def test_a_dialer_that_is_believed_no_longer_when_its_second_half_comes_is_refused_and_notified(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = nodes
    verdicts = iter([True])  # on the first hello

    def accepted_peer(self: TlsIdentity, certificate: bytes | None, address: str) -> Peer:
        if not next(verdicts, False):
            raise HandshakeFailed("the credentials were replaced meanwhile", verification=True)
        return believed(self, certificate, address)

    believed = TlsIdentity.accepted_peer
    monkeypatch.setattr(TlsIdentity, "accepted_peer", accepted_peer)
    address = str(server.transport.address)
    deadline = time.monotonic() + EVENT_TIMEOUT
    thread, outcome = in_thread(lambda: client.transport.connect(address, Expected(SERVER), deadline))
    pump([server], lambda: outcome and len(server.refused) == 2, "the refusal of both halves")
    thread.join()
    (refusal,) = outcome
    assert isinstance(refusal, ConnectRefused)
    assert refusal.verification
    assert refusal.reason.startswith("the credentials were replaced meanwhile")
    reasons = {reason for _, reason in server.refused}
    assert reasons >= {"the credentials were replaced meanwhile"}  # the other may have been hung up by then
    assert server.accepted == []
    monkeypatch.undo()
    ends = dial(client, server)
    pair = Pair(Side(client, ends[0]), Side(server, ends[1]))
    for side in (pair.left, pair.right):
        side.carrier.attach(side.received)
    pair.check_usable()


def test_halves_that_found_each_other_have_their_time_anew(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first may have waited almost as long as it may; it must not be given up while it is being answered."""
    server, client = nodes
    left: list[float] = []
    accepted_peer = TlsIdentity.accepted_peer

    def look(self: TlsIdentity, certificate: bytes | None, address: str) -> Peer:
        pending = listener(server)._pending
        for candidate in candidates(server):
            if candidate.partner is None:
                pending.set_deadline(candidate.descriptor, time.monotonic() + HANDSHAKE_TIMEOUT / 2)
            else:
                left.append(pending._pending[candidate.descriptor].deadline - time.monotonic())
        return accepted_peer(self, certificate, address)

    monkeypatch.setattr(TlsIdentity, "accepted_peer", look)
    near, far = dial(client, server)
    assert min(left) > HANDSHAKE_TIMEOUT / 2
    near.abort("enough")
    far.abort("enough")
