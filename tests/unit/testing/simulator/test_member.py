"""A simulated member learns by itself what happened while it was away, whoever is left to tell it."""

from nexar.testing.simulator.network import Wall
from tests.unit.testing.simulator.scene import a_cluster, passes


def test_who_was_removed_together_with_its_watchers_is_told_by_those_it_dials() -> None:
    cluster = a_cluster(13)
    away = frozenset(member.node for member in cluster.last.members[8:])
    others = frozenset(cluster.world.inhabitants) - away
    walls = [Wall(away, others), Wall(others, away), *(Wall(frozenset([node]), away - {node}) for node in away)]
    cluster.world.network.walls += walls
    passes(cluster, 60.0)
    assert {member.node for member in cluster.last.members} == others - {cluster.seed.node if cluster.seed else 0}
    assert not any(cluster.members[node].is_expelled for node in away)
    cluster.world.network.walls.clear()
    passes(cluster, 10.0)
    assert all(cluster.members[node].is_expelled for node in away)


def test_who_is_in_the_same_epoch_has_no_news_and_who_is_ahead_has_every_change() -> None:
    cluster = a_cluster(3)
    cluster.crash(cluster.last.members[2].node)
    passes(cluster, 30.0)
    survivor = cluster.members[cluster.last.members[0].node]
    assert survivor.news_since(2) == []
    assert [word.instance for word in survivor.news_since(1)] == [(0, 1, 0)]
