"""While the cluster forms: children that end without coming, and who comes from another cluster."""

from nexar.cluster.decisions.admission_events import ChildDied, Commit, Fail, Left, Refuse, Reserved
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
        assert fail.refused["rank 1"] == "it ended before the cluster had formed: ended with exit code 0"
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
