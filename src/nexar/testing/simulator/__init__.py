"""Whole clusters in virtual time: the decision machines of the product, on a network that misbehaves by a seed.

    Simulation(seed=17, nodes=9).run()          # an Outcome: which law was broken, or none

`python -m nexar.testing.simulator --seeds 0:10000 --nodes 5..50` runs many.
"""

from nexar.testing.simulator.laws import Violation
from nexar.testing.simulator.simulation import Simulation, SimulationResult, membership_machine

__all__ = ["Simulation", "SimulationResult", "Violation", "membership_machine"]
