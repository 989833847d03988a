"""Every law about communicators is violated by a machine that is broken on purpose, and the simulator finds it."""

import sys

import pytest

from nexar.testing.simulator import successor_laws
from tests.unit.testing.simulator.mutants import first_caught
from tests.unit.testing.simulator.successor_mutants import RARE_MUTANTS, SUCCESSOR_MUTANTS


@pytest.mark.parametrize("mutant", SUCCESSOR_MUTANTS)
def test_a_broken_machine_is_caught(mutant: str) -> None:
    run, law, within = SUCCESSOR_MUTANTS[mutant]
    caught = first_caught(run, within=within)
    assert caught is not None, f"{within} seeds did not show it"
    outcome, seed = caught
    sys.stdout.write(f"{mutant}: seed {seed}, {outcome.nodes} nodes: {outcome.broken}\n")
    assert outcome.broken.startswith(law)
    assert outcome.record
    assert run(outcome.seed, outcome.nodes) == outcome, "the seed shows it again, event by event"


@pytest.mark.full
@pytest.mark.parametrize("mutant", RARE_MUTANTS)
def test_a_broken_machine_that_few_histories_show_is_caught(mutant: str) -> None:
    run, law, seeds = RARE_MUTANTS[mutant]
    caught = first_caught(run, within=len(seeds), first=seeds.start)
    assert caught is not None, f"{len(seeds)} seeds did not show it"
    outcome, seed = caught
    sys.stdout.write(f"{mutant}: seed {seed}, {outcome.nodes} nodes: {outcome.broken}\n")
    assert outcome.broken.startswith(law)


def test_every_law_has_a_mutant() -> None:
    lines = (successor_laws.__doc__ or "").splitlines()
    laws = {line[2:].partition(":")[0].rstrip(".").lower() for line in lines if line.startswith("- ")}
    caught = tuple(law for _, law, _ in (*SUCCESSOR_MUTANTS.values(), *RARE_MUTANTS.values()) if isinstance(law, str))
    assert [law for law in laws if not law.startswith(caught)] == []
