"""What unauthenticated peers do at a seed, while honest nodes form a cluster."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from nexar.cluster.seed import SeedService
from nexar.errors import VersionMismatch
from nexar.security.authority import Authority
from nexar.security.certificates import Trust, make_request
from nexar.security.invitation import Invitation, parse_ticket
from nexar.transport.address import parse_address
from nexar.transport.base import CarrierLost, ConnectRefused, Expected
from nexar.transport.registry import load
from nexar.transport.sleeper import PollSleeper
from nexar.types import UNKNOWN_NODE
from nexar.wire.frame import Frame, FrameKind, Lane, encode
from nexar.wire.hello import PROTOCOL_VERSION, add_prefix
from nexar.wire.join import (
    MAX_JOIN_BYTES,
    MAX_UNVERIFIED_BYTES,
    JoinRefusedMessage,
    JoinRequest,
    Leave,
    Renew,
    ReserveRanks,
    decode_join,
)
from tests.cluster.joiners import END, EVENT_TIMEOUT, JoinDialer, Line, wait_for_event

HERE = "127.0.0.1:0"


@pytest.fixture
def seed() -> Iterator[SeedService]:
    with SeedService(HERE, 1) as made:
        yield made


def the_honest_one_gets_in(seed: SeedService, dialer: JoinDialer) -> None:
    line = dialer.dial(seed, 1000)
    line.join()
    assert line.receive_membership().members[0].node == 1000


def test_a_wrong_secret_is_refused_and_reported(seed: SeedService, dialer: JoinDialer) -> None:
    line = dialer.dial(seed, 7, Invitation((seed.address,), bytes(32)))
    line.hello()
    line.received.get(timeout=EVENT_TIMEOUT)
    line.send(line.application(bytes(32)))
    assert "does not match this cluster" in line.receive(JoinRefusedMessage).reason
    line.receive_end()
    wait_for_event(seed, "refused", "does not match")
    the_honest_one_gets_in(seed, dialer)


def test_a_proof_for_another_role_is_no_proof(seed: SeedService, dialer: JoinDialer) -> None:
    line = dialer.dial(seed, 7)
    proof = line.prove(line.greet(), "launcher")
    line.send(line.application(proof))
    assert "does not match" in line.receive(JoinRefusedMessage).reason


def test_what_was_said_on_one_line_is_worth_nothing_on_another(seed: SeedService, dialer: JoinDialer) -> None:
    """A recorded conversation, said again: the seed's nonce is another one."""
    honest, replayed = dialer.dial(seed, 7), dialer.dial(seed, 7)
    application = honest.application(honest.prove(honest.greet()))
    replayed.nonce, replayed.key = honest.nonce, honest.key
    replayed.greet()
    replayed.send(application)
    assert "does not match" in replayed.receive(JoinRefusedMessage).reason
    honest.send(application)
    assert honest.received.get(timeout=EVENT_TIMEOUT) != END


def test_a_node_joins_once(dialer: JoinDialer) -> None:
    with SeedService(HERE, 2) as seed:
        dialer.dial(seed, 7).join()
        again = dialer.dial(seed, 7)
        again.apply()
        assert "has joined already" in again.receive(JoinRefusedMessage).reason
        the_rest = dialer.dial(seed, 8)
        the_rest.join()
        assert the_rest.receive_membership().size == 2


def test_a_node_that_dies_after_joining_leaves_its_place_to_another(dialer: JoinDialer) -> None:
    with SeedService(HERE, 2) as seed:
        dying = dialer.dial(seed, 7)
        dying.join()
        dying.carrier.abort("killed")
        wait_for_event(seed, "gone")
        lines = [dialer.dial(seed, node) for node in (8, 9)]
        for line in lines:
            line.join()
        assert {member.node for member in lines[0].receive_membership().members} == {8, 9}


def test_a_late_comer_is_notified_that_the_cluster_has_formed(seed: SeedService, dialer: JoinDialer) -> None:
    the_honest_one_gets_in(seed, dialer)
    late = dialer.dial(seed, 7)
    late.apply()
    assert "has formed" in late.receive(JoinRefusedMessage).reason


def test_both_sides_learn_both_versions(seed: SeedService, dialer: JoinDialer) -> None:
    line = dialer.dial(seed, 7)
    line.hello(version=9)
    refused = line.receive(
        JoinRefusedMessage
    )  # its prefix has the seed's version: a joiner of version 9 reads that much
    assert "protocol 9" in refused.reason
    assert f"protocol {PROTOCOL_VERSION}" in refused.reason
    wait_for_event(seed, "refused", "protocol 9")


def test_a_joiner_of_another_version_recognises_the_seeds(
    seed: SeedService, dialer: JoinDialer, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = dialer.dial(seed, 7)
    line.hello(version=9)
    body = line.received.get(timeout=EVENT_TIMEOUT)
    assert isinstance(body, bytes)
    monkeypatch.setattr("nexar.wire.hello.PROTOCOL_VERSION", 9)
    with pytest.raises(VersionMismatch) as raised:
        decode_join(body, MAX_JOIN_BYTES)
    assert (raised.value.ours, raised.value.theirs) == (9, PROTOCOL_VERSION)


# ---------------------------------------------------------------- nonsense


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (b"", "bytes"),
        (b"GET / HTTP/1.1\r\n\r\n", "not a message of nexar"),
        (add_prefix(b"\xc1", 99), "malformed hello"),
    ],
    ids=["nothing", "another protocol", "garbage"],
)
def test_what_is_no_hello_is_refused(seed: SeedService, dialer: JoinDialer, first: bytes, reason: str) -> None:
    line = dialer.dial(seed, 7)
    line.say(first)
    assert reason in line.receive(JoinRefusedMessage).reason
    line.receive_end()
    the_honest_one_gets_in(seed, dialer)


@pytest.mark.parametrize("what", ["Challenge", "Renew", "Leave"])
def test_what_a_joiner_does_not_say_ends_its_line(seed: SeedService, dialer: JoinDialer, what: str) -> None:
    line = dialer.dial(seed, 7)
    challenge = line.greet()
    said = {"Challenge": challenge, "Renew": Renew(make_request(7, line.key)), "Leave": Leave("")}[what]
    line.send(said)
    if what != "Leave":
        line.receive(JoinRefusedMessage)
    line.receive_end()
    the_honest_one_gets_in(seed, dialer)


def test_a_launcher_that_applies_as_a_member_is_refused(seed: SeedService, dialer: JoinDialer) -> None:
    line = dialer.dial(seed, 7)
    line.send(line.application(line.prove(line.greet("launcher"))))
    assert "its hello says launcher" in line.receive(JoinRefusedMessage).reason


def test_a_request_for_another_node_is_refused(seed: SeedService, dialer: JoinDialer) -> None:
    line = dialer.dial(seed, 7)
    proof = line.prove(line.greet())
    line.send(JoinRequest(proof, make_request(8, line.key), "here", {}))
    assert "not made for node" in line.receive(JoinRefusedMessage).reason


def test_asking_twice_is_once_too_often(dialer: JoinDialer) -> None:
    with SeedService(HERE, 2) as seed:
        line = dialer.dial(seed, 7)
        proof = line.prove(line.greet())
        line.send(line.application(proof))
        line.received.get(timeout=EVENT_TIMEOUT)
        line.send(ReserveRanks(proof, make_request(7, line.key), "here", 1))
        assert "twice" in line.receive(JoinRefusedMessage).reason


def test_a_member_that_sends_data_to_the_seed_is_refused(seed: SeedService, dialer: JoinDialer) -> None:
    line = dialer.dial(seed, 7)
    line.join()
    line.receive_membership()
    line.say(b"", kind=FrameKind.TERMS)
    assert "kind" in line.receive(JoinRefusedMessage).reason


@pytest.mark.parametrize("size", [MAX_UNVERIFIED_BYTES + 1, 1 << 20])
def test_an_oversize_hello_is_refused_before_it_is_read(seed: SeedService, dialer: JoinDialer, size: int) -> None:
    line = dialer.dial(seed, 7)
    with suppress(CarrierLost):  # thrown out before all of it was sent
        line.carrier.send_frame(Lane.CONTROL, 0, encode(Frame(kind=FrameKind.CONTROL, body=size)), bytes(size))
    line.receive_end()
    wait_for_event(seed, "refused", str(size))
    the_honest_one_gets_in(seed, dialer)


def test_an_unauthenticated_peer_that_does_not_close_its_side_is_cut_off(seed: SeedService, dialer: JoinDialer) -> None:
    line = dialer.dial(seed, 7)
    line.carrier_finished = lambda _carrier: line.received.put("half")  # type: ignore[method-assign]
    line.say(b"nonsense")
    line.receive(JoinRefusedMessage)
    assert line.received.get(timeout=EVENT_TIMEOUT) == "half"
    line.receive_end()


# ---------------------------------------------------------------- below the join line


def test_garbage_on_tcp_and_udp_is_noted_and_harmless(seed: SeedService, dialer: JoinDialer) -> None:
    place = parse_address(seed.address)
    with socket.create_connection(place) as garbage, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        garbage.sendall(b"\x16\x03\x01" + bytes(range(256)) * 4)
        for _ in range(20):
            datagrams.sendto(bytes(range(256)) * 4, place)
        wait_for_event(seed, "refused")
        the_honest_one_gets_in(seed, dialer)


def test_a_certificate_of_another_cluster_is_refused_with_its_address(seed: SeedService, dialer: JoinDialer) -> None:
    foreign = Authority.create("foreign").admit(7)
    sleeper = PollSleeper()
    transport = load("tls")(sleeper, foreign, Trust(b""))
    try:
        whom = Expected(UNKNOWN_NODE, parse_ticket(seed.ticket).fingerprint)
        with pytest.raises(ConnectRefused):
            transport.connect(seed.address, whom, time.monotonic() + EVENT_TIMEOUT)
        wait_for_event(seed, "refused")
        assert any(note.address and note.address.startswith("127.0.0.1:") for note in seed.events)
        the_honest_one_gets_in(seed, dialer)
    finally:
        transport.close()
        sleeper.close()


def test_silent_connections_do_not_keep_the_honest_out(dialer: JoinDialer) -> None:
    with SeedService(HERE, 4, join_max_pending=8) as seed, ExitStack() as stack:
        place = parse_address(seed.address)
        for _ in range(40):
            stack.enter_context(socket.create_connection(place, source_address=("127.0.0.6", 0)))
        wait_for_event(seed, "refused", "wait to authenticate", 32)
        lines = [dialer.dial(seed, 100 + number) for number in range(4)]
        for line in lines:
            line.join()
        assert lines[0].receive_membership().size == 4


def test_lines_of_one_address_give_way_to_each_other_after_a_grace_period(dialer: JoinDialer) -> None:
    with SeedService(HERE, 1, join_max_pending=8) as seed:
        silent = [dialer.dial(seed, 1) for _ in range(8)]
        deadline = time.monotonic() + EVENT_TIMEOUT
        while True:  # as an honest node does
            try:
                the_honest_one_gets_in(seed, dialer)
                break
            except (ConnectRefused, CarrierLost, AssertionError):
                assert time.monotonic() < deadline
        wait_for_event(seed, "dropped", "too many", 1)
        assert len(silent) == 8


def test_who_never_authenticates_is_dropped_after_a_while(dialer: JoinDialer) -> None:
    with SeedService(HERE, 1, join_auth_timeout=0.2) as seed:
        silent = dialer.dial(seed, 7)
        silent.receive_end()
        wait_for_event(seed, "dropped", "did not authenticate within 200 ms")


def test_many_refused_lines_are_not_kept(dialer: JoinDialer) -> None:
    with SeedService(HERE, 1, join_max_pending=2) as seed:
        rude: list[Line] = [dialer.dial(seed, 7) for _ in range(2)]
        for line in rude:
            line.carrier_finished = lambda _carrier: None  # type: ignore[method-assign]
            line.say(b"nonsense")
        wait_for_event(seed, "refused", count=2)
        another = dialer.dial(seed, 8)
        another.say(b"nonsense")
        another.receive(JoinRefusedMessage)
        rude[0].receive(JoinRefusedMessage)
        rude[0].receive_end()
        the_honest_one_gets_in(seed, dialer)
