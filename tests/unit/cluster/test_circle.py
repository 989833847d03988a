"""Whom a node may have links with, from one membership to the next."""

import pytest

from nexar.cluster.change import Change, Departure
from nexar.cluster.circle import _MOST_FORMER, GUEST, Circle, Former
from nexar.cluster.membership import Member, Membership
from nexar.wire.messages import Introduce, Introduced


def member(node: int, host: str = "here") -> Member:
    return Member(node, host, bytes(32), {"tls": (f"10.0.0.{node}:1",)})


def members(*nodes: int, epoch: int = 1) -> Membership:
    return Membership("ours", epoch, tuple(member(node) for node in nodes))


def without(before: Membership, node: int, cause: str) -> tuple[Membership, Change]:
    change = Change(before.epoch + 1, left=(Departure(node, cause),))
    return change.apply(before), change


THREE = Circle(7, members(5, 7, 9))


def test_members_have_the_rank_that_the_membership_gives_them() -> None:
    assert THREE.rank == 1
    assert [THREE.rank_of(node) for node in (5, 7, 9, 11)] == [0, 1, 2, GUEST]
    assert THREE.introduction() == Introduce(rank=1, epoch=1)


def test_who_waits_to_be_let_in_knows_everybody_and_holds_no_rank() -> None:
    waiting = Circle(11, members(5, 7, 9))
    assert waiting.rank == GUEST
    assert waiting.find(5) == member(5)
    assert waiting.find(11) is None
    assert waiting.introduction() == Introduce(rank=GUEST, epoch=1)


def test_guests_are_found_like_members_until_others_are_expected() -> None:
    expecting = THREE.with_guests([member(11), member(9)])
    assert expecting.find(11) == member(11)
    assert (expecting.rank_of(11), expecting.rank_of(9)) == (GUEST, 2)
    assert list(expecting.guests) == [11]  # who is a member is no guest
    assert expecting.with_guests([member(12)]).find(11) is None


def test_a_guest_who_becomes_a_member_is_a_guest_no_more() -> None:
    expecting = THREE.with_guests([member(11), member(12)])
    moved = expecting.moved_to(members(5, 7, 9, 11, epoch=2))
    assert (moved.rank_of(11), list(moved.guests)) == (3, [12])


def test_who_left_is_remembered_with_the_epoch_and_the_reason() -> None:
    moved = THREE.moved_to(*without(THREE.membership, 5, "it was silent"))
    assert moved.find(5) is None
    assert moved.former == {5: Former(2, "it was silent")}
    assert moved.rank == 0
    later = moved.moved_to(*without(moved.membership, 9, "it left"))
    assert later.former == {5: Former(2, "it was silent"), 9: Former(3, "it left")}


def test_of_very_many_who_left_the_first_are_forgotten() -> None:
    left = tuple(Departure(node, "gone") for node in range(100, 100 + _MOST_FORMER + 1))
    moved = THREE.moved_to(members(5, 7, 9, epoch=2), Change(2, left=left))
    assert len(moved.former) == _MOST_FORMER
    assert 100 not in moved.former
    assert 100 + _MOST_FORMER in moved.former


@pytest.mark.parametrize("kind", [Introduce, Introduced])
def test_at_the_same_epoch_the_ranks_must_be_the_same(kind: type[Introduce] | type[Introduced]) -> None:
    assert THREE.fault_of(9, kind(rank=2, epoch=1)) is None
    assert THREE.fault_of(9, kind(rank=1, epoch=1)) == ("it claims rank 1 at epoch 1, the membership gives it rank 2")


def test_at_another_epoch_there_is_nothing_to_compare() -> None:
    for epoch in (0, 2, 9):
        assert THREE.fault_of(9, Introduce(rank=1, epoch=epoch)) is None


def test_who_has_no_place_is_at_fault_whatever_it_claims() -> None:
    for epoch in (1, 2):
        assert THREE.fault_of(11, Introduce(rank=1, epoch=epoch)) == "it has no place in the membership of epoch 1"
    assert THREE.with_guests([member(11)]).fault_of(11, Introduce(rank=GUEST, epoch=1)) is None


def test_hosts_are_shared_by_members_and_guests_of_one_host() -> None:
    expecting = THREE.with_guests([member(11), member(12, "there")])
    assert [expecting.shares_host(node) for node in (5, 11, 12, 13)] == [True, True, False, False]
