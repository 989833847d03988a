"""People come and go, and the machines of the others go on.

What a cluster must come to, and what is said as long as it has not.
"""

from nexar.cluster.decisions.membership_events import ChangeRequested
from nexar.testing.simulator.cluster import majority_lives, present_membership, unmet_conditions
from tests.losses import silent
from tests.unit.testing.simulator.scene import a_cluster, passes


def test_without_faults_nothing_happens() -> None:
    cluster = a_cluster(5)
    passes(cluster, 60.0)
    assert cluster.last.epoch == 1
    assert list(unmet_conditions(cluster)) == []


def test_who_is_killed_is_removed_at_once_and_who_dies_silently_after_the_timeout() -> None:
    cluster = a_cluster(5)
    cluster.crash(1)
    passes(cluster, 1.0)
    assert [cluster.last.epoch, cluster.last.rank_of(1)] == [2, None]
    cluster.crash(2, silent=True)
    passes(cluster, 3.0)
    assert cluster.last.epoch == 2
    passes(cluster, 10.0)
    assert [cluster.last.epoch, cluster.last.rank_of(2)] == [3, None]


def test_newcomers_begin_with_the_membership_that_has_them() -> None:
    cluster = a_cluster(4)
    assert cluster.is_settled()
    cluster.join(2, lambda: (1.0, 0.0))
    passes(cluster, 5.0)
    assert cluster.last.size == 6
    assert {member.epoch for member in cluster.members.values()} == {2}


def test_who_leaves_is_removed_whichever_way_it_goes() -> None:
    cluster = a_cluster(7)
    cluster.release([1])
    passes(cluster, 5.0)
    cluster.resign(2)
    passes(cluster, 5.0)
    cluster.leave(3)
    passes(cluster, 10.0)
    assert set(cluster.world.laws.removed) == {1, 2, 3}
    assert list(unmet_conditions(cluster)) == []
    assert [cluster.members[node].is_expelled for node in (1, 2)] == [True, True]


def test_who_was_stopped_for_long_learns_that_the_others_went_on() -> None:
    cluster = a_cluster(5)
    stopped = cluster.members[1]
    stopped.pause()
    passes(cluster, 30.0)
    assert cluster.last.rank_of(1) is None
    assert not stopped.is_expelled
    stopped.resume()
    passes(cluster, 20.0)
    assert stopped.is_expelled


def test_who_was_stopped_for_a_moment_stays() -> None:
    cluster = a_cluster(5, rate=1.2)
    cluster.members[1].pause()
    passes(cluster, 2.0)
    cluster.members[1].resume()
    passes(cluster, 20.0)
    assert cluster.last.epoch == 1


def test_who_dies_in_mid_sentence_says_no_more_than_it_was_given() -> None:
    cluster = a_cluster(5)
    speaker = cluster.running()[0]
    speaker.last_messages = 1
    cluster.crash(cluster.running()[-1].node)
    passes(cluster, 30.0)
    assert not speaker.alive
    assert cluster.last.size == 3


def test_the_dead_are_complained_of_until_they_are_removed() -> None:
    cluster = a_cluster(5)
    cluster.crash(1)
    assert list(unmet_conditions(cluster)) == ["node 1 is dead, and a member of epoch 1"]
    passes(cluster, 5.0)
    assert list(unmet_conditions(cluster)) == []


def test_who_lost_its_majority_must_know_it() -> None:
    cluster = a_cluster(5)
    for node in (1, 2, 3):
        cluster.crash(node)
    present = present_membership(cluster)
    assert present is not None
    assert not majority_lives(cluster, present)
    assert len(list(unmet_conditions(cluster))) == 2
    passes(cluster, 60.0)
    assert list(unmet_conditions(cluster)) == []


def test_two_that_are_cut_off_must_not_both_stay() -> None:
    cluster = a_cluster(5)
    cluster.world.network.cut(1, 2)
    assert list(unmet_conditions(cluster)) == ["nodes 1 and 2 cannot reach each other, and are members of epoch 1"]
    passes(cluster, 60.0)
    assert list(unmet_conditions(cluster)) == []
    assert cluster.last.size == 4


def test_two_that_are_cut_off_do_not_both_stay_although_changes_follow_one_another() -> None:
    cluster = a_cluster(5)
    cluster.world.network.cut(1, 2)
    cluster.members[1].lose(2, silent())
    for _ in range(60):
        for member in cluster.running():
            member.handle(ChangeRequested(renewed=(77,), epoch=member.epoch))
        passes(cluster, 0.8)
    assert cluster.last.size == 4
    assert cluster.last.epoch > 20


def test_nobody_is_left_to_complain_of() -> None:
    cluster = a_cluster(3)
    for node in (1, 2, 3):
        cluster.crash(node)
    assert present_membership(cluster) is None
    assert list(unmet_conditions(cluster)) == []
