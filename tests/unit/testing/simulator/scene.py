"""A small cluster in fine weather, for tests that do one thing to it."""

from random import Random

from nexar.testing.simulator.cluster import Cluster, first_membership
from nexar.testing.simulator.laws import Laws
from nexar.testing.simulator.network import Network
from nexar.testing.simulator.simulation import succession
from nexar.testing.simulator.timeline import Timeline
from nexar.testing.simulator.witness import witness
from nexar.testing.simulator.world import World


def a_cluster(nodes: int, *, rate: float = 1.0) -> Cluster:
    """Formed, and one second old."""
    timeline = Timeline(None)
    laws = Laws(first_membership(nodes, Random(1), has_seed=True))
    world = World(timeline, Network(timeline, Random(2)), laws, Random(3))
    cluster = Cluster(world, succession, witness)
    cluster.form(lambda: (rate, 100.0))
    timeline.run_until(1.0)
    return cluster


def passes(cluster: Cluster, seconds: float) -> None:
    """Time does."""
    cluster.world.timeline.run_until(cluster.world.timeline.now + seconds)
