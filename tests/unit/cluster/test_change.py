"""A change turns one membership into the next, the same everywhere, and nothing else."""

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nexar.cluster.change import WORLD, Change, Departure, following
from nexar.cluster.membership import MAX_MEMBERS, MembershipError
from nexar.wire.messages import MAX_VALUE_BYTES
from tests.unit.cluster.decisions.parliament import a_member, a_membership

FOUR = a_membership(4)


def gone(*nodes: int) -> tuple[Departure, ...]:
    return tuple(Departure(node, f"cause of {node}") for node in nodes)


def test_who_stays_keeps_its_order_and_who_joins_is_appended() -> None:
    after = Change(2, left=gone(1, 3), joined=(a_member(9), a_member(8))).apply(FOUR)
    assert [member.node for member in after.members] == [2, 4, 9, 8]
    assert (after.epoch, after.seed, after.cluster) == (2, FOUR.seed, FOUR.cluster)


@pytest.mark.parametrize(
    "change",
    [
        Change(3),
        Change(2, left=gone(9)),
        Change(2, left=gone(1, 2, 3, 4)),
        Change(2, joined=(a_member(1),)),
        Change(2, joined=(a_member(9), a_member(9))),
    ],
    ids=["another epoch", "no member", "nobody left", "a member already", "twice"],
)
def test_what_is_no_change_of_this_membership_is_refused(change: Change) -> None:
    with pytest.raises(MembershipError):
        change.apply(FOUR)


def test_it_touches_communicators_that_lost_a_member_or_a_connection_or_are_renewed() -> None:
    change = Change(2, left=gone(1), severed=((2, 3),), renewed=(7,))
    assert change.touches(5, [1, 4])
    assert change.touches(5, [2, 3, 4])
    assert change.touches(7, [4])
    assert not change.touches(5, [2, 4])
    assert not change.touches(5, frozenset({3, 4}))


def test_who_goes_quietly_touches_nobody() -> None:
    quiet = Change(2, left=(Departure(1, "it left", willing=True, quiet=True), *gone(4)))
    assert (quiet.gone, quiet.loud) == ({1, 4}, {4})
    assert not quiet.touches(5, [1, 2])
    assert quiet.touches(5, [2, 4])
    assert [each.node for each in quiet.apply(FOUR).members] == [2, 3]


@pytest.mark.parametrize(
    ("change", "ends"),
    [
        (Change(2, left=(Departure(1, "it left", willing=True, quiet=True),)), False),
        (Change(2, renewed=(5,)), False),
        (Change(2, renewed=(WORLD,)), True),
        (Change(2, left=gone(1)), True),
        (Change(2, joined=(a_member(9),)), True),
        (Change(2, severed=((1, 2),)), True),
    ],
)
def test_the_worlds_communicator_ends_by_all_but_who_goes_quietly_and_what_is_renewed_elsewhere(
    change: Change, *, ends: bool
) -> None:
    assert change.ends_world is ends
    assert change.touches(WORLD, [1, 2, 3, 4]) is ends


def test_what_follows_is_the_worlds_own_membership_at_that_epoch() -> None:
    changes = [
        Change(2, left=(Departure(2, "it left", willing=True, quiet=True),)),
        Change(3, joined=(a_member(9),)),
        Change(4, left=(Departure(9, "it left", willing=True, quiet=True),)),
    ]
    worlds = [FOUR]
    for change in changes:
        worlds.append(change.apply(worlds[-1]))
    assert following(WORLD, FOUR, worlds[1], changes[:1]) is None
    for seen in (2, 3):
        assert following(WORLD, FOUR, worlds[seen], changes[:seen]) == worlds[2]


def test_a_departure_of_before_there_was_quiet_is_loud() -> None:
    old = msgspec.msgpack.encode({"epoch": 2, "left": [[1, "killed", False]]})
    assert Change.decode(old) == Change(2, left=(Departure(1, "killed"),))


def test_causes_are_told_by_the_ranks_of_before() -> None:
    assert Change(2, left=gone(2, 4)).causes(FOUR) == {1: "cause of 2", 3: "cause of 4"}
    assert Change(2, left=gone(9)).causes(FOUR) == {}


changes = st.builds(
    Change,
    st.integers(2, 2**40),
    st.lists(st.builds(Departure, st.integers(1, 2**64 - 1), st.text(max_size=50), st.booleans(), st.booleans())).map(
        tuple
    ),
    st.lists(st.integers(1, 200).map(a_member), max_size=3).map(tuple),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=3).map(tuple),
    st.lists(st.integers(0, 2**32 - 1), max_size=3).map(tuple),
)


@given(changes)
def test_it_is_the_same_after_a_journey_and_its_bytes_are(change: Change) -> None:
    assert Change.decode(change.encode()) == change
    assert Change.decode(change.encode()).encode() == change.encode()


@given(st.binary(max_size=60))
def test_other_bytes_are_a_change_or_an_error_and_nothing_else(data: bytes) -> None:
    with suppress(MembershipError):
        assert Change.decode(data).epoch >= 2


def test_a_story_that_is_too_long_is_refused() -> None:
    with pytest.raises(MembershipError, match="not a change"):
        Change.decode(Change(2, left=(Departure(1, "x" * 5000),)).encode())


def test_a_change_beyond_what_a_membership_may_hold_is_refused() -> None:
    many = tuple(a_member(1000 + number) for number in range(MAX_MEMBERS))
    with pytest.raises(MembershipError, match="allowed are 4096"):
        Change(2, joined=many).apply(FOUR)
    long = {"tls": tuple(f"{'h' * 60}.{'h' * 60}.example:{port}" for port in range(1, 60))}
    large = tuple(replace(member, addresses=long) for member in many[:200])
    with pytest.raises(MembershipError, match=r"takes \d+ bytes"):
        Change(2, joined=large).apply(FOUR)


def test_a_change_of_more_bytes_than_a_ballot_carries_is_refused() -> None:
    with pytest.raises(MembershipError, match="allowed are"):
        Change.decode(bytes(MAX_VALUE_BYTES + 1))


def test_a_change_in_which_more_leave_than_there_may_be_is_refused() -> None:
    most = tuple(Departure(node, "") for node in range(1, MAX_MEMBERS + 2))
    assert Change.decode(Change(2, left=most[:-1]).encode()).left == most[:-1]
    with pytest.raises(MembershipError, match="not a change"):
        Change.decode(Change(2, left=most).encode())
