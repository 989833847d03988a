"""`next_generation`: the members of a successor, computed from the decided changes alone."""

from collections.abc import Sequence

import pytest

from nexar.cluster.membership import WORLD, Change, Departure, Membership, next_generation
from tests.unit.cluster.decisions.successor_scene import member


def membership(nodes: Sequence[int], epoch: int) -> Membership:
    return Membership("test", epoch, tuple(map(member, nodes)))


def comm_of(nodes: Sequence[int], *, epoch: int = 1, communicator: int = WORLD) -> tuple[int, Membership]:
    return communicator, membership(nodes, epoch)


def following(comm: tuple[int, Membership], world: Membership, changes: Sequence[Change]) -> Membership | None:
    return next_generation(*comm, world, changes)


def gone(*nodes: int) -> tuple[Departure, ...]:
    return tuple(Departure(node, f"cause of {node}") for node in nodes)


def silent(*nodes: int) -> tuple[Departure, ...]:
    return tuple(Departure(node, "it left", willing=True, quiet=True) for node in nodes)


PART = 7  # the id of a communicator that was split off


def nodes(of: object) -> list[int] | None:
    return None if of is None else [member.node for member in of.members]  # type: ignore[attr-defined]


def test_the_world_goes_on_as_the_membership_of_the_last_change_that_is_not_quiet() -> None:
    world = comm_of([1, 2, 3])
    assert following(world, membership([1, 2, 3], 1), []) is None
    changes = [Change(2, left=gone(2)), Change(3, joined=membership([4], 1).members), Change(4, renewed=(PART,))]
    assert following(world, membership([1, 3, 4], 3), changes[:2]) == membership([1, 3, 4], 3)
    assert following(world, membership([1, 3, 4], 4), changes) == membership([1, 3, 4], 3)


@pytest.mark.parametrize("communicator", [WORLD, PART])
def test_who_went_quietly_is_missed_only_when_something_else_gives_it_a_successor(communicator: int) -> None:
    """And so for all members, at whichever moment they look."""
    comm = comm_of([1, 2, 3, 4], communicator=communicator)
    quiet = [Change(2, left=silent(4)), Change(3, left=silent(9))]
    assert following(comm, membership([1, 2, 3], 3), quiet) is None
    changes = [*quiet, Change(4, renewed=(communicator,)), Change(5, left=silent(3)), Change(6, left=gone(9))]
    for seen, world in ((3, [1, 2, 3]), (4, [1, 2])):
        found = following(comm, membership(world, seen + 1), changes[:seen])
        assert (nodes(found), found and found.epoch) == ([1, 2, 3], 4)


def test_who_went_quietly_so_long_ago_that_it_is_forgotten_is_still_gone() -> None:
    part = comm_of([1, 2, 3, 4], communicator=PART)
    found = following(part, membership([1, 3], 9), [Change(8, left=silent(2)), Change(9, renewed=(PART,))])
    assert nodes(found) == [1, 3]


def test_a_part_that_lost_nobody_goes_on_as_it_is() -> None:
    part = comm_of([1, 3], communicator=PART)
    assert following(part, membership([1, 3, 4], 2), [Change(2, left=gone(2))]) is None


def test_a_part_that_lost_a_member_goes_on_without_it_in_the_old_order() -> None:
    part = comm_of([3, 1, 2], communicator=PART)
    found = following(part, membership([2, 3], 2), [Change(2, left=gone(1))])
    assert (nodes(found), found and found.epoch) == ([3, 2], 2)


def test_of_several_changes_the_epoch_is_that_of_the_last_one_that_concerns_it() -> None:
    """So members that look at different moments come to the same answer."""
    part = comm_of([1, 2, 3], communicator=PART)
    changes = [
        Change(2, left=gone(4)),  # somebody else
        Change(3, left=gone(2)),
        Change(4, severed=((1, 5),)),  # a line of ours to somebody else
        Change(5, left=gone(6)),
    ]
    for seen in (changes[:2], changes[:3], changes):
        found = following(part, membership([1, 3], 9), seen)
        assert (nodes(found), found and found.epoch) == ([1, 3], 3)


def test_several_losses_add_up_and_a_cut_between_who_is_gone_and_who_stays_is_no_further_step() -> None:
    part = comm_of([1, 2, 3, 4], communicator=PART)
    changes = [Change(2, left=gone(2)), Change(3, severed=((2, 3),)), Change(4, left=gone(4))]
    found = following(part, membership([1, 3], 4), changes)
    assert (nodes(found), found and found.epoch) == ([1, 3], 4)
    found = following(part, membership([1, 3, 4], 3), changes[:2])
    assert (nodes(found), found and found.epoch) == ([1, 3, 4], 2)


def test_a_cut_between_two_of_its_members_gives_it_a_successor_of_the_same_members() -> None:
    part = comm_of([1, 2, 3], communicator=PART)
    found = following(part, membership([1, 2, 3, 4], 2), [Change(2, severed=((2, 3),))])
    assert (nodes(found), found and found.epoch) == ([1, 2, 3], 2)


def test_one_that_is_renewed_gets_a_successor_of_the_same_members() -> None:
    part = comm_of([1, 2], communicator=PART)
    assert nodes(following(part, membership([1, 2], 2), [Change(2, renewed=(PART,))])) == [1, 2]
    assert following(part, membership([1, 2], 2), [Change(2, renewed=(8,))]) is None


def test_what_was_chosen_before_it_was_made_does_not_concern_it() -> None:
    part = comm_of([1, 2], epoch=4, communicator=PART)
    changes = [Change(3, left=gone(9)), Change(4, severed=((1, 2),))]
    assert following(part, membership([1, 2], 4), changes) is None
