"""The lowest that lives goes first, the others follow; nobody is kept waiting by the dead."""

import pytest

from nexar.cluster.decisions.succession_events import Wanted
from nexar.cluster.decisions.suspicions import Suspicions
from nexar.cluster.decisions.turns import STAGGER, WILLING_DELAY, Turns, stagger
from nexar.cluster.decisions.wishes import Wishes
from tests.unit.cluster.decisions.parliament import a_membership

FIVE = a_membership(5)


class Seat:
    def __init__(self, rank: int) -> None:
        self.suspicions = Suspicions(rank + 1, FIVE)
        self.wishes = Wishes(rank + 1, FIVE)
        self.turns = Turns(rank, FIVE, self.suspicions, self.wishes)

    def mine(self, *, acting: bool = True) -> float | None:
        return self.turns.mine(acting=acting)


def test_without_a_reason_it_is_nobodys_turn() -> None:
    seat = Seat(0)
    assert seat.mine() is None
    assert not seat.turns.is_pressing(acting=True)


@pytest.mark.parametrize(("rank", "position"), [(0, 0), (1, 1), (3, 3)])
def test_each_waits_for_those_before_it(rank: int, position: int) -> None:
    seat = Seat(rank)
    seat.suspicions.add(5, "silence", 1.0)
    assert seat.mine() == pytest.approx(1.0 + STAGGER * position)
    assert seat.mine(acting=False) is None
    assert seat.turns.is_pressing(acting=True)
    assert not seat.turns.is_pressing(acting=False)


def test_nobody_waits_for_the_dead() -> None:
    seat = Seat(2)
    for node in (1, 2):
        seat.suspicions.add(node, "silence", 1.0)
    assert seat.mine() == 1.0


def test_who_left_willingly_presses_nobody() -> None:
    seat = Seat(0)
    seat.suspicions.add(5, "bye", 1.0, willing=True)
    assert seat.mine() == 1.0 + WILLING_DELAY
    assert seat.mine(acting=False) == 1.0 + WILLING_DELAY, "it disturbs nobody, whatever the policy is"
    assert not seat.turns.is_pressing(acting=True)


def test_where_the_votes_of_those_who_left_are_missing_nobody_proposes_to_go_on_without_them() -> None:
    seat = Seat(0)
    for node in (3, 4, 5):
        seat.suspicions.add(node, "bye", 1.0, willing=True)
    assert seat.mine() is None
    seat.suspicions.drop(3)
    assert seat.mine() == 1.0 + WILLING_DELAY


def test_what_all_agreed_on_does_not_depend_on_the_policy() -> None:
    seat = Seat(0)
    seat.wishes.want(Wanted(renewed=(7,)), 1.0)
    assert seat.mine(acting=False) == 1.0
    assert seat.turns.is_pressing(acting=False)


@pytest.mark.parametrize(("rank", "other", "wait"), [(3, 5, 0.0), (4, 4, STAGGER)])
def test_of_a_pair_the_lower_goes_first_whatever_its_rank(rank: int, other: int, wait: float) -> None:
    seat = Seat(rank)
    seat.wishes.sever(other, 1.0)
    assert seat.mine() == pytest.approx(1.0 + wait)


def test_who_resigns_waits_for_nobody() -> None:
    seat = Seat(4)
    seat.wishes.resign("done")
    seat.turns.heard(1, 1.0)
    assert seat.mine(acting=False) == float("-inf")
    assert seat.turns.is_pressing(acting=False)


def test_a_lower_rank_that_proposes_is_let_unless_it_dies() -> None:
    seat = Seat(1)
    seat.suspicions.add(5, "silence", 1.0)
    seat.turns.heard(3, 1.05)
    assert seat.mine() == pytest.approx(1.1), "a higher rank is not waited for"
    seat.turns.heard(1, 1.05)
    turn = seat.mine()
    assert turn is not None
    assert turn > 2.0
    seat.suspicions.add(1, "its process ended", 1.1)
    assert seat.mine() == 1.0


def test_in_a_crowd_they_follow_faster() -> None:
    assert stagger(10) == pytest.approx(1.0)
    assert stagger(4000) < 60.0
