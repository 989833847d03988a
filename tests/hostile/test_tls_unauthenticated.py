"""Who must not come in over TLS, and what happens to those who may while unauthenticated peers dial."""

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import pytest

from nexar.security.authority import Authority, make_credentials, make_key
from nexar.security.certificates import Credentials, Trust, certificate_fingerprint
from nexar.security.tls import client_context
from nexar.transport.base import Carrier, ConnectRefused, Expected, Transport
from nexar.transport.sleeper import PollSleeper
from nexar.transport.tls import TlsTransport
from nexar.transport.tls.handshake import MAX_HELLO_BYTES, ConnectionHello, Half, encode_connection_hello
from nexar.wire.frame import Frame, FrameKind, encode
from tests.conformance.harness import EVENT_TIMEOUT, Node, Pair, Side, dial, in_thread, pump, wait_for

OURS = Authority.create("ours")
THEIRS = Authority.create("ours")
TRUST = Trust(OURS.certificate_pem)
SERVER, CLIENT = 1, 2
THE_SERVER = Expected(SERVER)
ELSEWHERE = "127.0.0.6"
"""Where a crowd comes from; those who may come in have an address of their own."""
DEADLINE = 0.5
"""Seconds an unauthenticated peer gets in these tests."""


@pytest.fixture(params=["tls", "tcp"])
def encrypt(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "tls")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def open_node(
    stack: ExitStack,
    number: int,
    credentials: Credentials | None,
    trust: Trust = TRUST,
    *,
    encrypt: bool = True,
    handshake_timeout: float = EVENT_TIMEOUT,
    max_pending: int = 256,
    listen: str | None = None,
) -> Node:
    sleeper = PollSleeper()
    transport = TlsTransport(
        sleeper, credentials, trust, encrypt=encrypt, handshake_timeout=handshake_timeout, max_pending=max_pending
    )
    node = Node(number, transport, sleeper)
    stack.callback(node.close)
    if listen is not None:
        transport.listen(listen, node)
    return node


def open_server(stack: ExitStack, **settings: object) -> Node:
    credentials = settings.pop("credentials", None) or OURS.admit(SERVER)
    return open_node(stack, SERVER, credentials, listen="127.0.0.1:0", **settings)  # type: ignore[arg-type]


def address_of(node: Node) -> str:
    assert node.transport.address is not None
    return node.transport.address


def try_to_connect(transport: Transport, server: Node, expected: Expected) -> Carrier | ConnectRefused:
    """What became of a dial, while the server is driven by this thread."""
    thread, outcome = in_thread(
        lambda: transport.connect(address_of(server), expected, time.monotonic() + EVENT_TIMEOUT)
    )
    pump([server], lambda: outcome, "the end of a dial")
    thread.join()
    assert isinstance(outcome[0], Carrier | ConnectRefused), repr(outcome[0])
    return outcome[0]


def check_refused(unauthenticated: Node, server: Node, reason: str, expected: Expected = THE_SERVER) -> ConnectRefused:
    """The peer is refused for its certificate and learns why, the server says who dialed, and nobody is let in."""
    began = time.monotonic()
    refusal = try_to_connect(unauthenticated.transport, server, expected)
    assert isinstance(refusal, ConnectRefused)
    assert time.monotonic() - began < EVENT_TIMEOUT / 2
    assert refusal.verification, refusal
    assert refusal.address == address_of(server)
    assert reason in refusal.reason
    assert server.accepted == []
    return refusal


def check_reported(server: Node, reason: str) -> None:
    """Of the two connections of a dial one may only have been hung up."""
    pump([server], lambda: any(reason in words for _, words in server.refused), "the report of a refusal")
    assert all(address.startswith("127.0.0.1:") for address, _ in server.refused)


def check_open_to_friends(stack: ExitStack, server: Node, *, encrypt: bool = True) -> None:
    friend = open_node(stack, CLIENT, OURS.admit(CLIENT), encrypt=encrypt)
    near, far = dial(friend, server)
    pair = Pair(Side(friend, near), Side(server, far))
    near.attach(pair.left.received)
    far.attach(pair.right.received)
    pair.check_usable()
    assert far.peer.verified
    assert far.peer.node == CLIENT


@contextmanager
def unauthenticated_socket(server: Node, source: str = "127.0.0.1") -> Iterator[socket.socket]:
    host, _, port = address_of(server).rpartition(":")
    with socket.create_connection(
        (host, int(port)), timeout=EVENT_TIMEOUT, source_address=(source, 0)
    ) as unauthenticated:
        yield unauthenticated


def local_address(unauthenticated: socket.socket) -> str:
    host, port = unauthenticated.getsockname()
    return f"{host}:{port}"


# --- certificates


def test_a_dialer_without_a_certificate_is_refused_and_notified(stack: ExitStack, encrypt: bool) -> None:
    server = open_server(stack, encrypt=encrypt)
    check_refused(open_node(stack, CLIENT, None, encrypt=encrypt), server, "certificate required")
    check_reported(server, "no certificate")
    check_open_to_friends(stack, server, encrypt=encrypt)


def test_a_dialer_of_a_foreign_authority_is_refused_and_notified(stack: ExitStack, encrypt: bool) -> None:
    server = open_server(stack, encrypt=encrypt)
    check_refused(open_node(stack, CLIENT, THEIRS.admit(CLIENT), encrypt=encrypt), server, "alert")
    check_reported(server, "certificate was rejected")
    check_open_to_friends(stack, server, encrypt=encrypt)


def test_a_dialer_refuses_a_listener_of_a_foreign_authority(stack: ExitStack, encrypt: bool) -> None:
    impostor = open_server(stack, credentials=THEIRS.admit(SERVER), encrypt=encrypt)
    check_refused(open_node(stack, CLIENT, OURS.admit(CLIENT), encrypt=encrypt), impostor, "certificate was rejected")
    check_reported(impostor, "rejected the handshake")


def test_an_expired_certificate_is_refused_on_both_sides(stack: ExitStack) -> None:
    expired = lapsed(CLIENT)
    server = open_server(stack)
    check_refused(open_node(stack, CLIENT, expired), server, "expired")
    check_reported(server, "expired")
    old_server = open_server(stack, credentials=lapsed(SERVER))
    check_refused(open_node(stack, CLIENT, OURS.admit(CLIENT)), old_server, "expired")


def lapsed(node: int) -> Credentials:
    key = make_key()
    return make_credentials(node, "ours", key, OURS.issue(node, key.public_key(), timedelta(seconds=-5)))


def test_a_listener_that_is_another_node_is_refused(stack: ExitStack) -> None:
    server = open_server(stack, credentials=OURS.admit(77))
    check_refused(open_node(stack, CLIENT, OURS.admit(CLIENT)), server, "0000000000000001.ours.nexar")


def test_a_listener_with_another_key_than_the_pinned_one_is_refused(stack: ExitStack) -> None:
    server = open_server(stack)
    expected = Expected(SERVER, fingerprint=b"\0" * 32)
    check_refused(open_node(stack, CLIENT, OURS.admit(CLIENT)), server, "not the pinned one", expected)


def test_a_listener_with_the_pinned_key_is_accepted(stack: ExitStack) -> None:
    credentials = OURS.admit(SERVER)
    server = open_server(stack, credentials=credentials)
    pin = certificate_fingerprint(ssl.PEM_cert_to_DER_cert(credentials.certificate_chain.decode()))
    friend = open_node(stack, CLIENT, OURS.admit(CLIENT))
    assert isinstance(try_to_connect(friend.transport, server, Expected(SERVER, pin)), Carrier)


def test_a_certificate_of_another_cluster_is_refused_although_its_authority_is_trusted(stack: ExitStack) -> None:
    elsewhere = Authority.create("elsewhere")
    both = Trust(OURS.certificate_pem + elsewhere.certificate_pem)
    server = open_server(stack, trust=both)
    unauthenticated = open_node(stack, CLIENT, Credentials(CLIENT, "ours", *_parts(elsewhere.admit(CLIENT))), both)
    check_refused(unauthenticated, server, "belongs to cluster 'elsewhere'")
    check_reported(server, "belongs to cluster 'elsewhere'")


def _parts(credentials: Credentials) -> tuple[bytes, bytes]:
    return credentials.certificate_chain, credentials.private_key


def test_a_candidate_without_a_certificate_comes_in_unverified_where_that_is_allowed(
    stack: ExitStack, encrypt: bool
) -> None:
    server = open_server(stack, trust=Trust(TRUST.authorities, allow_anonymous=True), encrypt=encrypt)
    candidate = open_node(stack, CLIENT, None, Trust(b""), encrypt=encrypt)
    carrier = try_to_connect(candidate.transport, server, Expected(0))
    assert isinstance(carrier, Carrier)
    pump([server], lambda: server.accepted, "the candidate")
    assert not carrier.peer.verified
    assert carrier.peer.certificate is not None
    assert not server.accepted[0].peer.verified
    assert server.accepted[0].peer.certificate is None


def test_a_candidate_that_pins_the_seeds_key_does_not_talk_to_another(stack: ExitStack) -> None:
    server = open_server(stack, trust=Trust(TRUST.authorities, allow_anonymous=True))
    candidate = open_node(stack, CLIENT, None, Trust(b""))
    check_refused(candidate, server, "not the pinned one", Expected(0, fingerprint=b"\1" * 32))


def test_a_plain_dialer_and_an_encrypting_listener_do_not_meet(stack: ExitStack) -> None:
    server = open_server(stack)
    plain = open_node(stack, CLIENT, OURS.admit(CLIENT), encrypt=False)
    refusal = try_to_connect(plain.transport, server, Expected(SERVER))
    assert isinstance(refusal, ConnectRefused)
    assert not refusal.verification
    assert "wants encrypted connections" in refusal.reason
    check_reported(server, "wants encrypted connections")


# --- connections


def test_a_silent_connection_is_dropped_at_its_deadline(stack: ExitStack) -> None:
    server = open_server(stack, handshake_timeout=DEADLINE)
    began = time.monotonic()
    with unauthenticated_socket(server) as unauthenticated:
        pump([server], lambda: server.refused, "the deadline")
        assert time.monotonic() - began >= DEADLINE
        assert server.refused == [(local_address(unauthenticated), f"its first byte did not come within {DEADLINE} s")]
        assert unauthenticated.recv(1) == b""
    check_open_to_friends(stack, server)


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, b"\x16\x03\x01\xff\xff" + b"\xff" * 70_000]
)
def test_garbage_instead_of_a_handshake_is_refused_at_once(stack: ExitStack, garbage: bytes) -> None:
    server = open_server(stack)
    with unauthenticated_socket(server) as unauthenticated, server.driving():
        unauthenticated.sendall(garbage)
        wait_for(lambda: server.refused, "the refusal of garbage")
        assert server.refused[0][0] == local_address(unauthenticated)
        assert "the TLS handshake failed" in server.refused[0][1]
    check_open_to_friends(stack, server)


def handshake(unauthenticated: socket.socket) -> ssl.SSLSocket:
    context = client_context(OURS.admit(CLIENT), TRUST)
    return context.wrap_socket(
        unauthenticated, server_hostname="0000000000000001.ours.nexar", suppress_ragged_eofs=True
    )


@pytest.mark.parametrize(
    "garbage", [b"\xff" * 4096, encode_connection_hello(ConnectionHello(Half.DATA, b"t" * 16, False))[:4] + b"\7" * 200]
)
def test_garbage_behind_the_handshake_is_refused_at_once(stack: ExitStack, garbage: bytes) -> None:
    server = open_server(stack)
    with unauthenticated_socket(server) as unauthenticated, server.driving(), handshake(unauthenticated) as secured:
        address = local_address(secured)
        secured.sendall(garbage)
        wait_for(lambda: server.refused, "the refusal of garbage")
        assert server.refused[0][0] == address
        assert "does not speak nexar" in server.refused[0][1]
    check_open_to_friends(stack, server)


def test_garbage_below_an_established_carrier_ends_that_carrier_only(stack: ExitStack, encrypt: bool) -> None:
    server = open_server(stack, encrypt=encrypt)
    villain = open_node(stack, CLIENT, OURS.admit(CLIENT), encrypt=encrypt)
    near, far = dial(villain, server)
    side = Side(server, far)
    far.attach(side.received)
    near._data.channel.socket.sendall(b"\xff" * 1000)  # type: ignore[attr-defined]
    pump([server], lambda: side.received.lost, "the loss")
    assert side.received.lost[0].misbehaved
    check_open_to_friends(stack, server, encrypt=encrypt)


def test_a_half_that_comes_alone_is_dropped_at_its_deadline(stack: ExitStack) -> None:
    server = open_server(stack, handshake_timeout=DEADLINE)
    with server.driving(), unauthenticated_socket(server) as unauthenticated, handshake(unauthenticated) as secured:
        secured.sendall(encode_connection_hello(ConnectionHello(Half.CONTROL, b"t" * 16, False)))
        wait_for(lambda: server.refused, "the deadline")
        assert "its second connection did not come" in server.refused[0][1]
    assert server.accepted == []


def test_two_equal_halves_make_no_carrier(stack: ExitStack) -> None:
    server = open_server(stack, handshake_timeout=DEADLINE)
    with server.driving(), ExitStack() as sockets:
        for _ in range(2):
            secured = sockets.enter_context(handshake(sockets.enter_context(unauthenticated_socket(server))))
            secured.sendall(encode_connection_hello(ConnectionHello(Half.DATA, b"t" * 16, False)))
        wait_for(lambda: len(server.refused) == 2, "the deadline of both")
    assert server.accepted == []


def test_halves_of_different_nodes_are_never_paired(stack: ExitStack) -> None:
    """Somebody who learned the token of another's dial cannot take part in it: the certificates differ."""
    server = open_server(stack, handshake_timeout=DEADLINE)
    with server.driving(), ExitStack() as sockets:
        for node, half in ((CLIENT, Half.CONTROL), (3, Half.DATA)):
            plain = sockets.enter_context(unauthenticated_socket(server))
            context = client_context(OURS.admit(node), TRUST)
            secured = context.wrap_socket(plain, server_hostname="0000000000000001.ours.nexar")
            sockets.enter_context(secured)
            secured.sendall(encode_connection_hello(ConnectionHello(half, b"t" * 16, False)))
        wait_for(lambda: len(server.refused) == 2, "the deadline of both")
    assert server.accepted == []


def test_an_oversized_hello_is_refused_before_it_is_read(stack: ExitStack) -> None:
    server = open_server(stack)
    with server.driving(), unauthenticated_socket(server) as unauthenticated, handshake(unauthenticated) as secured:
        secured.sendall(encode(Frame(kind=FrameKind.HELLO, body=MAX_HELLO_BYTES + 1)))
        wait_for(lambda: server.refused, "the refusal")
        assert "does not speak nexar" in server.refused[0][1]


# --- crowds


def test_a_flood_of_half_open_connections_keeps_nobody_out(stack: ExitStack, encrypt: bool) -> None:
    server = open_server(stack, handshake_timeout=2.0, max_pending=256, encrypt=encrypt)
    with ExitStack() as flood:
        for _ in range(300):
            flood.enter_context(unauthenticated_socket(server, ELSEWHERE))
            server.poll()
        pump([server], lambda: len(server.refused) >= 300 - 256, "those without a place to go")
        assert all("wait to authenticate" in reason for _, reason in server.refused)
        check_open_to_friends(stack, server, encrypt=encrypt)
        pump([server], lambda: len(server.refused) == 300, "everybody's deadline")
    assert len({address for address, _ in server.refused}) == 300


def test_a_client_that_is_silent_for_a_while_is_not_displaced_by_many_that_speak(stack: ExitStack) -> None:
    """A client with latency is silent at first. It keeps its place beside any number of others from elsewhere."""
    server = open_server(stack, max_pending=4)
    waiting = server.transport._listener._candidates  # type: ignore[attr-defined]
    with unauthenticated_socket(server) as silent, ExitStack() as others:
        pump([server], lambda: waiting, "the silent one to be accepted")
        for _ in range(40):
            speaks = others.enter_context(unauthenticated_socket(server, ELSEWHERE))
            speaks.sendall(b"\x16")
            server.poll()
        pump([server], lambda: len(server.refused) == 40 - 3, "those without a place to go")
        assert all(address.startswith(f"{ELSEWHERE}:") for address, _ in server.refused)
        assert local_address(silent) in {candidate.address for candidate in waiting.values()}


def test_a_carrier_works_undisturbed_while_unauthenticated_peers_come_and_go(stack: ExitStack) -> None:
    server = open_server(stack)
    friend = open_node(stack, CLIENT, OURS.admit(CLIENT))
    near, far = dial(friend, server)
    pair = Pair(Side(friend, near), Side(server, far))
    near.attach(pair.left.received)
    far.attach(pair.right.received)
    for number in range(20):
        with unauthenticated_socket(server) as unauthenticated:
            unauthenticated.sendall(b"hello?" * number)
            pair.check_usable()
    pump([server], lambda: len(server.refused) == 20, "all strangers to be gone")


def test_an_unauthenticated_peer_that_hangs_up_in_mid_handshake_is_reported(stack: ExitStack) -> None:
    server = open_server(stack)
    with unauthenticated_socket(server) as unauthenticated:
        unauthenticated.sendall(b"\x16\x03\x01\x02\x00\x01")
        server.poll()
    pump([server], lambda: server.refused, "the hang-up")
    assert "closed the connection during the handshake" in server.refused[0][1]
