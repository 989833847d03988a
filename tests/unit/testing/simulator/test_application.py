"""The applications of simulated members make communicators, call, and continue after losses."""

from nexar.cluster.decisions.successor_events import GenerationKey
from nexar.testing.simulator.application import ApplicationPlan
from nexar.testing.simulator.cluster import SimulatedCluster
from nexar.testing.simulator.generations import SimulatedGeneration
from tests.unit.testing.simulator.scene import a_cluster, passes

QUIET = ApplicationPlan(seed=1, splits=0.0, closes=0.0, interval=1.0)
SPLITS = ApplicationPlan(seed=1, splits=1.0, closes=0.0, interval=1.0)


def keys(cluster: SimulatedCluster) -> set[GenerationKey]:
    """The generations that running members use."""
    return {key for member in cluster.running() if member.application for key in member.application.generation_keys()}


def world_of(cluster: SimulatedCluster, node: int) -> SimulatedGeneration:
    application = cluster.members[node].application
    assert application is not None
    return next(each for each in application.generations.open_generations() if each.key.communicator == 0)


def test_members_call_again_and_again_on_the_world() -> None:
    cluster = a_cluster(4, program=QUIET)
    passes(cluster, 20.0)
    assert keys(cluster) == {GenerationKey(0, 1)}
    assert world_of(cluster, 1).completed >= 8


def test_all_members_make_the_same_parts() -> None:
    cluster = a_cluster(6, program=SPLITS)
    passes(cluster, 10.0)
    parts = keys(cluster) - {GenerationKey(0, 1)}
    assert parts
    for key in parts:
        generations = [
            generation
            for member in cluster.running()
            if member.application is not None
            if (generation := member.application.generations.find(key)) is not None
        ]
        assert {each.size for each in generations} == {len(generations)}


def test_members_continue_on_the_successor_after_a_death() -> None:
    cluster = a_cluster(5, program=QUIET)
    passes(cluster, 5.0)
    cluster.crash(3)
    passes(cluster, 10.0)
    assert keys(cluster) == {GenerationKey(0, 2)}
    assert all(
        world_of(cluster, node).completed >= 0 for node in (1, 2, 4, 5) if world_of(cluster, node).key.epoch == 2
    )


def test_a_joiner_takes_part_in_the_calls() -> None:
    cluster = a_cluster(3, program=QUIET)
    passes(cluster, 3.0)
    cluster.join(1, lambda: (1.0, 0.0))
    passes(cluster, 15.0)
    assert keys(cluster) == {GenerationKey(0, 2)}
    assert world_of(cluster, 4).completed >= 0


def test_a_part_that_one_member_closes_is_closed_by_the_others() -> None:
    cluster = a_cluster(4, program=ApplicationPlan(seed=1, groups=3, splits=0.0, closes=0.0, interval=1.0))
    passes(cluster, 3.0)
    (part, *_) = sorted(keys(cluster) - {GenerationKey(0, 1)})
    (member, *_) = [
        each for each in cluster.running() if each.application and part in each.application.generation_keys()
    ]
    assert member.application is not None
    assert member.application.close_communicator(part.communicator)
    passes(cluster, 20.0)
    assert part not in keys(cluster)


def test_a_revoked_communicator_gets_a_successor() -> None:
    cluster = a_cluster(4, program=QUIET)
    passes(cluster, 3.0)
    application = cluster.members[2].application
    assert application is not None
    application.revoke(GenerationKey(0, 1))
    passes(cluster, 15.0)
    assert keys(cluster) == {GenerationKey(0, 2)}
