"""Joiners that come before an elastic cluster has formed: they wait, and come in when there is room or a checkpoint."""

import pytest

from nexar.cluster.decisions.admission_events import Admit, Applied, ChildDied, Commit, Fail, Gone, Ready, Refuse, Tick
from nexar.cluster.decisions.door_rules import DoorRules
from nexar.cluster.decisions.early_joiners import EarlyJoiners
from nexar.cluster.decisions.formation import Formation
from nexar.cluster.decisions.guest import Guest
from nexar.cluster.decisions.refusals import NoRoom, Refusal
from nexar.cluster.membership import Attendant, Member, decode_member
from nexar.wire.joining import Current, Reserve, Waiting
from tests.unit.cluster.decisions.door import (
    PROOF,
    SEED,
    Door,
    a_door,
    application,
    ends,
    every,
    hello,
    key,
    only,
    told,
)


def guest(node: int) -> Guest:
    return Guest(node, f"10.0.0.9:{node}", hello(node))


def member(node: int) -> Member:
    return Member(node, "a", key(node), {"quic": ("10.0.0.1:1",)})


# ---------------------------------------------------------------- alone


def test_who_finds_no_place_waits_up_to_the_maximum() -> None:
    early, formation = EarlyJoiners(1, DoorRules(elastic=True, most=2)), Formation("cluster", 1, SEED)
    assert early.admit(formation, guest(1), member(1), None)
    waiting = guest(2)
    assert not early.admit(formation, waiting, member(2), None)
    with pytest.raises(Refusal, match="formed of 1, 1 wait to come in, and no more than 2 are allowed"):
        early.admit(formation, guest(3), member(3), None)
    assert early.find(2) is waiting
    assert early.make_ready(waiting)
    assert not early.make_ready(guest(2))  # another connection
    assert early.promote(formation) is None  # there is no place
    taken = early.take()
    assert taken is not None
    assert (taken.guest, taken.member, taken.ready) == (waiting, member(2), True)
    assert early.take() is None


def test_where_the_cluster_is_not_elastic_nobody_waits() -> None:
    early, formation = EarlyJoiners(1, DoorRules()), Formation("cluster", 1, SEED)
    early.admit(formation, guest(1), member(1), None)
    with pytest.raises(NoRoom, match="all 1 places are taken"):
        early.admit(formation, guest(2), member(2), None)
    with pytest.raises(NoRoom):
        early.reserve(formation, Attendant(51, key(51)), Reserve(PROOF, b"request", "a", 1, None))


def test_a_wish_that_cannot_be_granted_is_refused_and_does_not_wait() -> None:
    early, formation = EarlyJoiners(2, DoorRules(elastic=True)), Formation("cluster", 2, SEED)
    early.admit(formation, guest(1), member(1), 0)
    with pytest.raises(Refusal, match="rank 0 is held"):
        early.admit(formation, guest(2), member(2), 0)
    assert early.find(2) is None


def test_who_goes_waits_no_longer_and_a_stranger_changes_nothing() -> None:
    early, formation = EarlyJoiners(1, DoorRules(elastic=True)), Formation("cluster", 1, SEED)
    for node in (1, 2, 3):
        early.admit(formation, guest(node), member(node), None)
    early.withdraw(guest(3))  # another connection of it
    assert early.find(3) is not None
    found = early.find(3)
    assert found is not None
    early.withdraw(found)
    early.withdraw(Guest(9, "10.0.0.9:9"))
    assert early.clear() == (2,)
    assert early.take() is None


# ---------------------------------------------------------------- at the door


def waiting_of(door: Door) -> list[int]:
    """Whom the members were told of last."""
    message, _ = told(door.actions, Waiting)[-1]
    return [decode_member(each).node for each in message.members]


def test_they_wait_at_the_door_and_the_members_hear_of_them_when_the_cluster_has_formed() -> None:
    door = a_door(2, elastic=True, most=4)
    door.reserve(51, 2)
    for node in (3, 4):
        assert only(door.join(node), Admit).node == node
    assert "no more than 4" in only(door.join(5), Refuse).reason
    door.join(1, rank=0, launcher=51)
    actions = door.join(2, rank=1, launcher=51)
    assert set(only(actions, Commit).connections) == {1, 2, 51}  # not those who wait
    assert [to for _, to in told(actions, Current)] == [(3,), (4,)]
    assert waiting_of(door) == [3, 4]
    assert door.order() == [1, 2]


def test_who_was_not_ready_is_waited_for_after_the_formation_too() -> None:
    door = a_door(1, elastic=True)
    door.reserve(51, 1)
    door.greet(3)
    door.tell(Applied(3, application(), True, key(3)))
    assert told(door.join(1, rank=0, launcher=51), Current) == []
    assert [to for _, to in told(door.tell(Ready(3)), Current)] == [(3,)]
    assert waiting_of(door) == [3]


def test_a_place_that_becomes_free_is_for_the_first_who_waits() -> None:
    door = a_door(2, elastic=True)
    door.reserve(51, 1)
    door.join(1)
    door.join(2)
    assert door.machine.membership is None
    commit = only(door.tell(Gone(51, "killed")), Commit)
    assert sorted(each.node for each in commit.membership.members) == [1, 2]


def test_when_a_whole_block_becomes_free_as_many_of_those_who_wait_get_a_place() -> None:
    door = a_door(3, elastic=True)
    door.reserve(51, 3)
    for node in (1, 2, 3, 4):
        door.join(node)
    actions = door.tell(Gone(51, "killed"))
    commit = only(actions, Commit)
    assert sorted(each.node for each in commit.membership.members) == [1, 2, 3]
    assert waiting_of(door) == [4]


def test_who_gets_a_place_late_does_not_wait_for_children_that_have_ended() -> None:
    door = a_door(2, elastic=True)
    door.reserve(51, 1)
    door.reserve(52, 1)
    door.join(3)
    assert every(door.tell(ChildDied(52, 1, "it had nothing to do", well=True)), Fail) == []
    fail = only(door.tell(Gone(51, "killed")), Fail)
    assert any("it ended before the cluster had formed" in reason for reason in fail.refused.values())
    assert sorted(fail.connections) == [3, 52]


def test_a_launcher_that_comes_early_gets_no_ranks_and_its_children_wait() -> None:
    door = a_door(1, elastic=True, most=3)
    door.reserve(51, 1)
    admit = only(door.reserve(52, 2), Admit)
    assert (admit.first_rank, admit.group_rank) == (None, None)
    assert "no more than 3" in only(door.reserve(53, 3), Refuse).reason
    door.join(2, launcher=52)
    door.join(1, rank=0, launcher=51)
    assert waiting_of(door) == [2]
    door.tell(Gone(52, "killed"))  # it held nothing


def test_when_the_formation_fails_those_who_wait_are_told() -> None:
    door = a_door(1, elastic=True)
    door.reserve(51, 1)
    door.join(2)
    door.now = 61.0
    actions = door.tell(Tick())
    assert sorted(only(actions, Fail).connections) == [2, 51]
    assert sorted(ends(actions)) == [2, 51]


def test_who_waits_and_comes_again_is_refused_while_its_first_connection_lives() -> None:
    door = a_door(1, elastic=True)
    door.reserve(51, 1)
    door.join(2)
    assert "has joined already" in only(door.join(12, node=2), Refuse).reason
    door.tell(Gone(2, "killed"))
    assert len(every(door.join(12, node=2), Admit)) == 1
