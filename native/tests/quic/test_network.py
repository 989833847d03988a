"""Paths and unknown peers: packet sizes, IPv6, many connections, garbage."""

from __future__ import annotations

import errno
import os
import random
import socket
import threading
import time

import certificates
import pytest
from conftest import MakeEndpoint
from harness import EVENT_TIMEOUT, Pair, connect, receive, result, until
from nexar_native import quic


def mtu(connection: quic.Connection) -> float:
    return connection.stats()["mtu"]


def flow(pair: Pair, size: float) -> None:
    """Move bytes until packets have grown to `size`."""
    here, there = pair.stream()
    data = os.urandom(1 << 20)
    deadline = time.monotonic() + EVENT_TIMEOUT
    while mtu(pair.near) < size and time.monotonic() < deadline:
        writing = here.post_write(data)
        assert receive(pair.b, there, len(data)) == data
        assert writing.done


def test_packets_grow_to_the_loopback_size(pair: Pair) -> None:
    flow(pair, 60000)
    assert mtu(pair.near) > 60000
    assert pair.near.stats()["black_holes"] == 0


def test_packets_grow_to_the_network_size(make_endpoint: MakeEndpoint) -> None:
    pair = connect(make_endpoint("a", loopback_mtu=8972), make_endpoint("b", loopback_mtu=8972))
    flow(pair, 8900)
    assert 8900 < mtu(pair.near) <= 8972
    assert pair.near.stats()["black_holes"] == 0


def test_large_first_packets_complete_the_handshake(make_endpoint: MakeEndpoint) -> None:
    options = {"initial_mtu": 16000, "max_mtu": 16000, "loopback_mtu": 65000}
    pair = connect(make_endpoint("a", **options), make_endpoint("b", **options))
    assert mtu(pair.near) >= 16000


def test_segmented_sends_never_exceed_what_the_kernel_takes(make_endpoint: MakeEndpoint) -> None:
    """At every packet size a batch stays below 64 KiB: else the kernel refuses it whole, packets
    seem lost, and the size falls back to the least."""
    for size in (1200, 1452, 4000, 9000, 33000, 65000):
        options = {"initial_mtu": 1200, "loopback_mtu": size}
        pair = connect(make_endpoint("a", **options), make_endpoint("b", **options))
        here, there = pair.stream()
        data = os.urandom(8 << 20)
        here.post_write(data)
        assert receive(pair.b, there, len(data)) == data
        stats = pair.near.stats()
        assert stats["black_holes"] == 0
        assert stats["lost_packets"] <= stats["sent_packets"] * 0.2


def test_ipv6(make_endpoint: MakeEndpoint) -> None:
    pair = connect(make_endpoint("a", host="::1"), make_endpoint("b", host="::1"))
    assert pair.near.remote_address == pair.b.address
    assert pair.near.remote_address[0] == "::1"
    here, there = pair.stream()
    here.write(b"six")
    assert receive(pair.b, there, 3) == b"six"


def test_a_dual_stack_endpoint_serves_and_dials_both_families(make_endpoint: MakeEndpoint) -> None:
    both = make_endpoint("b", host="::")
    four, six = make_endpoint("a"), make_endpoint("a", host="::1")
    port = both.address[1]
    for client, host in ((four, "127.0.0.1"), (six, "::1")):
        accepting = both.post_accept()
        near = client.connect((host, port), "b", EVENT_TIMEOUT)
        far = result(both, accepting)
        assert far.remote_address == client.address
        assert near.remote_address == (host, port)
        accepting = client.post_accept()
        back = both.connect(client.address, "a", EVENT_TIMEOUT)
        assert back.remote_address == client.address
        assert result(client, accepting).remote_address[0] == host


def test_the_wrong_family_and_unusable_addresses_are_refused(make_endpoint: MakeEndpoint) -> None:
    a = make_endpoint("a")
    with pytest.raises(ValueError, match="family"):
        a.connect(("::1", 1), "b", 1)
    with pytest.raises(ValueError, match="address"):
        a.connect(("localhost", 1), "b", 1)
    with pytest.raises(ValueError, match="server_name"):
        a.connect(("127.0.0.1", 1), "not a name!", 1)
    with pytest.raises(ValueError, match="address"):
        a.connect(("127.0.0.1", 0), "b", 1)
    with pytest.raises(OSError, match=r"in use|permitted") as refused:
        quic.Endpoint(a.address, None, certificates.trust())
    assert refused.value.errno in (errno.EADDRINUSE, errno.EPERM)
    assert "os error" not in str(refused.value)


def test_a_peer_sends_no_larger_packets_than_it_was_allowed(make_endpoint: MakeEndpoint) -> None:
    a, b = make_endpoint("a"), make_endpoint("b", max_mtu=1200, loopback_mtu=1200)
    pair = connect(a, b)
    here, there = pair.stream()
    here.write(bytes(1 << 20))
    receive(b, there, 1 << 20)
    assert mtu(pair.near) == 1200
    pair.forget()


def test_two_hundred_connections(make_endpoint: MakeEndpoint) -> None:
    # 210 handshakes at once take over 10 s where other processes need the cores.
    a, b = make_endpoint("a", handshake_timeout=60.0), make_endpoint("b", handshake_timeout=15.0)
    queue = quic.Completions(b)
    for _ in range(210):
        b.post_accept(queue)
    dialing = [a.post_connect(b.address, "b") for _ in range(210)]
    near = [result(a, operation, 60) for operation in dialing]
    far: list[quic.Connection] = []
    while len(far) < 210:
        operations, _ = queue.wait(EVENT_TIMEOUT)
        assert operations
        far += [operation.result() for operation in operations]
    assert a.stats()["connections"] == 210
    # A first packet that was sent twice, and answered once by Retry, leaves a handshake that ends at its timeout.
    until(lambda: b.stats()["connections"] == 210)
    for number, connection in enumerate(near):
        stream = connection.open_uni()
        stream.write(number.to_bytes(2, "big"))
        stream.finish()
        connection.stats()
    seen = set()
    for connection in far:
        stream = result(b, connection.post_accept_uni())
        seen.add(int.from_bytes(receive(b, stream, 2), "big"))
    assert seen == set(range(210))


def test_the_connection_limit_refuses_further_peers(make_endpoint: MakeEndpoint) -> None:
    b = make_endpoint("b", max_connections=2)
    a = make_endpoint("a")
    kept = [connect(a, b) for _ in range(2)]
    with pytest.raises(quic.ConnectError):
        a.connect(b.address, "b", EVENT_TIMEOUT)
    assert any("limit" in reason for _, reason in b.refusals())
    with pytest.raises(quic.ConnectError, match="limit"):
        b.connect(a.address, "a", 1)
    del kept


def test_addresses_are_validated_when_many_are_half_way_in(make_endpoint: MakeEndpoint) -> None:
    """Clients that stop after their first packet fill the half-open places."""
    b = make_endpoint("b", retry_handshakes=3)
    stuck = [make_endpoint("a", handshake_timeout=30) for _ in range(3)]
    relay = Blackhole(b.address)
    with relay.socket:
        dialing = [endpoint.post_connect(relay.address, "b") for endpoint in stuck]
        relay.forward(b, 3)
        assert b.stats()["handshakes"] == 3
        pair = connect(make_endpoint("a"), b)
        assert b.stats()["retried"] >= 1
        assert pair.far.verified
        for operation in dialing:
            operation.cancel()


class Blackhole:
    """Passes clients' first packets on and swallows every answer."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.socket.settimeout(EVENT_TIMEOUT)
        self.address: tuple[str, int] = self.socket.getsockname()
        self._target = target

    def forward(self, server: quic.Endpoint, count: int) -> None:
        known: set[tuple[str, int]] = set()
        deadline = time.monotonic() + EVENT_TIMEOUT
        while server.stats()["handshakes"] < count and time.monotonic() < deadline:
            data, source = self.socket.recvfrom(65536)
            if source != self._target and source not in known:
                known.add(source)
                self.socket.sendto(data, self._target)
            server.wait([], 0.001)


def test_garbage_is_ignored_and_costs_nothing_lasting(pair: Pair) -> None:
    chance = random.Random(1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unauthenticated:
        for number in range(3000):
            size = chance.choice([0, 1, 20, 21, 40, 1200, 1452, 9000])
            data = bytearray(chance.randbytes(size))
            if data and number % 3 == 0:
                data[0] = chance.choice([0x40, 0xC0, 0xC3, 0xE0, 0xF0])
            if len(data) > 5 and number % 4 == 0:
                data[1:5] = b"\0\0\0\1"
            unauthenticated.sendto(data, pair.b.address)
            if number % 64 == 0:
                pair.b.wait([], 0)
    here, there = pair.stream()
    here.write(b"fine")
    assert receive(pair.b, there, 4) == b"fine"
    assert pair.b.stats()["connections"] == 1
    assert pair.b.stats()["handshakes"] == 0


def test_damaged_and_replayed_packets_do_not_count_as_received(make_endpoint: MakeEndpoint) -> None:
    """A man in the middle repeats and damages what it sees: `last_received` is not refreshed."""
    a = make_endpoint("a", keep_alive_interval=0)
    b = make_endpoint("b", keep_alive_interval=0)
    middle = Middle(b.address)
    with middle.socket:
        accepting = b.post_accept()
        dialing = a.post_connect(middle.address, "b")
        while not (dialing.done and accepting.done):
            middle.shovel()
        far, near = accepting.result(), dialing.result()
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            middle.shovel()
        quiet = far.stats()
        for _ in range(20):
            middle.replay()
            b.wait([], 0.005)
        after = far.stats()
        assert after["datagrams_received"] > quiet["datagrams_received"]
        assert after["last_received"] > quiet["last_received"]
        del near


class Middle:
    """Relays between one client and a server, loses some packets, and remembers the client's last one."""

    def __init__(self, server: tuple[str, int], lose_every: int = 0) -> None:
        self._lose_every, self._seen = lose_every, 0
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.socket.settimeout(0.02)
        self.address: tuple[str, int] = self.socket.getsockname()
        self._server = server
        self._client: tuple[str, int] | None = None
        self._last = b""

    def shovel(self) -> None:
        try:
            data, source = self.socket.recvfrom(65536)
        except TimeoutError:
            return
        self._seen += 1
        if self._lose_every and self._seen % self._lose_every == 0:
            return
        if source == self._server:
            assert self._client is not None
            self.socket.sendto(data, self._client)
        else:
            self._client, self._last = source, data
            self.socket.sendto(data, self._server)

    def replay(self) -> None:
        self.socket.sendto(self._last, self._server)
        damaged = bytearray(self._last)
        damaged[-1] ^= 1
        self.socket.sendto(damaged, self._server)


def test_bytes_arrive_unharmed_over_a_path_that_loses_packets(make_endpoint: MakeEndpoint) -> None:
    a, b = make_endpoint("a", loopback_mtu=1452), make_endpoint("b", loopback_mtu=1452)
    middle = Middle(b.address, lose_every=50)
    over = threading.Event()

    def relay() -> None:
        while not over.is_set():
            middle.shovel()

    thread = threading.Thread(target=relay)
    with middle.socket:
        thread.start()
        accepting = b.post_accept()
        near = a.connect(middle.address, "b", EVENT_TIMEOUT)
        pair = Pair(a, b, near, result(b, accepting))
        here, there = pair.stream()
        data = os.urandom(2 << 20)
        writing = here.post_write(data)
        assert receive(b, there, len(data)) == data
        assert writing.done
        assert near.stats()["lost_packets"] > 0
        over.set()
        thread.join()


def test_last_received_is_the_time_since_the_last_packet_of_the_peer(make_endpoint: MakeEndpoint) -> None:
    a = make_endpoint("a", keep_alive_interval=0)
    pair = connect(a, make_endpoint("b", keep_alive_interval=0))
    here, there = pair.stream()
    while pair.far.stats()["last_received"] < 0.3:
        pair.b.wait([], 0.05)
    here.write(b"x")
    assert receive(pair.b, there, 1) == b"x"
    assert pair.far.stats()["last_received"] < 0.25


def test_a_peer_that_opens_many_streams_is_held_to_the_limit(make_endpoint: MakeEndpoint) -> None:
    pair = connect(make_endpoint("a"), make_endpoint("b", max_streams=64))
    opened = [pair.near.open_uni() for _ in range(64)]
    for stream in opened:
        stream.write(b"x")
    with pytest.raises(BlockingIOError):
        pair.near.open_uni()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alpn", b""),
        ("idle_timeout", 0.0),
        ("idle_timeout", float("nan")),
        ("keep_alive_interval", -1.0),
        ("initial_mtu", 100),
        ("initial_mtu", 60000),
        ("max_mtu", 70000),
        ("loopback_mtu", 0),
        ("stream_window_bytes", 0),
        ("connection_window_bytes", -1),
        ("send_window_bytes", 1),
        ("socket_buffer_bytes", 0),
        ("max_streams", 0),
        ("max_connections", 0),
        ("handshake_timeout", float("inf")),
    ],
)
def test_bad_settings_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        quic.Settings(**{name: value})  # type: ignore[arg-type]
