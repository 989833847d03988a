"""Runs many simulations: `python -m nexar.testing.simulator --seeds 0:20000 --nodes 5..50`, on all cores."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from random import Random
from typing import Final, TypeAlias

from nexar.testing.simulator.simulation import Simulation, SimulationResult, shrink
from nexar.testing.simulator.world import REMEMBERED

_RunAll: TypeAlias = Callable[[list[tuple[int, int, bool]]], Iterable[SimulationResult]]

_SHOWN: Final = 5  # failed runs that are shown in full
_SHRINK_SECONDS: Final = 60.0  # for the shortest history of the first failed run


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 if no law was violated."""
    given = _parser().parse_args(arguments)
    began = time.monotonic()
    runs = [(seed, nodes_of(seed, *given.nodes), given.record) for seed in range(*given.seeds)]
    summary = _Summary(shrinks=not given.no_shrink)
    with _workers(given.jobs, len(runs)) as outcomes:
        for outcome in outcomes(runs):
            summary.add(outcome, verbose=given.verbose or given.record or len(runs) == 1)
    _write(summary.line(time.monotonic() - began))
    return 1 if summary.broken else 0


def nodes_of(seed: int, least: int, most: int) -> int:
    """The number of nodes for a seed, independent of other seeds."""
    return least if least == most else Random(f"nodes of {seed}").randint(least, most)


def run_one(run: tuple[int, int, bool]) -> SimulationResult:
    """Runs one (seed, nodes, whether to keep all events)."""
    seed, nodes, recorded = run
    return Simulation(seed, nodes, remembered=None if recorded else REMEMBERED).run()


class _Summary:
    def __init__(self, *, shrinks: bool = True) -> None:
        """`shrinks`: look for the shortest history of the first failed run."""
        self.broken = 0
        self._shrinks = shrinks
        self._runs = self._events = self._epochs = 0
        self._laws: Counter[str] = Counter()

    def add(self, outcome: SimulationResult, *, verbose: bool) -> None:
        self._runs += 1
        self._events += outcome.events
        self._epochs += outcome.epochs - 1
        self.broken += bool(outcome.broken)
        self._laws.update([outcome.law] if outcome.broken else [])
        if verbose or (outcome.broken and self.broken <= _SHOWN):
            _write(f"{outcome}\n" if outcome.broken else f"{outcome}")
        if outcome.broken and self.broken == 1 and self._shrinks:
            _write(f"{shrink(outcome, seconds=_SHRINK_SECONDS) or 'the law is not violated again'}\n")

    def line(self, seconds: float) -> str:
        laws = ", ".join(f"{law} ({count})" for law, count in self._laws.most_common()) or "none"
        did = f"{self._runs} seeds, {self._epochs} changes, {self._events} events"
        return f"{did} in {seconds:.0f} s; violated laws: {laws}"


@contextmanager
def _workers(jobs: int, runs: int) -> Iterator[_RunAll]:
    """Yields a function that runs simulations in order, in this process or in a pool."""
    if jobs == 1 or runs == 1:
        yield lambda each: map(run_one, each)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield lambda each: pool.map(run_one, each, chunksize=8)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m nexar.testing.simulator", description=__doc__)
    parser.add_argument(
        "--seeds", type=_seeds, default=(0, 100), metavar="FIRST:END", help="range of seeds; END means 0:END"
    )
    parser.add_argument(
        "--nodes", type=_nodes, default=(5, 50), metavar="LEAST..MOST", help="number of nodes, or a range"
    )
    parser.add_argument("--jobs", type=int, default=_cores(), help="number of processes; default: all cores")
    parser.add_argument("--verbose", action="store_true", help="print a line for every run")
    parser.add_argument("--record", action="store_true", help="print every event of every run")
    parser.add_argument(
        "--no-shrink", action="store_true", help="do not look for the shortest history that violates a law"
    )
    return parser


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _seeds(text: str) -> tuple[int, int]:
    first, colon, end = text.partition(":")
    return (int(first), int(end)) if colon else (0, int(first))


def _nodes(text: str) -> tuple[int, int]:
    least, dots, most = text.partition("..")
    return (int(least), int(most)) if dots else (int(least), int(least))


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
