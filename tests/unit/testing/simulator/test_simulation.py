"""The machines of the product keep the laws, run for run the same; broken ones are caught."""

import pytest

from nexar.testing.simulator import Simulation
from tests.unit.testing.simulator.mutants import MUTANTS, first_caught


@pytest.mark.parametrize("seed", range(40))
def test_no_law_is_broken_whatever_goes_wrong(seed: int) -> None:
    outcome = Simulation(seed, nodes=3 + seed % 13).run()
    assert not outcome.broken, str(outcome)


def test_a_seed_gives_the_same_run_every_time() -> None:
    first, again = (Simulation(seed=11, nodes=9, remembered=None).run() for _ in range(2))
    assert first == again
    assert first.digest == again.digest
    assert len(first.record) == first.events


def test_seeds_and_numbers_of_nodes_give_different_runs() -> None:
    runs = [Simulation(seed, nodes).run() for seed, nodes in ((11, 9), (12, 9), (11, 10))]
    assert len({run.digest for run in runs}) == 3


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_machine_that_is_broken_on_purpose_is_caught(mutant: str) -> None:
    run, law, within = MUTANTS[mutant]
    caught = first_caught(run, within=within)
    assert caught is not None, f"{within} seeds did not show it"
    outcome, _ = caught
    assert outcome.broken.startswith(law)
    assert outcome.record
    assert run(outcome.seed, outcome.nodes) == outcome, "the seed shows it again, event by event"
