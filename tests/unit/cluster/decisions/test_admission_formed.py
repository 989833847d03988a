"""After the commit: late ones are told so, members come and go, and a restarted seed knows its members again."""

from nexar.cluster.decisions.admission import Admission
from nexar.cluster.decisions.admission_events import Admit, Commit, Drop, Gone, Left, Note, Refuse, Tick
from nexar.cluster.membership import Membership
from tests.unit.cluster.decisions.door import SEED, Door, a_door, ends, every, notes, only

LATE = "the cluster has formed with 2 members and is not elastic"


def formed() -> Door:
    door = a_door(2)
    door.reserve(51, 1)
    door.join(1, rank=0, launcher=51)
    door.join(2)
    assert door.machine.membership is not None
    return door


def resumed() -> Door:
    membership = formed().machine.membership
    assert membership is not None
    return Door(Admission.resumed(Membership.decode(membership.encode())))


def test_late_joiners_are_refused_with_the_reason_once_they_know_the_secret() -> None:
    for door in (formed(), resumed()):
        assert only(door.join(3), Refuse).reason == LATE
        assert only(door.reserve(4, 1), Refuse).reason == LATE
        assert only(door.join(5, knows_secret=False), Refuse).reason != LATE


def test_a_second_process_of_a_rank_is_told_that_it_is_the_second() -> None:
    for door in (formed(), resumed()):
        reason = only(door.join(3, rank=0, launcher=51), Refuse).reason
        assert reason == f"{LATE}; rank 0 is one of them: nexar.init() is called once for each rank"


def test_members_that_end_are_noted_with_their_rank_and_the_membership_stays() -> None:
    door = formed()
    assert only(door.tell(Gone(1, "killed")), Note) == Note("gone", "10.0.0.9:1", 1, 0, "killed")
    left = door.tell(Left(2, "done"))
    assert only(left, Note) == Note("left", "10.0.0.9:2", 2, 1, "done")
    assert ends(left) == [2]
    assert notes(door.tell(Gone(51, "killed"))) == ["gone"]
    assert door.machine.joined == 0
    assert door.order() == [1, 2]


def test_a_formed_cluster_never_fails() -> None:
    for door in (formed(), resumed()):
        assert door.machine.due(0.0) is None
        door.now = 1e9
        assert door.tell(Tick()) == []
        assert not door.machine.failed


def test_a_restarted_seed_welcomes_the_members_it_pins() -> None:
    door = resumed()
    for connection, node, rank in ((11, 2, 1), (12, 1, 0)):
        actions = door.join(connection, node=node)
        assert only(actions, Admit).rank == rank
        assert only(actions, Commit).connections == (connection,)
        assert only(actions, Commit).membership == door.machine.membership
        assert notes(actions) == ["knocked", "returned"]
    assert only(door.reserve(13, 1, node=51), Commit).connections == (13,)
    assert door.machine.joined == 2


def test_another_key_or_another_role_does_not_pass_for_a_member() -> None:
    door = resumed()
    assert "known with another key" in only(door.join(11, node=1, fingerprint=b"x" * 32), Refuse).reason
    assert only(door.join(12, node=51), Refuse).reason == LATE
    assert only(door.reserve(13, 1, node=1), Refuse).reason == LATE
    assert only(door.join(14, node=SEED.node, fingerprint=SEED.fingerprint), Refuse).reason == LATE
    assert "ticket or token" in only(door.join(15, node=1, knows_secret=False), Refuse).reason
    assert door.machine.joined == 0


def test_a_member_whose_line_broke_unnoticed_comes_back_on_another() -> None:
    door = formed()
    actions = door.join(21, node=1)
    assert only(actions, Drop).connection == 1
    assert every(actions, Commit)
    assert door.tell(Gone(1, "closed")) == []
    assert only(door.tell(Gone(21, "killed")), Note).rank == 0
    assert door.machine.joined == 1
