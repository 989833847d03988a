"""A membership in the making holds who was let in, and nothing of who went."""

import pytest

from nexar.cluster.decisions.formation import Formation
from nexar.cluster.decisions.refusals import Refusal
from nexar.cluster.membership import Attendant, Member
from tests.unit.cluster.decisions.door import SEED, key


def member(node: int, launcher: int = 0, address: str = "10.0.0.1:1") -> Member:
    return Member(node, "a", key(node), {"quic": (address,)}, frozenset(), launcher)


def test_it_becomes_a_membership_when_everybody_is_there() -> None:
    formation = Formation("cluster", 2, SEED)
    block = formation.reserve(Attendant(9, key(9)), 1, None)
    formation.admit(member(1), None)
    assert not formation.is_complete
    formation.admit(member(2, launcher=9), block.first_rank)
    formation.make_ready(1)
    assert not formation.is_complete
    formation.make_ready(2)
    assert formation.is_complete
    made = formation.make_membership()
    assert (made.epoch, made.members, made.attendants, made.seed) == (
        1, (member(2, launcher=9), member(1)), (Attendant(9, key(9)),), SEED,
    )  # fmt: skip


def test_who_withdraws_leaves_no_trace() -> None:
    formation = Formation("cluster", 1, None)
    formation.reserve(Attendant(9, key(9)), 1, None)
    assert formation.is_child(9, 0)
    formation.withdraw(9)
    assert not formation.is_child(9, 0)
    formation.admit(member(1), 0)
    assert (formation.rank_of(1), formation.holder(0)) == (0, 1)
    formation.withdraw(1)
    formation.admit(member(2), None)
    made = formation.make_membership()
    assert (made.members, made.attendants) == ((member(2),), ())


def test_the_id_of_the_seed_is_not_given_to_another() -> None:
    formation = Formation("cluster", 2, SEED)
    with pytest.raises(Refusal, match="is the seed"):
        formation.admit(member(SEED.node), None)
    with pytest.raises(Refusal, match="is the seed"):
        formation.reserve(SEED, 1, None)


def test_nobody_takes_more_than_its_share_of_the_membership() -> None:
    formation = Formation("cluster", 4000, None)
    formation.admit(member(1), None)
    with pytest.raises(Refusal, match="advertise fewer addresses"):
        formation.admit(member(2, address="x" * 300), None)
    assert formation.rank_of(2) is None
