"""Simulates clusters in virtual time: the real decision machines on a faulty network, determined by a seed.

    Simulation(seed=17, nodes=9).run()          # a SimulationResult

`python -m nexar.testing.simulator --seeds 0:10000 --nodes 5..50` runs many.
"""

from nexar.testing.simulator.laws import Violation
from nexar.testing.simulator.simulation import Simulation, SimulationResult, node_machine

__all__ = ["Simulation", "SimulationResult", "Violation", "node_machine"]
