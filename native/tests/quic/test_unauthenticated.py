"""Unauthenticated peers: what unfinished handshakes cost, and which peers are still admitted."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import certificates
import pytest
from conftest import MakeEndpoint
from harness import EVENT_TIMEOUT, connect, receive, result, until
from nexar_native import quic

MIB = 1 << 20


FIRST_PACKET_BYTES = 1200
"""A client pads its first packet to this size."""

CLIENTS = """
import socket, sys
from nexar_native import quic

def discard(sink):
    sink.setblocking(False)
    try:
        while sink.recv(65536):
            pass
    except BlockingIOError:
        sink.settimeout(20)

with socket.socket(type=socket.SOCK_DGRAM) as sink:
    sink.bind(("127.0.0.1", 0))
    sink.settimeout(20)
    with quic.Endpoint(("127.0.0.1", 0), None, quic.Trust()) as clients:
        for _ in range(int(sys.argv[1])):
            dial = clients.post_connect(sink.getsockname(), "b", verify=False)
            sys.stdout.buffer.write(sink.recv(65536))
            dial.cancel()
            discard(sink)
"""


def first_packets(count: int) -> list[bytes]:
    """Valid first packets of `count` clients, none of which will ever answer. Another process makes them, so that the
    memory of this one shows what the server takes."""
    command = [sys.executable, "-c", CLIENTS, str(count)]
    made = subprocess.run(command, capture_output=True, check=True, timeout=10 * EVENT_TIMEOUT).stdout
    assert len(made) == count * FIRST_PACKET_BYTES
    return [made[start : start + FIRST_PACKET_BYTES] for start in range(0, len(made), FIRST_PACKET_BYTES)]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def send_all(packets: list[bytes], source: socket.socket, server: quic.Endpoint) -> None:
    """Let the server take each in: its socket must not drop any."""
    for number, packet in enumerate(packets):
        source.sendto(packet, server.address)
        if number % 16 == 0:
            server.wait([], 0)


@contextmanager
def unauthenticated(host: str = "127.0.0.1") -> Iterator[socket.socket]:
    with socket.socket(type=socket.SOCK_DGRAM) as made:
        made.bind((host, 0))
        yield made


def test_unfinished_handshakes_cost_little_and_stop_at_the_retry_limit(make_endpoint: MakeEndpoint) -> None:
    packets = first_packets(2000)
    b = make_endpoint("b", max_streams=1024)
    gc.collect()
    before = resident_bytes()
    with unauthenticated() as source:
        send_all(packets, source, b)
        until(lambda: b.stats()["inbound_handshakes"] + b.stats()["retried"] >= len(packets))
    assert b.stats()["inbound_handshakes"] == 64
    assert b.stats()["retried"] == len(packets) - 64
    assert resident_bytes() - before < 16 * MIB
    pair = connect(make_endpoint("a"), b)
    here, there = pair.stream()
    here.write(b"through")
    assert receive(b, there, 7) == b"through"
    pair.forget()


def test_handshakes_that_expired_are_forgotten(make_endpoint: MakeEndpoint) -> None:
    b = make_endpoint("b", handshake_timeout=0.2)
    with unauthenticated() as source:
        send_all(first_packets(64), source, b)
        until(lambda: b.stats()["inbound_handshakes"] == 0 and len(b.refusals()) > 0)
        until(lambda: b.stats()["connections"] == 0)
        send_all(first_packets(1), source, b)
        until(lambda: b.stats()["inbound_handshakes"] == 1)
    assert b.stats()["retried"] == 0


def test_at_the_limit_the_address_with_the_most_handshakes_gives_way(make_endpoint: MakeEndpoint) -> None:
    b = make_endpoint("b", max_handshakes=8, retry_handshakes=1000)
    packets = first_packets(20)
    with unauthenticated("127.0.0.2") as crowd, unauthenticated("127.0.0.3") as single:
        send_all(packets[:8], crowd, b)
        until(lambda: b.stats()["inbound_handshakes"] == 8)
        send_all(packets[8:12], crowd, b)
        until(lambda: b.stats()["refused"] >= 4)
        assert b.stats()["inbound_handshakes"] == 8
        send_all(packets[12:13], single, b)
        until(lambda: b.stats()["refused"] >= 5)
        assert b.stats()["inbound_handshakes"] == 8
        refused = b.refusals()
    assert {address[0] for address, _ in refused} == {"127.0.0.2"}
    assert all("too many handshakes" in reason for _, reason in refused)
    pair = connect(make_endpoint("a"), b)
    assert pair.far.verified
    pair.forget()


def test_the_limit_of_handshakes_follows_a_live_endpoint(make_endpoint: MakeEndpoint) -> None:
    b = make_endpoint("b", max_handshakes=2, retry_handshakes=1000)
    packets = first_packets(10)
    with unauthenticated() as source:
        send_all(packets[:4], source, b)
        until(lambda: b.stats()["refused"] == 2)
        b.set_max_handshakes(6)
        send_all(packets[4:8], source, b)
        until(lambda: b.stats()["inbound_handshakes"] == 6)
    with pytest.raises(ValueError, match="count"):
        b.set_max_handshakes(0)


def refused(open_one: Callable[[], quic.Stream]) -> bool:
    try:
        open_one()
    except BlockingIOError:
        return True
    return False


def test_a_peer_without_a_certificate_gets_few_streams_until_its_limits_are_lifted(
    make_endpoint: MakeEndpoint,
) -> None:
    trust = quic.Trust(certificates.authority().pem, allow_anonymous=True)
    b = make_endpoint("b", trust=trust, unverified_streams=3)
    pair = connect(make_endpoint(None), b)
    assert not pair.far.verified
    streams = [pair.near.open_uni() for _ in range(3)]
    assert refused(pair.near.open_uni)
    pair.far.lift_limits()
    pair.far.lift_limits()
    streams.append(result(pair.a, pair.near.post_open_uni()))
    streams += [pair.near.open_uni() for _ in range(100)]
    streams.clear()
    pair.forget()


def test_a_peer_without_a_certificate_gets_a_small_window_until_its_limits_are_lifted(
    make_endpoint: MakeEndpoint,
) -> None:
    trust = quic.Trust(certificates.authority().pem, allow_anonymous=True)
    b = make_endpoint("b", trust=trust, unverified_window_bytes=1 << 14, loopback_mtu=1200)
    pair = connect(make_endpoint(None, loopback_mtu=1200), b)
    stream = pair.near.open_uni()
    stream.write(bytes(MIB))
    there = result(b, pair.far.post_accept_uni())
    until(lambda: pair.far.stats()["bytes_received"] >= 1 << 14)
    back = pair.far.open_uni()
    back.write(b"!")
    forth = result(pair.a, pair.near.post_accept_uni())
    for _ in range(20):  # whatever the client may send would arrive meanwhile
        assert receive(pair.a, forth, 1) == b"!"
        back.write(b"!")
    assert pair.far.stats()["bytes_received"] < 1 << 16
    pair.far.lift_limits()
    assert len(receive(b, there, MIB)) == MIB
    del stream, there, back, forth
    pair.forget()


def test_a_verified_peer_has_every_stream_at_once(make_endpoint: MakeEndpoint) -> None:
    pair = connect(make_endpoint("a"), make_endpoint("b", max_streams=500))
    streams = [pair.near.open_uni() for _ in range(500)]
    assert refused(pair.near.open_uni)
    streams.clear()
    pair.forget()
