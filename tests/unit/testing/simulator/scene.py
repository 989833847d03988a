"""A small cluster without faults, for tests that do one thing to it."""

from random import Random

from nexar.testing.simulator.application import ApplicationPlan
from nexar.testing.simulator.cluster import SimulatedCluster, first_membership, seed_voter
from nexar.testing.simulator.laws import Laws
from nexar.testing.simulator.simulation import node_machine
from nexar.testing.simulator.world import SimulatedNetwork, SimulationContext, Timeline


def a_cluster(nodes: int, *, rate: float = 1.0, program: ApplicationPlan | None = None) -> SimulatedCluster:
    """Formed, and one second old."""
    timeline = Timeline(None)
    laws = Laws(first_membership(nodes, Random(1), has_seed=True))
    world = SimulationContext(timeline, SimulatedNetwork(timeline, Random(2)), laws, Random(3))
    cluster = SimulatedCluster(world, node_machine, seed_voter, program)
    cluster.form(lambda: (rate, 100.0))
    timeline.run_until(1.0)
    return cluster


def passes(cluster: SimulatedCluster, seconds: float) -> None:
    """Time does."""
    cluster.world.timeline.run_until(cluster.world.timeline.now + seconds)
