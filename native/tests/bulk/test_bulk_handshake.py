"""Dialing and accepting: who is let in, and what becomes of everybody else."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import ssl
import threading
import time

import certificates
import pytest
from bulk_peers import (
    EVENT_TIMEOUT,
    HELLO,
    Peer,
    Proxy,
    RawDialer,
    connect,
    dial,
    dialing_child,
    finish,
    hello,
    memory,
    until,
)
from nexar_native import bulk, quic

pytestmark = pytest.mark.usefixtures("_nothing_leaks")


def refused(peer: Peer) -> str:
    reason: str = peer.event(bulk.REFUSED)[3][1]
    return reason


@pytest.mark.parametrize("connections", [1, 4])
def test_both_sides_know_each_other(make_peer, plain: bool, connections: int) -> None:
    a, b = make_peer("a"), make_peer("b")
    pair = connect(a, b, connections=connections, plain=plain, pin=certificates.node("b").fingerprint)
    assert pair.near.peer_certificate == certificates.node("b").der
    assert pair.far.peer_certificate == certificates.node("a").der
    assert pair.near.hello == pair.far.hello == HELLO
    assert (pair.near.plain, pair.far.plain) == (plain, plain)
    assert (pair.near.dialed, pair.far.dialed) == (True, False)
    assert pair.near.connections == pair.far.connections == connections
    assert a.endpoint.stats()["connections"] == connections
    assert b.endpoint.stats()["handshakes"] == 0


def test_both_sides_must_agree_to_stop_encrypting(make_peer) -> None:
    a, b = make_peer("a"), make_peer("b", allow_plain=False)
    pair = connect(a, b, plain=True)
    assert (pair.near.plain, pair.far.plain) == (False, False)
    pair = connect(b, a, name="a", plain=True)
    assert (pair.near.plain, pair.far.plain) == (True, True)


def test_an_empty_hello_and_the_longest_one(make_peer) -> None:
    a, b = make_peer("a"), make_peer("b")
    for text in (b"", b"x" * 4096):
        assert connect(a, b, hello=text).far.hello == text
    with pytest.raises(ValueError, match="4097 bytes"):
        dial(a, b, hello=b"x" * 4097)


def test_a_peer_with_another_name_is_refused(make_peer) -> None:
    a, b = make_peer("a"), make_peer("b")
    with pytest.raises(bulk.VerificationError) as caught:
        dial(a, b, name="c")
    assert caught.value.by == "us"
    assert "Certificate" in refused(b)


def test_a_peer_with_another_key_is_refused(make_peer) -> None:
    a, b = make_peer("a"), make_peer("b")
    with pytest.raises(bulk.VerificationError) as caught:
        dial(a, b, pin=certificates.authority().leaf("b").fingerprint)
    assert caught.value.by == "us"
    refused(b)
    with pytest.raises(ValueError, match="32 bytes"):
        dial(a, b, pin=b"short")


@pytest.mark.parametrize(
    "leaf", [certificates.Authority("others").leaf("a"), certificates.authority().leaf("a", expired=True)]
)
def test_a_dialer_with_a_bad_certificate_is_refused(make_peer, leaf: certificates.Leaf) -> None:
    a, b = make_peer("a", credentials=leaf.credentials), make_peer("b")
    with pytest.raises(bulk.VerificationError) as caught:
        dial(a, b)
    assert caught.value.by == "peer"
    assert "certificate" in refused(b)


def test_an_acceptor_with_a_bad_certificate_is_refused(make_peer) -> None:
    a, b = make_peer("a"), make_peer("b", credentials=certificates.Authority("others").leaf("b").credentials)
    with pytest.raises(bulk.VerificationError) as caught:
        dial(a, b)
    assert caught.value.by == "us"


def test_a_dialer_without_a_certificate_is_refused(make_peer) -> None:
    for trust in (certificates.trust(), quic.Trust(certificates.authority().pem, allow_anonymous=True)):
        b = make_peer("b", trust=trust)
        with RawDialer(b.address, name=None) as raw:
            with contextlib.suppress(OSError, EOFError):
                raw.shake_hands()
                raw.send(hello())
            raw.ended()
        assert "certificate" in refused(b)
        assert b.endpoint.stats()["channels"] == 0


def test_replaced_credentials_apply_to_new_channels(make_peer) -> None:
    a, b = make_peer("a"), make_peer("b")
    old = connect(a, b)
    others = certificates.Authority("others")
    b.endpoint.replace_credentials(others.leaf("b").credentials, quic.Trust(others.pem))
    with pytest.raises(bulk.VerificationError):
        dial(a, b)
    a.endpoint.replace_credentials(others.leaf("a").credentials, quic.Trust(others.pem))
    assert connect(a, b).far.peer_certificate != old.far.peer_certificate
    old.far.expect(1, bytearray(1))
    old.near.send(1, b"x")
    b.event(bulk.LANDED)


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05hello", b"NXBULK2\n", b"\0" * 100]
)
def test_another_protocol_is_refused(make_peer, garbage: bytes) -> None:
    b = make_peer("b")
    with socket.create_connection(b.address) as raw:
        raw.sendall(garbage)
        assert "not a bulk connection" in refused(b)


def test_garbage_instead_of_tls_is_refused(make_peer) -> None:
    b = make_peer("b")
    random_bytes = random.Random(7)
    for length in (1, 5, 100, 5000, 200_000):
        with socket.create_connection(b.address) as raw:
            with contextlib.suppress(OSError):
                raw.sendall(bulk.PREAMBLE + random_bytes.randbytes(length))
                raw.shutdown(socket.SHUT_WR)
            refused(b)
    assert b.endpoint.stats()["handshakes"] == 0


def test_an_endless_handshake_message_is_refused(make_peer) -> None:
    """Handshake records that announce a message of 16 MB."""
    b = make_peer("b")
    before = memory()
    with socket.create_connection(b.address) as raw:
        record = b"\x16\x03\x01\x40\x00" + b"\x01\xff\xff\xff" + bytes(0x4000 - 4)
        with contextlib.suppress(OSError):
            raw.sendall(bulk.PREAMBLE + record)
            for _ in range(1000):
                raw.sendall(b"\x16\x03\x01\x40\x00" + bytes(0x4000))
        refused(b)
    assert memory() - before < 8 << 20


CUTS = [*range(60), *range(60, 2600, 97)]


@pytest.mark.parametrize("first", range(0, len(CUTS), 8))
def test_a_dial_that_is_cut_at_any_byte_is_refused(make_peer, first: int) -> None:
    a, b = make_peer("a"), make_peer("b")
    for limit in CUTS[first : first + 8]:
        with Proxy(b.address, limit) as proxy:
            try:
                channel = dial(a, b, address=proxy.address)
            except bulk.ConnectError:
                assert refused(b)
            else:  # so many bytes are more than a whole handshake
                assert limit > 500
                assert b.event(bulk.ACCEPTED)
                del channel
    until(lambda: b.endpoint.stats()["connections"] == a.endpoint.stats()["connections"] == 0)


@pytest.mark.parametrize("end", ["close", "wait"])
def test_a_hello_that_is_cut_at_any_byte_is_refused(make_peer, end: str) -> None:
    b = make_peer("b", handshake_timeout=EVENT_TIMEOUT if end == "close" else 0.05)
    with RawDialer(make_peer("c").address) as raw:
        raw.shake_hands()
        length = len(raw.sealed(hello()))
    for cut in range(0, length, 1 if end == "close" else 29):
        with RawDialer(b.address) as raw:
            with contextlib.suppress(OSError, EOFError):
                raw.shake_hands()
                raw.socket.sendall(raw.sealed(hello())[:cut])
            if end == "close":
                raw.socket.close()
            assert refused(b)
    assert b.endpoint.stats()["channels"] == 0


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"", "in time"),
        (b"x", "too short"),
        (hello()[:-1], "impossible"),
        (hello() + b"x", "impossible"),
        (hello(index=1), "impossible"),
        (hello(count=0), "impossible"),
        (hello(index=64, count=65), "impossible"),
        (hello(text=b"x" * 4097), "impossible"),
        (hello(version=2), "version"),
        (b"NXBX" + hello()[4:], "no hello"),
        (hello()[:24] + b"\xff\xff" + HELLO, "impossible"),
    ],
)
def test_a_bad_hello_is_refused(make_peer, record: bytes, reason: str) -> None:
    b = make_peer("b", handshake_timeout=3.0 if not record else EVENT_TIMEOUT)
    with RawDialer(b.address) as raw:
        raw.shake_hands()
        if record:
            raw.send(record)
            assert reason.encode() in raw.receive()
        assert reason in refused(b)
    assert b.endpoint.stats()["channels"] == 0


def test_a_replayed_hello_is_refused_and_harms_nothing(make_peer) -> None:
    b = make_peer("b")
    with RawDialer(b.address) as first, RawDialer(b.address) as second, RawDialer(b.address) as other:
        first.open()
        channel = b.event(bulk.ACCEPTED)[3]
        second.shake_hands()
        second.send(hello())
        assert b"seen before" in second.receive()
        assert "seen before" in refused(b)
        other.shake_hands()
        other.send(hello(text=b"another"))
        assert b"differ" in other.receive()
        channel.expect(1, memory_view := bytearray(3))
        from bulk_peers import chunk

        first.send(chunk(1, b"abc"))
        b.event(bulk.LANDED)
        assert memory_view == b"abc"


def test_connections_of_one_channel_come_from_one_peer(make_peer) -> None:
    """The same nonce with another certificate is another channel."""
    b = make_peer("b")
    with RawDialer(b.address, "a") as first, RawDialer(b.address, "c") as second:
        first.open()
        second.open()
        found = {b.event(bulk.ACCEPTED)[3].peer_certificate for _ in range(2)}
    assert found == {certificates.node("a").der, certificates.node("c").der}


def test_a_channel_must_be_complete_in_time(make_peer) -> None:
    b = make_peer("b", handshake_timeout=3.0)
    with RawDialer(b.address) as raw:
        raw.open(count=2)
        assert "other connections" in refused(b)
        raw.ended()
    assert b.endpoint.stats()["channels"] == 0
    assert not any(event[0] in (bulk.ACCEPTED, bulk.LOST) for event in b.poll())


def test_a_formed_channel_has_no_deadline(make_peer) -> None:
    a, b = make_peer("a"), make_peer("b", handshake_timeout=3.0)
    pair = connect(a, b, connections=2)
    with socket.create_connection(b.address):
        refused(b)  # the deadlines of the channel have passed too
    pair.far.expect(1, bytearray(1))
    pair.near.send(1, b"x")
    b.event(bulk.LANDED)


def test_data_before_the_welcome_is_refused(make_peer) -> None:
    b = make_peer("b")
    with RawDialer(b.address) as raw:
        raw.shake_hands()
        raw.send(hello(plain=True), b"data")
        assert b"before the welcome" in raw.receive()
        assert "before the welcome" in refused(b)


def test_a_silent_connection_is_refused_at_the_deadline(make_peer) -> None:
    b = make_peer("b", handshake_timeout=2.0)
    with socket.create_connection(b.address), socket.create_connection(b.address) as half:
        half.sendall(bulk.PREAMBLE)
        reasons = {refused(b), refused(b)}
    assert reasons == {"the preamble did not arrive in time", "the handshake was not complete in time"}


def test_a_slow_connection_is_refused_at_the_deadline(make_peer) -> None:
    """A byte from time to time does not extend the deadline."""
    b = make_peer("b", handshake_timeout=0.3)
    record = bulk.PREAMBLE + b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" + bytes(10_000)
    with socket.create_connection(b.address) as raw:
        for byte in record:
            try:
                raw.sendall(bytes([byte]))
            except OSError:
                break
            time.sleep(0.01)
            if b.endpoint.stats()["refused"]:
                break
        assert "in time" in refused(b)


def test_unverified_connections_are_limited(make_peer) -> None:
    b = make_peer("b", max_handshakes=3)
    sockets = [socket.create_connection(b.address) for _ in range(3)]
    until(lambda: b.endpoint.stats()["handshakes"] == 3)
    with socket.create_connection(b.address):
        assert "too many" in refused(b)
    sockets[0].close()
    refused(b)
    a = make_peer("a")
    connect(a, b)
    for each in sockets:
        each.close()


def test_refusals_that_nobody_polls_are_limited(make_peer) -> None:
    b = make_peer("b")
    for _ in range(300):
        with socket.create_connection(b.address) as raw:
            raw.sendall(b"x" * 8)
            with contextlib.suppress(OSError):
                raw.recv(1)
    until(lambda: b.endpoint.stats()["refused"] == 300)
    assert len(b.poll()) == 256


def test_a_port_where_nobody_listens(make_peer) -> None:
    a, b = make_peer("a"), make_peer("b")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = listener.getsockname()
    with pytest.raises(bulk.ConnectError, match="refused"):
        dial(a, b, address=closed)
    channel = a.endpoint.connect([closed, b.address], "b", None, HELLO, connections=2, timeout=EVENT_TIMEOUT)
    assert channel.peer_certificate == certificates.node("b").der
    with pytest.raises(bulk.ConnectError) as caught:
        a.endpoint.connect([closed, closed], "b", None, HELLO, timeout=EVENT_TIMEOUT)
    assert caught.value.reason.count(str(closed[1])) == 2


def test_a_peer_that_never_answers_is_given_up_at_the_deadline(make_peer) -> None:
    a, b = make_peer("a"), make_peer("b")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(bulk.ConnectError) as caught:
            dial(a, b, address=silent.getsockname(), timeout=0.1)
        assert caught.value.kind == "timed_out"
        # The other address answers, although the first one does not.
        a.endpoint.connect([silent.getsockname(), b.address], "b", None, HELLO, timeout=EVENT_TIMEOUT)
    until(lambda: a.endpoint.stats()["connections"] == 0)


def test_ctrl_c_ends_a_dial(make_peer) -> None:
    b = make_peer("b")
    child = dialing_child(
        """
        import os, signal, socket, threading
        silent = socket.create_server(("127.0.0.1", 0))
        def interrupt():
            global accepted
            accepted, _ = silent.accept()
            accepted.recv(8)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt).start()
        try:
            endpoint.connect([silent.getsockname()], "b", None, b"", timeout=600.0)
        except KeyboardInterrupt:
            print("interrupted")
        while endpoint.stats()["connections"]:
            pass
        accepted.close()
        silent.close()
        """,
        b,
    )
    assert finish(child) == (0, "interrupted\n", "")


def test_closing_the_endpoint_ends_a_dial(make_peer) -> None:
    a, b = make_peer("a"), make_peer("b")
    raised: list[BaseException] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def run() -> None:
            try:
                dial(a, b, address=silent.getsockname())
            except (bulk.ConnectError, bulk.ConnectionLost, bulk.EndpointClosed) as error:
                raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        silent.accept()[0].close()
        a.close()
        thread.join()
    assert len(raised) == 1


def test_a_peer_that_is_no_bulk_endpoint_is_refused_by_the_dialer(make_peer) -> None:
    a, b = make_peer("a"), make_peer("b")
    for answer in (b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"\x15\x03\x03\x00\x02\x02\x28"):
        with socket.create_server(("127.0.0.1", 0)) as server:

            def run(answer: bytes = answer, server: socket.socket = server) -> None:
                connection, _ = server.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)
                    with contextlib.suppress(OSError):
                        while connection.recv(65536):
                            pass

            thread = threading.Thread(target=run)
            thread.start()
            with pytest.raises(bulk.ConnectError):
                dial(a, b, address=server.getsockname())
            thread.join()


def test_only_tcp_sockets_are_adopted(make_peer) -> None:
    b = make_peer("b")
    with pytest.raises(OSError, match="Bad file descriptor"):
        b.endpoint.adopt(-1)
    read, write = os.pipe()
    with pytest.raises(OSError, match="Socket operation on non-socket"):
        b.endpoint.adopt(read)
    os.close(read)
    os.close(write)
    near, far = socket.socketpair()
    with pytest.raises(OSError, match="invalid"):
        b.endpoint.adopt(near.detach())
    assert far.recv(1) == b""  # the descriptor was closed
    far.close()


def test_arguments_are_checked(make_peer) -> None:
    a, b = make_peer("a"), make_peer("b")
    with pytest.raises(ValueError, match="connections"):
        dial(a, b, connections=65)
    with pytest.raises(ValueError, match="addresses"):
        a.endpoint.connect([], "b", None, b"", timeout=1)
    with pytest.raises(ValueError, match="server_name"):
        dial(a, b, name="not a name")
    with pytest.raises(ValueError, match="timeout"):
        dial(a, b, timeout=float("nan"))
    with pytest.raises(ValueError, match="threads"):
        Peer("a", threads=0)


def test_an_alert_is_sent_to_a_dialer_that_is_refused(make_peer) -> None:
    b = make_peer("b")
    with RawDialer(b.address, leaf=certificates.Authority("others").leaf("a")) as raw:
        raw.shake_hands()
        with pytest.raises(ssl.SSLError, match=r"(?i)unknown.ca"):
            raw.receive()
    refused(b)
