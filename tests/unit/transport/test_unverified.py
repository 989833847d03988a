"""Who keeps its place among connections that have not authenticated, and who gives way."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.security.certificates import Credentials
from nexar.transport.base import Expected
from nexar.transport.unverified import (
    GRACE,
    UNVERIFIED_BYTES,
    ConnectionSource,
    PendingConnections,
    Placement,
    certificate_advice,
    decode_unverified,
    source_of,
)
from nexar.types import UNKNOWN_NODE
from nexar.wire.frame import Frame, FrameError, FrameKind, Lane, encode, encode_finish

OURS = Credentials(0xA, "blue", b"chain", b"secret")


def test_a_member_learns_whom_it_expected_what_it_showed_and_what_to_check():
    said = certificate_advice(Expected(0xB), OURS)
    assert "expected node 000000000000000b of cluster 'blue'" in said
    assert "showed node 000000000000000a of cluster 'blue'" in said
    assert "check what runs at that address" in said


def test_the_message_for_who_joins_mentions_tickets():
    assert "the key in the ticket, showed no certificate" in certificate_advice(
        Expected(UNKNOWN_NODE, b"pin", True), OURS
    )
    assert "expected a seed" in certificate_advice(Expected(UNKNOWN_NODE), None)
    assert "use the ticket" in certificate_advice(Expected(UNKNOWN_NODE), None)


def test_no_secret_is_shown():
    assert "secret" not in certificate_advice(Expected(0xB, b"pin"), OURS)


HONEST = source_of("10.0.0.1:1")
ATTACKER = source_of("10.6.6.6:1")


def first(connections: Sequence[int]) -> int:
    return connections[0]


def last(connections: Sequence[int]) -> int:
    return connections[-1]


def filled(*sources: ConnectionSource, timeout: float = 10.0) -> PendingConnections:
    """Full: one connection of each source, numbered from 0, all of them fresh at time 0."""
    pending = PendingConnections(len(sources), timeout, first)
    for number, source in enumerate(sources):
        assert pending.enter(number, source, 0.0) == Placement(True)
    return pending


def test_a_single_source_may_take_every_place() -> None:
    pending = filled(*[HONEST] * 128)
    assert len(pending) == 128


def test_a_newcomer_displaces_the_source_with_the_most_connections() -> None:
    pending = filled(HONEST, HONEST, ATTACKER, ATTACKER, ATTACKER)
    assert pending.enter(9, source_of("10.0.0.2:1"), 0.0) == Placement(True, 2)
    assert 2 not in pending
    assert {0, 1, 3, 4, 9} == {number for number in range(10) if number in pending}


def test_a_source_never_displaces_a_smaller_one() -> None:
    pending = filled(HONEST, HONEST, ATTACKER, ATTACKER, ATTACKER)
    assert pending.enter(9, ATTACKER, 0.0) == Placement(False)
    assert pending.enter(9, ATTACKER, GRACE) == Placement(True, 2)
    for number in range(10, 100):
        pending.enter(number, ATTACKER, GRACE * number)
    assert 0 in pending
    assert 1 in pending


def test_equal_sources_displace_each_other_only_after_the_grace_period() -> None:
    pending = filled(*[source_of(f"10.0.1.{number}:1") for number in range(4)])
    assert pending.enter(9, HONEST, 0.9 * GRACE) == Placement(False)
    assert pending.enter(9, HONEST, GRACE) == Placement(True, 0)


def test_one_connection_more_does_not_make_a_source_larger_than_one_dial_needs() -> None:
    """A dial over TLS is two connections: the second may take the place of a source that has one."""
    pending = filled(HONEST, *[source_of(f"10.6.6.{number}:1") for number in range(3)])
    assert pending.enter(9, HONEST, 0.5 * GRACE) == Placement(False)
    assert pending.enter(9, HONEST, GRACE).admitted


def test_those_past_their_grace_period_give_way_first() -> None:
    pending = PendingConnections(4, 10.0, last)
    for number, now in ((0, 0.0), (1, GRACE), (2, GRACE), (3, GRACE)):
        pending.enter(number, ATTACKER, now)
    assert pending.enter(4, HONEST, GRACE) == Placement(True, 0)
    assert pending.enter(5, HONEST, GRACE) == Placement(True, 3)


def test_the_choice_is_left_to_the_source_of_randomness() -> None:
    seen = set()
    for seed in range(200):
        pending = PendingConnections(8, 10.0, Random(seed).choice)
        for number in range(8):
            pending.enter(number, ATTACKER, 0.0)
        seen.add(pending.enter(8, HONEST, 0.0).displaced)
    assert seen == set(range(8))


@pytest.mark.parametrize("sources", [1, 64])
def test_a_node_of_its_own_address_keeps_its_places_beside_400_connections_a_second(sources: int) -> None:
    """The node's handshake takes half a second, and begins when the attack has filled every place."""
    pending = PendingConnections(256, 10.0, Random(7).choice)
    attackers = [source_of(f"10.6.{number}.6:1") for number in range(sources)]
    for number in range(4000):
        now = number / 400
        pending.enter(number, attackers[number % sources], now)
        if number == 2000:
            assert pending.enter(-1, HONEST, now).admitted
            assert pending.enter(-2, HONEST, now).admitted
        if 2000 <= number < 2200:
            assert -1 in pending
            assert -2 in pending
        for gone in pending.expired(now):
            assert gone >= 0
    assert len(pending) == 256


def test_a_host_with_64_ranks_needs_nobody_to_give_way() -> None:
    pending = PendingConnections(256, 10.0, first)
    assert all(pending.enter(number, HONEST, 0.0) == Placement(True) for number in range(2 * 64))


def test_deadlines_pass_in_their_order_whatever_the_order_of_arrival() -> None:
    pending = PendingConnections(4, 10.0, first)
    pending.enter(1, HONEST, 0.0)
    pending.enter(2, HONEST, 1.0)
    pending.shorten(2, 4.0)
    assert pending.next_deadline == 4.0
    pending.shorten(2, 9.0)
    assert pending.next_deadline == 4.0
    assert pending.expired(3.9) == []
    assert pending.expired(4.0) == [2]
    pending.set_deadline(1, 20.0)
    assert pending.expired(10.0) == []
    assert pending.expired(20.0) == [1]
    assert pending.next_deadline is None
    pending.set_deadline(1, 5.0)
    pending.shorten(1, 5.0)
    assert pending.expired(100.0) == []


def test_a_place_is_given_up_when_the_system_is_short_of_something() -> None:
    pending = filled(HONEST, ATTACKER, ATTACKER, ATTACKER)
    assert pending.displace_one(0.0) == 1
    assert len(pending) == 3
    empty = PendingConnections(4, 10.0, first)
    assert empty.displace_one(0.0) is None


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1:1", "10.0.0.1:2", True),
        ("10.0.0.1:1", "10.0.0.2:1", False),
        ("[2001:db8::1]:1", "[2001:db8::ffff]:2", True),
        ("[2001:db8::1]:1", "[2001:db8:0:1::1]:1", False),
        ("[::ffff:10.0.0.1]:1", "10.0.0.1:2", True),
        ("[fe80::1%eth0]:1", "[fe80::2%eth0]:1", True),
        ("memory", "memory", True),
    ],
)
def test_an_ipv6_network_is_one_party(one: str, other: str, same: bool) -> None:
    assert (source_of(one).network == source_of(other).network) == same


def test_within_an_ipv6_network_the_address_with_the_most_gives_way() -> None:
    sources = [source_of(f"[2001:db8::{host}]:1") for host in (1, 6, 6, 6)]
    pending = filled(*sources)
    assert pending.enter(9, source_of("[2001:db8::2]:1"), 0.0) == Placement(True, 1)


steps = st.lists(
    st.tuples(st.sampled_from(["enter", "shorten", "extend", "leave", "tick", "give up"]), st.integers(0, 5)),
    max_size=80,
)


@given(steps)
def test_it_never_holds_more_than_it_may_and_each_leaves_once(steps: list[tuple[str, int]]) -> None:
    pending, inside, ended, now = PendingConnections(3, 4.0, first), set[int](), list[int](), 0.0
    for number, (step, target) in enumerate(steps):
        now += 0.5
        chosen = sorted(inside)[target % len(inside)] if inside else -1
        if step == "enter":
            placement = pending.enter(100 + number, source_of(f"10.0.0.{target}:1"), now)
            inside |= {100 + number} if placement.admitted else set()
            ended += [] if placement.displaced is None else [placement.displaced]
        elif step == "tick":
            ended += pending.expired(now)
        elif step == "give up":
            gone = pending.displace_one(now)
            ended += [] if gone is None else [gone]
        elif step == "leave" and inside:
            ended.append(chosen)
            pending.leave(chosen)
        elif step == "shorten":
            pending.shorten(chosen, now + target)
        else:
            pending.set_deadline(chosen, now + target)
        inside -= set(ended)
        assert len(pending) == len(inside) <= 3
        assert all(connection in pending for connection in inside)
        assert (pending.next_deadline is None) == (not inside)
    assert len(ended) == len(set(ended))


SMALL = Frame(kind=FrameKind.CONTROL, lane=Lane.CONTROL, body=UNVERIFIED_BYTES)
ALLOWED = (FrameKind.CONTROL, FrameKind.FINISH)


def test_a_small_control_message_passes():
    assert decode_unverified(encode(SMALL)) == SMALL
    assert decode_unverified(b"..." + encode(SMALL), 3) == SMALL


def test_the_end_passes():
    assert decode_unverified(encode_finish(7)).count == 7


@pytest.mark.parametrize(
    ("field", "frame"),
    [
        ("body", Frame(kind=FrameKind.CONTROL, body=UNVERIFIED_BYTES + 1)),
        ("lane", Frame(kind=FrameKind.CONTROL, lane=Lane.DATA)),
        *(("kind", Frame(kind=kind)) for kind in FrameKind if kind not in ALLOWED),
    ],
)
def test_anything_else_is_refused_with_the_field_that_is_wrong(field, frame):
    with pytest.raises(FrameError, match="is not authenticated") as refused:
        decode_unverified(encode(frame))
    assert refused.value.field == field


def test_what_is_no_frame_at_all_is_refused_as_ever():
    with pytest.raises(FrameError) as refused:
        decode_unverified(encode(Frame(version=9, kind=FrameKind.CONTROL)))
    assert refused.value.field == "version"
