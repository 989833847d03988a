"""Finds the shortest history that violates a law: the same seed with fewer nodes and fewer faults.

A run is a function of its seed, the number of nodes and the faults injected, so leaving something out needs no more
than another run. First fewer nodes are tried, from the smallest number; then faults are left out, in halves and finally
one by one (delta debugging). A smaller run counts if it violates the same law.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from nexar.testing.simulator.simulation import Simulation, SimulationResult

_FEWEST_NODES: Final = 3
_SHOWN: Final = 60  # events

MakeSimulation: TypeAlias = Callable[[int, int, Sequence[int] | None], Simulation]
"""Creates a simulation of seed, number of nodes and indices of the faults (None: all) that keeps all events."""


def make_simulation(seed: int, nodes: int, faults: Sequence[int] | None) -> Simulation:
    """Runs the product's machines."""
    return Simulation(seed, nodes, only=faults, remembered=None)


@dataclass(frozen=True, slots=True)
class ShortHistory:
    """The smallest run that was found."""

    result: SimulationResult
    faults: tuple[str, ...]
    runs: int
    """How many runs were tried."""

    def __str__(self) -> str:
        result = self.result
        events = "".join(f"  {line}\n" for line in concerned_events(result))
        faults = "".join(f"  {fault}\n" for fault in self.faults)
        head = f"shortest history after {self.runs} runs: seed {result.seed}, {result.nodes} nodes"
        return f"{head}, {len(self.faults)} faults\n{faults}{events}BROKEN {result.broken}"


def concerned_events(result: SimulationResult, most: int = _SHOWN) -> list[str]:
    """The last events of the nodes that the violation names, and all faults; all events if it names none."""
    named = set(result.concerned)
    lines = [line for line in result.record if not named or _node_of(line) in named]
    return lines[-most:]


def _node_of(line: str) -> int | None:
    """The node of an event; None for faults and other events of no node."""
    found = re.match(r"\s*[\d.]+\s+(\d+)\b", line)
    return int(found.group(1)) if found else None


class _Search:
    """Runs until `until`, by the real clock."""

    def __init__(self, law: str, make: MakeSimulation, seconds: float) -> None:
        self.runs = 0
        self._law = law
        self._make = make
        self._until = time.monotonic() + seconds

    def run(self, seed: int, nodes: int, faults: Sequence[int] | None) -> tuple[Simulation, SimulationResult] | None:
        """The run if it violates the same law; None if it does not, or the time is over."""
        if time.monotonic() >= self._until:
            return None
        self.runs += 1
        simulation = self._make(seed, nodes, faults)
        result = simulation.run()
        return (simulation, result) if result.law == self._law else None


def shrink(
    result: SimulationResult, *, seconds: float = 60.0, make: MakeSimulation = make_simulation
) -> ShortHistory | None:
    """The smallest run found in this time; None if the law is not violated again."""
    search = _Search(result.law, make, seconds)
    found = search.run(result.seed, result.nodes, None)
    if found is None:
        return None
    for nodes in range(_FEWEST_NODES, result.nodes):
        smaller = search.run(result.seed, nodes, None)
        if smaller is not None:
            found = smaller
            break
    simulation, best = found
    kept = list(range(len(simulation.faults.planned)))
    kept, best = _fewer_faults(search, best, kept)
    faults = tuple(str(simulation.faults.planned[index]) for index in kept)
    return ShortHistory(best, faults, search.runs)


def _fewer_faults(search: _Search, best: SimulationResult, kept: list[int]) -> tuple[list[int], SimulationResult]:
    """Leaves out groups of faults, then smaller groups, as long as the law is violated."""
    size = max(1, len(kept) // 2)
    while kept:
        for start in range(0, len(kept), size):
            rest = kept[:start] + kept[start + size :]
            found = search.run(best.seed, best.nodes, rest)
            if found is not None:
                kept, best = rest, found[1]
                break
        else:
            if size == 1:
                break
            size = max(1, size // 2)
    return kept, best
