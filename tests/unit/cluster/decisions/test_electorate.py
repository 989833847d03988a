"""The members vote, and the seed with them when they are even in number."""

import pytest

from nexar.cluster.decisions.electorate import Electorate, majority
from tests.unit.cluster.decisions.parliament import SEED, a_membership


@pytest.mark.parametrize(("size", "voters", "needed"), [(1, 1, 1), (2, 3, 2), (3, 3, 2), (4, 5, 3), (7, 7, 4)])
def test_there_is_always_an_odd_number_of_voters(size: int, voters: int, needed: int) -> None:
    electorate = Electorate(a_membership(size))
    assert (len(electorate), electorate.needed) == (voters, needed)
    assert list(electorate) == [*range(1, size + 1), *([SEED] if size % 2 == 0 else [])]


def test_without_a_seed_the_members_are_alone() -> None:
    electorate = Electorate(a_membership(4, seed=False))
    assert (len(electorate), electorate.needed, electorate.witness) == (4, 3, None)


def test_who_is_neither_member_nor_witness_has_no_vote() -> None:
    assert SEED in Electorate(a_membership(4))
    assert SEED not in Electorate(a_membership(3))
    assert 4 not in Electorate(a_membership(3))
    assert "1" not in Electorate(a_membership(3))


def test_two_majorities_always_meet() -> None:
    assert all(2 * majority(range(count)) > count for count in range(1, 50))
