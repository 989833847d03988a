"""A change turns one membership into the next, the same everywhere, and nothing else.

A membership answers who is where, refuses what contradicts itself, and is the same after a journey.
"""

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nexar.cluster.membership import (
    MAX_MEMBERS,
    MAX_MEMBERSHIP_BYTES,
    WORLD,
    Change,
    Departure,
    Member,
    Membership,
    MembershipError,
    PinnedNode,
    allowed_share_bytes,
    decode_member,
    decode_membership,
    encode_member,
    encode_membership,
    next_generation,
    pin_of,
    share_bytes,
)
from nexar.security.invitation import FINGERPRINT_BYTES
from nexar.wire.control import MAX_VALUE_BYTES
from nexar.wire.join import MAX_ADDRESSES, MAX_JOIN_BYTES, Committed, encode_join
from tests.unit.cluster.decisions.voters import a_member, a_membership

FOUR_MEMBERS = a_membership(4)


def gone(*nodes: int) -> tuple[Departure, ...]:
    return tuple(Departure(node, f"cause of {node}") for node in nodes)


def test_who_stays_keeps_its_order_and_who_joins_is_appended() -> None:
    after = Change(2, left=gone(1, 3), joined=(a_member(9), a_member(8))).apply(FOUR_MEMBERS)
    assert [member.node for member in after.members] == [2, 4, 9, 8]
    assert (after.epoch, after.seed, after.cluster) == (2, FOUR_MEMBERS.seed, FOUR_MEMBERS.cluster)


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
        change.apply(FOUR_MEMBERS)


def test_it_touches_communicators_that_lost_a_member_or_a_connection_or_are_renewed() -> None:
    change = Change(2, left=gone(1), severed=((2, 3),), renewed=(7,))
    assert change.concerns(5, [1, 4])
    assert change.concerns(5, [2, 3, 4])
    assert change.concerns(7, [4])
    assert not change.concerns(5, [2, 4])
    assert not change.concerns(5, frozenset({3, 4}))


def test_who_goes_quietly_touches_nobody() -> None:
    quiet = Change(2, left=(Departure(1, "it left", willing=True, quiet=True), *gone(4)))
    assert (quiet.gone, quiet.ending_departures) == ({1, 4}, {4})
    assert not quiet.concerns(5, [1, 2])
    assert quiet.concerns(5, [2, 4])
    assert [each.node for each in quiet.apply(FOUR_MEMBERS).members] == [2, 3]


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
    assert change.concerns_world is ends
    assert change.concerns(WORLD, [1, 2, 3, 4]) is ends


def test_what_follows_is_the_worlds_own_membership_at_that_epoch() -> None:
    changes = [
        Change(2, left=(Departure(2, "it left", willing=True, quiet=True),)),
        Change(3, joined=(a_member(9),)),
        Change(4, left=(Departure(9, "it left", willing=True, quiet=True),)),
    ]
    worlds = [FOUR_MEMBERS]
    for change in changes:
        worlds.append(change.apply(worlds[-1]))
    assert next_generation(WORLD, FOUR_MEMBERS, worlds[1], changes[:1]) is None
    for seen in (2, 3):
        assert next_generation(WORLD, FOUR_MEMBERS, worlds[seen], changes[:seen]) == worlds[2]


def test_a_departure_of_before_there_was_quiet_is_loud() -> None:
    old = msgspec.msgpack.encode({"epoch": 2, "left": [[1, "killed", False]]})
    assert Change.decode(old) == Change(2, left=(Departure(1, "killed"),))


def test_causes_are_reported_by_the_ranks_of_before() -> None:
    assert Change(2, left=gone(2, 4)).causes(FOUR_MEMBERS) == {1: "cause of 2", 3: "cause of 4"}
    assert Change(2, left=gone(9)).causes(FOUR_MEMBERS) == {}


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
        Change(2, joined=many).apply(FOUR_MEMBERS)
    long = {"tls": tuple(f"{'h' * 60}.{'h' * 60}.example:{port}" for port in range(1, 60))}
    large = tuple(replace(member, addresses=long) for member in many[:200])
    with pytest.raises(MembershipError, match=r"takes \d+ bytes"):
        Change(2, joined=large).apply(FOUR_MEMBERS)


def test_a_change_of_more_bytes_than_a_ballot_carries_is_refused() -> None:
    with pytest.raises(MembershipError, match="allowed are"):
        Change.decode(bytes(MAX_VALUE_BYTES + 1))


def test_a_change_in_which_more_leave_than_there_may_be_is_refused() -> None:
    most = tuple(Departure(node, "") for node in range(1, MAX_MEMBERS + 2))
    assert Change.decode(Change(2, left=most[:-1]).encode()).left == most[:-1]
    with pytest.raises(MembershipError, match="not a change"):
        Change.decode(Change(2, left=most).encode())


def key(number: int) -> bytes:
    return number.to_bytes(FINGERPRINT_BYTES, "big")


def member(node: int, host: str = "a", launcher: int = 0) -> Member:
    return Member(node, host, key(node), {"quic": (f"10.0.0.1:{node}",)}, frozenset({"quic", "tls"}), launcher)


def membership(*members: Member, attendants: tuple[PinnedNode, ...] = (), seed: PinnedNode | None = None) -> Membership:
    return Membership("cluster", 1, members, attendants, seed)


FOUR = membership(
    member(11, "b"),
    member(12, "a"),
    member(13, "b"),
    member(14, "b"),
    attendants=(PinnedNode(21, key(21)),),
    seed=PinnedNode(31, key(31)),
)


def test_the_index_of_a_member_is_its_rank() -> None:
    assert FOUR.size == 4
    assert [FOUR.rank_of(node) for node in (11, 12, 13, 14)] == [0, 1, 2, 3]
    assert FOUR.member(2).node == 13


def test_attendants_and_unauthenticated_peers_have_no_rank() -> None:
    assert FOUR.rank_of(21) is FOUR.rank_of(31) is FOUR.rank_of(99) is None


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_nobody_has_is_an_error(rank: int) -> None:
    for question in (FOUR.member, FOUR.local_rank, FOUR.local_size):
        with pytest.raises(IndexError, match=f"rank {rank} is not in 0..3"):
            question(rank)


def test_hosts_come_in_order_of_their_first_rank() -> None:
    assert FOUR.hosts == ("b", "a")
    assert FOUR.ranks_on("b") == (0, 2, 3)
    assert FOUR.ranks_on("nowhere") == ()
    assert [FOUR.local_rank(rank) for rank in range(4)] == [0, 0, 1, 2]
    assert [FOUR.local_size(rank) for rank in range(4)] == [3, 1, 3, 3]


def test_the_keys_of_members_and_attendants_are_pinned_and_nobody_elses() -> None:
    assert [pin_of(FOUR, node) for node in (11, 21, 31)] == [key(11), key(21), key(31)]
    assert pin_of(FOUR, 99) is None


def test_it_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        FOUR.epoch = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("members", "attendants", "seed", "complaint"),
    [
        ((), (), None, "0 members"),
        ((member(1), member(1)), (), None, "twice"),
        ((member(1),), (PinnedNode(1, key(1)),), None, "twice"),
        ((member(1),), (), PinnedNode(1, key(1)), "twice"),
        ((member(0),), (), None, "not the id"),
        ((member(1), Member(2, "a", b"short", {})), (), None, "fingerprint of 5 bytes"),
        ((member(1),), (PinnedNode(2, b""),), None, "fingerprint of 0 bytes"),
        ((member(1, launcher=2**64),), (), None, "not the id"),
        ((Member(1, "a", key(1), {"quic": ("x",) * (MAX_ADDRESSES + 1)}),), (), None, "65 addresses"),
        ((Member(1, "a", key(1), {}, frozenset(map(str, range(65)))),), (), None, "65 capabilities"),
    ],
)
def test_parts_that_contradict_one_another_are_refused(
    members: tuple[Member, ...], attendants: tuple[PinnedNode, ...], seed: PinnedNode | None, complaint: str
) -> None:
    with pytest.raises(MembershipError, match=complaint):
        membership(*members, attendants=attendants, seed=seed)


def test_epochs_start_at_one() -> None:
    with pytest.raises(MembershipError):
        Membership("cluster", 0, (member(1),))


fingerprints = st.binary(min_size=FINGERPRINT_BYTES, max_size=FINGERPRINT_BYTES)
nodes = st.integers(1, 2**64 - 1)
hosts = st.sampled_from(["a", "b", "gpu-0.example"])
places = st.dictionaries(st.sampled_from(["quic", "tls"]), st.lists(st.just("10.0.0.1:1"), max_size=2).map(tuple))


@st.composite
def memberships(draw: st.DrawFn) -> Membership:
    known = draw(st.lists(nodes, min_size=2, max_size=12, unique=True))
    cut = draw(st.integers(1, len(known) - 1))
    capabilities = st.frozensets(st.sampled_from(["quic", "tls", "shm", "native"]))
    members = tuple(
        Member(node, draw(hosts), draw(fingerprints), draw(places), draw(capabilities), draw(st.sampled_from([0, 5])))
        for node in known[:cut]
    )
    others = [PinnedNode(node, draw(fingerprints)) for node in known[cut:]]
    seed = others.pop() if draw(st.booleans()) else None
    return Membership("cluster", draw(st.integers(1, 2**40)), members, tuple(others), seed)


@given(memberships())
def test_decoding_undoes_encoding_and_equal_ones_have_equal_bytes(whole: Membership) -> None:
    again = decode_membership(encode_membership(whole))
    assert again == whole
    assert encode_membership(again) == encode_membership(whole)
    assert all(again.rank_of(one.node) == rank for rank, one in enumerate(whole.members))


@given(memberships())
def test_every_rank_is_at_its_place_on_its_host(whole: Membership) -> None:
    for rank in range(whole.size):
        neighbours = whole.ranks_on(whole.member(rank).host)
        assert neighbours[whole.local_rank(rank)] == rank
        assert len(neighbours) == whole.local_size(rank)
    assert sorted(rank for host in whole.hosts for rank in whole.ranks_on(host)) == list(range(whole.size))


@given(memberships(), st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=6), st.binary())
def test_any_bytes_are_a_membership_or_an_error(
    whole: Membership, changes: list[tuple[int, int]], noise: bytes
) -> None:
    data = bytearray(encode_membership(whole))
    for place, value in changes:
        data[place % len(data)] = value
    for body in (data, data[: len(data) // 2], noise):
        with suppress(MembershipError):
            assert isinstance(decode_membership(body), Membership)


def _large(size: int, address: str = "[2001:db8:1234:5678::{}]:40000") -> Membership:
    return membership(
        *(
            Member(
                2**63 + number,
                f"gpu-{number // 8:04}.cluster.example.org",
                key(number),
                {scheme: tuple(address.format(number) for _ in range(3)) for scheme in ("quic", "tls")},
                frozenset({"quic", "tls", "shm", "native"}),
                2**63 - 1 - number // 8,
            )
            for number in range(size)
        ),
        attendants=tuple(PinnedNode(2**63 - 1 - number, key(number)) for number in range(size // 8)),
    )


def test_a_thousand_members_with_three_addresses_each_fit_into_one_message() -> None:
    assert len(encode_join(Committed(encode_membership(_large(1000))))) < MAX_JOIN_BYTES
    assert share_bytes(_large(1).member(0)) < allowed_share_bytes(1000)


def test_the_largest_cluster_has_room_for_an_address_of_each_transport() -> None:
    largest = Member(
        2**64 - 1, "gpu-0000.cluster.example.org", key(1), {"quic": ("[fd00::1]:40000",), "tls": ("[fd00::1]:40000",)},
        frozenset({"quic", "tls", "shm"}), 2**64 - 1,
    )  # fmt: skip
    assert share_bytes(largest) < allowed_share_bytes(MAX_MEMBERS)


def test_more_than_a_message_carries_is_refused_with_the_remedy() -> None:
    with pytest.raises(MembershipError, match="fewer addresses"):
        encode_membership(_large(1000, "x" * 400))
    with pytest.raises(MembershipError, match="allowed are"):
        decode_membership(bytes(MAX_MEMBERSHIP_BYTES + 1))


@pytest.mark.parametrize("size", [1, 10, 300])
def test_members_within_their_share_fit_together_with_as_many_attendants(size: int) -> None:
    room = allowed_share_bytes(size) - share_bytes(Member(2**64 - 1, "a", key(1), {"quic": ("",)}))
    members = (Member(2**64 - 1 - n, "a", key(1), {"quic": ("x" * (room - 4),)}) for n in range(size))
    attendants = tuple(PinnedNode(2**63 - 1 - number, key(1)) for number in range(size))
    whole = membership(*members, attendants=attendants, seed=PinnedNode(7, key(7)))
    assert share_bytes(whole.member(0)) <= allowed_share_bytes(size)
    assert MAX_MEMBERSHIP_BYTES * 0.9 - 64 * size < len(encode_membership(whole)) <= MAX_MEMBERSHIP_BYTES


def test_a_single_member_is_the_same_after_a_journey() -> None:
    assert decode_member(encode_member(FOUR.member(0))) == FOUR.member(0)


@pytest.mark.parametrize(
    "data", [b"", encode_member(member(1))[:-1], encode_member(Member(1, "a", b"short", {})), encode_membership(FOUR)]
)
def test_what_is_no_member_is_an_error(data: bytes) -> None:
    with pytest.raises(MembershipError):
        decode_member(data)
