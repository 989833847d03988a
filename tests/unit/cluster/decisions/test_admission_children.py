"""While the cluster forms: children that end without coming, who comes from another cluster, and who only looks."""

from nexar.cluster.decisions.admission_events import (
    ChildDied,
    Commit,
    Fail,
    Left,
    Refuse,
    Reserved,
    Tick,
    Watched,
)
from nexar.cluster.decisions.authenticating import MAX_ONLOOKERS
from nexar.cluster.decisions.guest import Guest
from nexar.wire.joining import Reserve
from tests.unit.cluster.decisions.door import PROOF, a_door, every, key, notes, only


def test_a_child_that_ended_without_coming_ends_the_formation_as_soon_as_somebody_waits() -> None:
    ended = ChildDied(51, 1, "ended with exit code 0", well=True)
    for before in (True, False):
        door = a_door(2)
        door.reserve(51, 2)
        for has_ended in (before, not before):
            assert not door.machine.failed
            if has_ended:
                door.tell(ended)
            else:
                door.join(1, rank=0, launcher=51)
        fail = only(door.actions, Fail)
        cause = "it ended before the cluster had formed: ended with exit code 0; every rank must call nexar.init()"
        assert fail.refused["rank 1"] == cause
        assert fail.connections == (1, 51)


def test_children_that_want_nothing_of_the_cluster_end_nothing() -> None:
    door = a_door(2)
    door.reserve(51, 2)
    for rank in (0, 1):
        assert notes(door.tell(ChildDied(51, rank, "ended with exit code 0", well=True))) == ["child died"]
    door.tell(Left(51))
    assert not door.machine.failed
    door.join(1)
    assert every(door.join(2), Commit)


def test_members_of_a_seed_that_was_here_before_are_not_taken_for_new_ones() -> None:
    door = a_door(2)
    asked = Reserve(PROOF, b"request", "a", 1, None, 1)
    launcher = door.greet(2, role="launcher") + door.tell(Reserved(2, asked, True, key(2)))
    for actions in (door.join(1, epoch=3), launcher):
        assert "started without its state" in only(actions, Refuse).reason
    assert door.machine.joined == 0


def test_who_only_looks_is_told_that_the_cluster_did_not_form_and_is_forgotten() -> None:
    door = a_door(1, timeout=1.0)
    for connection in range(MAX_ONLOOKERS):
        door.greet(connection, node=connection + 1, role="onlooker")
        door.tell(Watched(connection, proof_ok=True))
    door.now = 2.0
    refused = every(door.tell(Tick()), Refuse)
    assert [each.connection for each in refused] == list(range(MAX_ONLOOKERS))
    (reason,) = {each.reason for each in refused}
    assert reason.startswith("the cluster did not form within 1 s\n")
    assert "NEXAR_FORMATION_TIMEOUT_SECS" in reason
    door.machine._onlookers.enter(Guest(99, "10.0.0.9:99"))  # there is room again
