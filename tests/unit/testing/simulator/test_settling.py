"""What a cluster must come to, and what is said as long as it has not."""

from nexar.testing.simulator.settling import complaints, majority_lives, present_membership
from tests.unit.testing.simulator.scene import a_cluster, passes


def test_the_dead_are_complained_of_until_they_are_removed() -> None:
    cluster = a_cluster(5)
    cluster.crash(1)
    assert list(complaints(cluster)) == ["node 1 is dead, and a member of epoch 1"]
    passes(cluster, 5.0)
    assert list(complaints(cluster)) == []


def test_who_lost_its_majority_must_know_it() -> None:
    cluster = a_cluster(5)
    for node in (1, 2, 3):
        cluster.crash(node)
    present = present_membership(cluster)
    assert present is not None
    assert not majority_lives(cluster, present)
    assert len(list(complaints(cluster))) == 2
    passes(cluster, 60.0)
    assert list(complaints(cluster)) == []


def test_two_that_are_cut_off_must_not_both_stay() -> None:
    cluster = a_cluster(5)
    cluster.world.network.cut(1, 2)
    assert list(complaints(cluster)) == ["nodes 1 and 2 cannot reach each other, and are members of epoch 1"]
    passes(cluster, 60.0)
    assert list(complaints(cluster)) == []
    assert cluster.last.size == 4


def test_nobody_is_left_to_complain_of() -> None:
    cluster = a_cluster(3)
    for node in (1, 2, 3):
        cluster.crash(node)
    assert present_membership(cluster) is None
    assert list(complaints(cluster)) == []
