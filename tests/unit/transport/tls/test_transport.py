import errno
import logging
import os
import resource
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import pairwise

import pytest

from nexar.errors import UsageError
from nexar.security.authority import Authority
from nexar.security.certificates import Credentials, Trust
from nexar.transport.base import Carrier, CarrierLost, ConnectRefused, Expected
from nexar.transport.sleeper import PollSleeper
from nexar.transport.tls import TlsTransport
from nexar.transport.tls import transport as transport_module
from nexar.transport.tls.transport import PendingDials
from nexar.wire.frame import HEADER_BYTES, Frame, FrameKind, Lane, encode
from tests.conformance.harness import EVENT_TIMEOUT, Node, Pair, Side, dial, in_thread, pump

AUTHORITY = Authority.create("c")
TRUST = Trust(AUTHORITY.certificate_pem)
SERVER, CLIENT = 1, 2

Open = Callable[..., Node]


@pytest.fixture
def open_node() -> Iterator[Open]:
    with ExitStack() as stack:

        def make(
            number: int, credentials: Credentials | None = None, listen: str | None = None, **settings: object
        ) -> Node:
            sleeper = PollSleeper()
            shown = credentials or AUTHORITY.admit(number)
            node = Node(number, TlsTransport(sleeper, shown, TRUST, **settings), sleeper)  # type: ignore[arg-type]
            stack.callback(node.close)
            if listen is not None:
                node.transport.listen(listen, node)
            return node

        yield make


def connected(near: Node, far: Node, address: str | None = None) -> Pair:
    pair = Pair(*(Side(node, end) for node, end in zip((near, far), dial(near, far, address), strict=True)))
    for side in (pair.left, pair.right):
        side.carrier.attach(side.received)
    return pair


def port_of(node: Node) -> int:
    assert node.transport.address is not None
    return int(node.transport.address.rpartition(":")[2])


needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 on this host")


@needs_ipv6
def test_ipv6_addresses_are_listened_on_and_dialed(open_node: Open) -> None:
    server, client = open_node(SERVER, listen="[::1]:0"), open_node(CLIENT)
    assert server.transport.address == f"[::1]:{port_of(server)}"
    pair = connected(client, server)
    pair.check_usable()
    assert pair.right.carrier.peer.address.startswith("[::1]:")


@needs_ipv6
@pytest.mark.parametrize("listen", ["[::]:0", ":0"])
def test_one_listener_takes_both_families_and_names_each_peer_as_it_is(open_node: Open, listen: str) -> None:
    server, client = open_node(SERVER, listen=listen), open_node(CLIENT)
    for host, shown in (("127.0.0.1", "127.0.0.1:"), ("[::1]", "[::1]:")):
        pair = connected(client, server, f"{host}:{port_of(server)}")
        pair.check_usable()
        assert pair.right.carrier.peer.address.startswith(shown)


def test_a_name_is_resolved_and_its_addresses_tried_in_turn(open_node: Open) -> None:
    server, client = open_node(SERVER, listen="127.0.0.1:0"), open_node(CLIENT)
    connected(client, server, f"localhost:{port_of(server)}").check_usable()


def test_a_name_that_does_not_exist_refuses_the_dial(open_node: Open) -> None:
    with pytest.raises(ConnectRefused) as refused:
        open_node(CLIENT).transport.connect(
            "no-such-host.invalid:1", Expected(SERVER), time.monotonic() + EVENT_TIMEOUT
        )
    assert not refused.value.verification


def test_both_ends_know_each_other(open_node: Open) -> None:
    server, client = open_node(SERVER, listen="127.0.0.1:0"), open_node(CLIENT)
    pair = connected(client, server)
    near, far = pair.left.carrier, pair.right.carrier
    assert (near.peer.node, far.peer.node) == (SERVER, CLIENT)
    assert near.peer.verified
    assert far.peer.verified
    assert (near.dialed, far.dialed) == (True, False)
    assert near.peer.address == server.transport.address


def test_renewed_credentials_are_shown_from_the_next_dial_on_and_old_carriers_go_on(open_node: Open) -> None:
    server, client = open_node(SERVER, listen="127.0.0.1:0"), open_node(CLIENT)
    old = connected(client, server)
    renewed = AUTHORITY.admit(CLIENT)
    assert isinstance(client.transport, TlsTransport)
    client.transport.replace_credentials(renewed, TRUST)
    new = connected(client, server)
    assert new.right.carrier.peer.certificate != old.right.carrier.peer.certificate
    old.check_usable()
    new.check_usable()


def test_an_authority_that_is_trusted_no_more_is_believed_no_more(open_node: Open) -> None:
    server, client = open_node(SERVER, listen="127.0.0.1:0"), open_node(CLIENT)
    elsewhere = Authority.create("c")
    assert isinstance(server.transport, TlsTransport)
    server.transport.replace_credentials(AUTHORITY.admit(SERVER), Trust(elsewhere.certificate_pem))
    address = server.transport.address or ""
    thread, outcome = in_thread(
        lambda: client.transport.connect(address, Expected(SERVER), time.monotonic() + EVENT_TIMEOUT)
    )
    pump([server], lambda: outcome, "the refusal")
    thread.join()
    assert isinstance(outcome[0], ConnectRefused)
    assert outcome[0].verification


def test_many_dials_at_once_succeed(open_node: Open) -> None:
    server, client = open_node(SERVER, listen="127.0.0.1:0"), open_node(CLIENT)
    address = server.transport.address or ""
    dials = [
        in_thread(lambda: client.transport.connect(address, Expected(SERVER), time.monotonic() + EVENT_TIMEOUT))
        for _ in range(20)
    ]
    pump([server], lambda: all(outcome for _, outcome in dials) and len(server.accepted) == 20, "all dials")
    for thread, outcome in dials:
        thread.join()
        assert isinstance(outcome[0], Carrier)
    assert server.refused == []


def test_a_dial_that_cannot_even_begin_says_why(open_node: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect_ex", lambda *_: errno.ENETUNREACH)
    with pytest.raises(ConnectRefused) as refused:
        open_node(CLIENT).transport.connect("127.0.0.1:9", Expected(SERVER), time.monotonic() + EVENT_TIMEOUT)
    assert refused.value.reason == "Network is unreachable"


def test_ctrl_c_ends_a_dial_and_leaves_nothing_open(open_node: Open) -> None:
    client = open_node(CLIENT)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        main = threading.main_thread().ident or 0

        def interrupt() -> None:
            accepted.extend(silent.accept()[0] for _ in range(2))  # both halves of the dial are on their way
            signal.pthread_kill(main, signal.SIGINT)

        accepted: list[socket.socket] = []
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            client.transport.connect(
                f"127.0.0.1:{silent.getsockname()[1]}", Expected(SERVER), time.monotonic() + EVENT_TIMEOUT
            )
        thread.join()
        for connection in accepted:
            connection.close()


def test_a_plain_transport_warns_once_per_process(
    open_node: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_module, "_warned", threading.Lock())
    with caplog.at_level(logging.WARNING):
        open_node(SERVER, encrypt=False)
        open_node(CLIENT, encrypt=False)
    assert [record.message for record in caplog.records if "NOT encrypted" in record.message]
    assert len(caplog.records) == 1


def test_a_plain_carrier_really_is_plain_and_an_encrypted_one_is_not(open_node: Open) -> None:
    for encrypt in (True, False):
        server, client = open_node(SERVER, listen="127.0.0.1:0", encrypt=encrypt), open_node(CLIENT, encrypt=encrypt)
        pair = connected(client, server)
        pair.left.send(b"can anybody read this?", lane=Lane.DATA)
        seen = pair.right.carrier._data.channel.socket.recv(4096, socket.MSG_PEEK)  # type: ignore[attr-defined]
        assert (b"can anybody read this?" in seen) != encrypt


@pytest.mark.parametrize("plain", [False, True])
def test_one_port_takes_both_kinds_where_that_is_wanted(open_node: Open, plain: bool) -> None:
    server, client = open_node(SERVER, listen="127.0.0.1:0", plain_too=True), open_node(CLIENT, plain_too=True)
    with server.driving():
        carrier = connect(client, server, plain=plain)
    pump([server], lambda: server.accepted, "its carrier")
    assert (carrier.scheme, server.accepted[0].scheme) == (("tcp", "tcp") if plain else ("tls", "tls"))
    assert carrier.peer.verified
    assert server.accepted[0].peer.node == CLIENT


@pytest.mark.parametrize("side", ["dialer", "listener"])
def test_nobody_goes_on_without_encryption_unless_both_are_configured_so(open_node: Open, side: str) -> None:
    server = open_node(SERVER, listen="127.0.0.1:0", plain_too=side == "dialer")
    client = open_node(CLIENT, plain_too=side == "listener")
    with server.driving(), pytest.raises(ConnectRefused, match="encrypt"):
        connect(client, server, plain=True)


def connect(near: Node, far: Node, *, plain: bool) -> Carrier:
    assert far.transport.address is not None
    expected = Expected(far.number, plain=plain)
    return near.transport.connect(far.transport.address, expected, time.monotonic() + EVENT_TIMEOUT)


def test_a_forked_child_that_abandons_says_nothing_to_the_peer(open_node: Open) -> None:
    server, client = open_node(SERVER, listen="127.0.0.1:0"), open_node(CLIENT)
    pair = connected(client, server)
    data = memoryview(bytes(1 << 20))
    pair.right.carrier.expect_payload(1, memoryview(bytearray(1 << 20)))
    pair.left.carrier.send_payload(1, data)
    before = set(os.listdir("/proc/self/fd"))
    child = os.fork()
    if child == 0:
        client.transport.abandon()
        server.transport.abandon()
        left = [name for name in before if os.path.exists(f"/proc/self/fd/{name}") and _is_socket(name)]
        os._exit(len(left))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pair.until(lambda: pair.right.received.payloads, "the payload that was on its way")
    pair.check_usable()
    assert pair.left.received.lost == pair.right.received.lost == []


def _is_socket(name: str) -> bool:
    return os.readlink(f"/proc/self/fd/{name}").startswith("socket:")


def test_a_listener_without_descriptors_goes_on_when_there_are_some_again(open_node: Open) -> None:
    server, client = open_node(SERVER, listen="127.0.0.1:0"), open_node(CLIENT)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_connection(("127.0.0.1", port_of(server))) as waiting:
        resource.setrlimit(resource.RLIMIT_NOFILE, (waiting.fileno() + 1, before[1]))
        try:
            assert _next_descriptor_is_refused()
            server.poll()
            due = server.transport.due()
            assert due is not None
            assert due > time.monotonic() - EVENT_TIMEOUT
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        connected(client, server).check_usable()


def _next_descriptor_is_refused() -> bool:
    try:
        os.close(os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        return error.errno == errno.EMFILE
    return False


def test_listening_needs_credentials_and_happens_once(open_node: Open) -> None:
    server = open_node(SERVER, listen="127.0.0.1:0")
    with pytest.raises(UsageError):
        server.transport.listen("127.0.0.1:0", server)
    sleeper = PollSleeper()
    anonymous = Node(CLIENT, TlsTransport(sleeper, None, TRUST), sleeper)
    with pytest.raises(UsageError):
        anonymous.transport.listen("127.0.0.1:0", anonymous)
    anonymous.close()


def test_a_port_that_is_taken_is_an_os_error(open_node: Open) -> None:
    server, other = open_node(SERVER, listen="127.0.0.1:0"), open_node(CLIENT)
    with pytest.raises(OSError, match=r"(?i)in use"):
        other.transport.listen(server.transport.address or "", other)


@pytest.mark.parametrize("encrypt", [True, False])
def test_little_lies_between_a_sender_and_a_near_receiver_that_does_not_read(open_node: Open, encrypt: bool) -> None:
    """What lies there is what a later frame must wait for."""
    server, client = open_node(SERVER, listen="127.0.0.1:0", encrypt=encrypt), open_node(CLIENT, encrypt=encrypt)
    pair = connected(client, server)
    pair.right.carrier.expect_payload(1, memoryview(bytearray(64 << 20)))
    pair.left.carrier.send_payload(1, memoryview(bytes(64 << 20)))
    sent = -1.0
    while sent < (sent := pair.left.carrier.stats()["bytes_sent"]):
        client.rest(0.2)
        client.poll()
    assert sent < 4 << 20


@pytest.mark.parametrize("encrypt", [True, False])
def test_half_a_frame_does_not_keep_the_driving_thread_awake(open_node: Open, encrypt: bool) -> None:
    server, client = open_node(SERVER, listen="127.0.0.1:0", encrypt=encrypt), open_node(CLIENT, encrypt=encrypt)
    pair = connected(client, server)
    frame = encode(Frame(kind=FrameKind.CONTROL, lane=Lane.DATA, body=10)) + b"0123456789"
    channel = pair.left.carrier._data.channel  # type: ignore[attr-defined]
    stops = (0, 50, HEADER_BYTES + 3, len(frame))
    for start, stop in pairwise(stops):
        assert pair.right.received.frames == []
        channel.write(memoryview(frame)[start:stop])
        pump([server], partial(_has_received, pair.right.carrier, stop), "the bytes")
        assert not server.poll()
        assert server.transport.prepare_sleep()
    assert pair.right.received.frames[0][1] == b"0123456789"


def _has_received(carrier: Carrier, count: int) -> bool:
    return carrier.stats()["bytes_received"] == count


def test_frames_that_arrived_before_the_peer_went_are_delivered_although_a_send_failed_first(open_node: Open) -> None:
    server, client = open_node(SERVER, listen="127.0.0.1:0"), open_node(CLIENT)
    pair = connected(client, server)
    pair.left.send(b"last words", lane=Lane.CONTROL)
    pair.left.carrier.abort("gone")
    with pytest.raises(CarrierLost):
        _send_for_ever(pair.right)
    pump([server], lambda: pair.right.received.lost, "the loss")
    assert [body for _, body in pair.right.received.frames] == [b"last words"]
    assert pair.right.received.lost[0].kind == "peer"


def _send_for_ever(side: Side) -> None:
    """The first send after the peer went may still be taken, some later one is not."""
    while True:
        side.send(b"are you there?")


def test_closing_from_within_a_sink_is_allowed(open_node: Open) -> None:
    server, client = open_node(SERVER, listen="127.0.0.1:0"), open_node(CLIENT)
    pair = connected(client, server)
    pair.right.received.on_frame = lambda *_: server.transport.close()
    pair.left.send(b"close, please")
    pair.left.send(b"not heard any more")
    pump([server], lambda: pair.right.received.frames, "the frame")
    assert not server.poll()
    assert len(pair.right.received.frames) == 1


def is_to_end(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


def test_a_dial_goes_on_until_all_are_ended():
    dials = PendingDials()
    with dials.register("here:1") as one, dials.register("there:1") as two:
        assert not is_to_end(one)
        assert not is_to_end(two)
        dials.end()
        assert is_to_end(one)
        assert is_to_end(two)
    dials.end()


def test_one_that_is_over_is_not_ended():
    dials = PendingDials()
    with dials.register("here:1") as one:
        assert one >= 0
    dials.end()


def test_none_begins_after_the_end():
    dials = PendingDials()
    dials.end()
    with pytest.raises(ConnectRefused, match=r"cannot connect to here:1: .* closed"), dials.register("here:1"):
        pass


def test_a_forked_child_does_not_keep_a_dial_of_its_parent_from_ending():
    dials = PendingDials()
    reading, writing = os.pipe()
    with dials.register("here:1") as one:
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
        dials.end()
        assert is_to_end(one)
    os.close(writing)
    os.waitpid(child, 0)
    os.close(reading)


def test_a_forked_child_can_let_go():
    dials = PendingDials()
    with dials.register("here:1") as one:
        child = os.fork()
        if child == 0:
            dials.abandon()
            os._exit(1 if os.path.exists(f"/proc/self/fd/{one}") else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not is_to_end(one)
