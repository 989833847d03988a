"""A simulated member learns by itself what happened while it was away, whoever is left to report it.

The seed of a simulated cluster: its vote outlives it with its disk, and only then.
"""

import pytest

from nexar.cluster.decisions.membership_events import PeerLossFound
from nexar.testing.simulator.world import Partition
from tests.losses import silent
from tests.unit.testing.simulator.scene import a_cluster, passes


def test_who_was_removed_together_with_its_watchers_is_notified_by_those_it_dials() -> None:
    cluster = a_cluster(13)
    away = frozenset(member.node for member in cluster.last.members[8:])
    others = frozenset(cluster.world.nodes) - away
    walls = [
        Partition(away, others),
        Partition(others, away),
        *(Partition(frozenset([node]), away - {node}) for node in away),
    ]
    cluster.world.network.partitions += walls
    passes(cluster, 60.0)
    assert {member.node for member in cluster.last.members} == others - {cluster.seed.node if cluster.seed else 0}
    assert not any(cluster.members[node].is_expelled for node in away)
    cluster.world.network.partitions.clear()
    passes(cluster, 10.0)
    assert all(cluster.members[node].is_expelled for node in away)


def test_who_is_in_the_same_epoch_has_no_news_and_who_is_ahead_has_every_change() -> None:
    cluster = a_cluster(3)
    cluster.crash(cluster.last.members[2].node)
    passes(cluster, 30.0)
    survivor = cluster.members[cluster.last.members[0].node]
    assert survivor.changes_after(2) == []
    assert [message.instance for message in survivor.changes_after(1)] == [(0, 1, 0)]


def starved(nodes: int, lag: float) -> tuple[int, int]:
    """What becomes of a cluster all of whose members are slow, and one of whom thinks that the last one is lost: the
    epoch, and how many are expelled.
    """
    cluster = a_cluster(nodes)
    for node in cluster.members:
        cluster.world.network.slow[node] = lag
    passes(cluster, 10.0)
    last = cluster.last.members[-1].node
    for member in cluster.members.values():
        if member.node != last:
            member.handle(PeerLossFound(last, silent("it did not answer")))
            break
    passes(cluster, 60.0)
    return cluster.last.epoch, sum(member.is_expelled for member in cluster.members.values())


@pytest.mark.parametrize("nodes", [5, 16, 30])
@pytest.mark.parametrize("lag", [0.2, 0.6, 1.0])
def test_members_that_all_run_slowly_expel_nobody(nodes: int, lag: float) -> None:
    assert starved(nodes, lag) == (1, 0)


@pytest.mark.parametrize("lag", [0.1, 0.5, 0.8])
def test_who_dies_among_slow_members_is_removed_all_the_same(lag: float) -> None:
    cluster = a_cluster(8)
    for node in cluster.members:
        cluster.world.network.slow[node] = lag
    passes(cluster, 10.0)
    cluster.crash(cluster.last.members[3].node, silent=True)
    passes(cluster, 100.0)
    assert cluster.last.size == 7


@pytest.mark.parametrize("with_state", [True, False])
def test_one_of_two_goes_on_only_if_the_seed_has_kept_its_state(with_state: bool) -> None:
    cluster = a_cluster(2)
    assert cluster.seed is not None
    cluster.seed.die("killed")
    cluster.seed.restart(with_state=with_state)
    cluster.crash(1)
    passes(cluster, 60.0)
    assert cluster.last.epoch == (2 if with_state else 1)
    assert cluster.members[2].is_stalled == (not with_state)


def test_without_the_seed_one_of_two_stalls_until_it_is_back() -> None:
    cluster = a_cluster(2)
    assert cluster.seed is not None
    cluster.seed.die("killed")
    cluster.crash(1)
    passes(cluster, 60.0)
    assert cluster.members[2].is_stalled
    cluster.seed.restart(with_state=True)
    passes(cluster, 30.0)
    assert cluster.last.epoch == 2
