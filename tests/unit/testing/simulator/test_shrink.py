"""A violated law is shown with few nodes and few faults."""

from unittest.mock import patch

from nexar.cluster.decisions.successor_machine import SuccessorMachine
from nexar.testing.simulator import Simulation, SimulationResult
from nexar.testing.simulator.simulation import concerned_events, shrink


def broken_run(nodes: int) -> SimulationResult:
    """The first run in which a need for a member that left is not requested and must be."""
    for seed in range(60):
        result = Simulation(seed, nodes).run()
        if result.broken:
            return result
    raise AssertionError("no seed shows it")


def test_the_shortest_history_violates_the_same_law_with_fewer_faults() -> None:
    with patch.object(SuccessorMachine, "_ask_renewal", lambda _: []):
        result = broken_run(7)
        simulation = Simulation(result.seed, 7)
        found = shrink(result, seconds=30.0)
        assert found is not None
        assert found.result.law == result.law
        assert found.result.nodes <= 7
        assert len(found.faults) <= len(simulation.faults.planned)
        assert found.runs > 1
        assert result.law in str(found)


def test_a_run_that_violates_nothing_has_no_shortest_history() -> None:
    result = SimulationResult(1, 3, 1, 1, 1.0, 0, broken="calls end: not really")
    assert shrink(result, seconds=30.0) is None


def test_without_time_nothing_is_found() -> None:
    assert shrink(SimulationResult(1, 3, 1, 1, 1.0, 0, broken="calls end: late"), seconds=0.0) is None


def test_events_of_other_nodes_are_left_out() -> None:
    record = ("   1.0000  7 opens c1@2", "   1.0000  70 opens c1@2", "   2.0000  7: Tick")
    result = SimulationResult(1, 3, 1, 3, 2.0, 0, broken="x: y", record=record, concerned=(7,))
    assert concerned_events(result) == [record[0], record[2]]
