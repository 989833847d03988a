"""Who is let in: the proofs by themselves, then unauthenticated peers at a real listener."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nexar.transport.base import ConnectRefused, Expected
from nexar.transport.shm import handshake, transport
from nexar.transport.shm.handshake import DialerSide, HandshakeRefused, ListenerSide, derive_key, new_nonce
from nexar.transport.shm.ring_frames import SegmentGeometry, create_segment
from nexar.transport.shm.socket_directory import ShmAddress, listen_directory, parse_shm_address
from tests.conformance.harness import Node, dial, in_thread, pump, quieten
from tests.unit.transport.shm.stage import LEFT, RIGHT, make_node

SECRET = b"s" * 32


def test_both_prove_themselves() -> None:
    dialer = DialerSide.start(derive_key(SECRET, LEFT), LEFT, RIGHT)
    side = ListenerSide.start(SECRET, RIGHT, dialer.hello)
    nonce = new_nonce()
    assert side.accept_offer(dialer.offer(side.challenge(), nonce)) == nonce
    assert side.dialer == LEFT


def test_a_listener_without_the_secret_is_refused() -> None:
    dialer = DialerSide.start(derive_key(SECRET, LEFT), LEFT, RIGHT)
    side = ListenerSide.start(b"?" * 32, RIGHT, dialer.hello)
    with pytest.raises(HandshakeRefused, match="the listener does not know"):
        dialer.offer(side.challenge(), new_nonce())


def test_a_node_with_the_key_of_another_is_refused() -> None:
    honest = DialerSide.start(derive_key(SECRET, LEFT), LEFT, RIGHT)
    side = ListenerSide.start(SECRET, RIGHT, DialerSide.start(honest.key, 77, RIGHT).hello)
    with pytest.raises(HandshakeRefused, match="the listener does not know"):
        honest.offer(side.challenge(), new_nonce())  # it cannot even make an offer that this listener would accept


def test_an_offer_cannot_be_replayed_on_another_connection() -> None:
    dialer = DialerSide.start(derive_key(SECRET, LEFT), LEFT, RIGHT)
    first = ListenerSide.start(SECRET, RIGHT, dialer.hello)
    offer = dialer.offer(first.challenge(), new_nonce())
    second = ListenerSide.start(SECRET, RIGHT, dialer.hello)
    with pytest.raises(HandshakeRefused, match="the dialer does not know"):
        second.accept_offer(offer)


def test_a_proof_cannot_be_reflected() -> None:
    dialer = DialerSide.start(derive_key(SECRET, LEFT), LEFT, RIGHT)
    side = ListenerSide.start(SECRET, RIGHT, dialer.hello)
    with pytest.raises(HandshakeRefused, match="the dialer does not know"):
        side.accept_offer(side.challenge())


def test_a_changed_segment_nonce_is_refused() -> None:
    dialer = DialerSide.start(derive_key(SECRET, LEFT), LEFT, RIGHT)
    side = ListenerSide.start(SECRET, RIGHT, dialer.hello)
    offer = dialer.offer(side.challenge(), new_nonce())
    with pytest.raises(HandshakeRefused):
        side.accept_offer(new_nonce() + offer[32:])


def test_a_hello_for_another_node_or_another_protocol_is_refused() -> None:
    hello = DialerSide.start(SECRET, LEFT, 77).hello
    with pytest.raises(HandshakeRefused, match="asked for node"):
        ListenerSide.start(SECRET, RIGHT, hello)
    with pytest.raises(HandshakeRefused, match="version"):
        ListenerSide.start(SECRET, 77, b"NEXARSHM" + hello[8:])


def test_an_address_shows_its_key_only_to_whom_it_is_for() -> None:
    address = ShmAddress(RIGHT, "/tmp/a@b:c/s", SECRET)
    assert parse_shm_address(address.secret) == address
    assert parse_shm_address(address.shown) == ShmAddress(RIGHT, "/tmp/a@b:c/s")
    assert SECRET.hex() not in address.shown + repr(address)
    assert listen_directory("shm:///run/x") == listen_directory("/run/x") == "/run/x"
    assert listen_directory("shm://") is listen_directory("") is None


# ---------------------------------------------------------------------------------------------- at a real listener
@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = make_node(RIGHT, tmp_path)
    yield made
    made.close()


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Node]:
    made = make_node(LEFT, tmp_path)
    yield made
    made.close()


def address_of(node: Node, dialer: int = LEFT) -> ShmAddress:
    text = node.transport.address_for(dialer)
    assert text is not None
    return parse_shm_address(text)


def connect(node: Node) -> socket.socket:
    unauthenticated = socket.socket(socket.AF_UNIX)
    unauthenticated.connect(address_of(node).path)
    return unauthenticated


def refusal(node: Node) -> str:
    pump([node], lambda: node.refused, "the refusal")
    assert not node.accepted
    return node.refused[0][1]


def try_dial(left: Node, node: Node, address: ShmAddress) -> ConnectRefused:
    deadline = time.monotonic() + 20
    thread, outcome = in_thread(lambda: left.transport.connect(address.secret, Expected(address.node), deadline))
    pump([left, node], lambda: outcome, "the outcome of the dial")
    thread.join()
    assert isinstance(outcome[0], ConnectRefused), outcome
    return outcome[0]


def test_a_dialer_with_a_wrong_key_learns_nothing_but_that(left: Node, node: Node) -> None:
    error = try_dial(left, node, ShmAddress(RIGHT, address_of(node).path, b"k" * 32))
    assert error.verification
    assert (b"k" * 32).hex() not in str(error)
    assert "hung up" in refusal(node)


def test_the_key_of_another_node_does_not_serve(left: Node, node: Node) -> None:
    assert try_dial(left, node, address_of(node, dialer=77)).verification


def test_an_address_without_a_key_cannot_be_dialed(left: Node, node: Node) -> None:
    assert node.transport.address is not None
    assert "no key" in try_dial(left, node, parse_shm_address(node.transport.address)).reason


def test_who_hangs_up_is_reported(node: Node) -> None:
    connect(node).close()
    assert "hung up" in refusal(node)


def test_who_says_nonsense_is_reported(node: Node) -> None:
    with connect(node) as unauthenticated:
        unauthenticated.send(os.urandom(64))
        assert "version" in refusal(node)


def offer_to(node: Node, unauthenticated: socket.socket, descriptors: list[int], nonce: bytes) -> None:
    dialer = DialerSide.start(address_of(node).key or b"", LEFT, RIGHT)
    unauthenticated.send(dialer.hello)
    unauthenticated.setblocking(False)
    received: list[bytes] = []
    pump([node], lambda: received or _take(unauthenticated, received), "the challenge")
    socket.send_fds(unauthenticated, [dialer.offer(received[0], nonce)], descriptors)


def _take(unauthenticated: socket.socket, into: list[bytes]) -> None:
    try:
        into.append(unauthenticated.recv(64))
    except BlockingIOError:
        return


def test_an_offer_without_a_segment_is_refused(node: Node) -> None:
    with connect(node) as unauthenticated:
        offer_to(node, unauthenticated, [], new_nonce())
        assert "0 descriptors" in refusal(node)


def test_an_offer_of_something_else_than_memory_is_refused(node: Node) -> None:
    with connect(node) as unauthenticated:
        offer_to(node, unauthenticated, [unauthenticated.fileno()], new_nonce())
        assert "not a memory segment" in refusal(node)


def test_a_segment_that_does_not_hold_the_nonce_is_refused(node: Node) -> None:
    segment, descriptor = create_segment(SegmentGeometry())
    with connect(node) as unauthenticated:
        offer_to(node, unauthenticated, [descriptor], new_nonce())
        assert "nonce" in refusal(node)
    segment.release()
    os.close(descriptor)


def test_descriptors_that_unauthenticated_peers_pass_are_closed(node: Node) -> None:
    with connect(node) as unauthenticated:
        reading, writing = os.pipe()
        socket.send_fds(unauthenticated, [b"x"], [reading])
        os.close(reading)
        quieten([node])
        unauthenticated.close()
        refusal(node)
        with pytest.raises(BrokenPipeError):
            os.write(writing, b"nobody reads")
        os.close(writing)


def test_a_process_of_another_user_is_refused(left: Node, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "credentials_of", lambda _: (4711, os.geteuid() + 1))
    with connect(node):
        assert "runs as user" in refusal(node)
    assert "4711" in node.refused[0][0]
    assert try_dial(left, node, address_of(node)).verification, "nor does a dialer trust such a listener"


def test_a_silent_unauthenticated_peer_is_dropped_at_its_deadline(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HANDSHAKE_TIMEOUT", 0.05)
    begin = time.monotonic()
    with connect(node):
        assert "no proof" in refusal(node)
    assert time.monotonic() - begin >= 0.05


def test_a_crowd_of_silent_unauthenticated_peers_does_not_keep_a_member_out(left: Node, node: Node) -> None:
    crowd = []
    for _ in range(transport.MAX_UNVERIFIED + 10):
        crowd.append(connect(node))
        pump([node], lambda: not node.poll(), "the knock")
    near, _ = dial(left, node)
    assert near.peer.node == RIGHT
    assert len(node.refused) >= 10
    for unauthenticated in crowd:
        unauthenticated.close()
