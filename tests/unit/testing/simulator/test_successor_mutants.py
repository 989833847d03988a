"""Every law about communicators and agreements is violated by a machine that is broken on purpose, and the simulator
finds it.
"""

import re
import sys
from pathlib import Path

import pytest

from nexar.testing.simulator import laws
from tests.unit.testing.simulator.agreement_mutants import AGREEMENT_MUTANTS
from tests.unit.testing.simulator.mutants import MUTANTS, first_caught
from tests.unit.testing.simulator.successor_mutants import RARE_MUTANTS, SUCCESSOR_MUTANTS

ALL_MUTANTS = SUCCESSOR_MUTANTS | AGREEMENT_MUTANTS


@pytest.mark.parametrize("mutant", ALL_MUTANTS)
def test_a_broken_machine_is_caught(mutant: str) -> None:
    run, law, within = ALL_MUTANTS[mutant]
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
    sources = Path(laws.__file__).parent.glob("*.py")
    known = {law for path in sources for law in re.findall(r'Violation\(\s*"([^"]+)"', path.read_text())}
    mutants = (*MUTANTS.values(), *ALL_MUTANTS.values(), *RARE_MUTANTS.values())
    caught = tuple(law for _, law, _ in mutants if isinstance(law, str))
    assert len(known) > 25
    assert [law for law in known if not law.startswith(caught)] == []
