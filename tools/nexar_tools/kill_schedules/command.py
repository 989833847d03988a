"""Runs kill schedules: `python -m nexar_tools.kill_schedules --count 500 --seed 7`."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from random import Random, SystemRandom
from statistics import median
from typing import Final

from nexar_tools.kill_schedules.schedule import LEAST, MOST
from nexar_tools.kill_schedules.verbs import COLLECTIVES, MESSAGES, TEAM_CALLS
from nexar_tools.kill_schedules.world import Failed, Outcome, World
from nexar_tools.network_namespaces import NetworkNamespaces, permitted

_SCHEDULES_PER_WORLD: Final = 25
_KINDS: Final = ("disagreement", "hang", "error")


class Runner:
    """Runs schedules in one world after another. Several threads may share it; each has its own worlds."""

    def __init__(self, folder: Path, seed: int, size: int | None) -> None:
        self._folder = folder
        self._seed = seed
        self._size = size  # None: drawn for each schedule
        self._worlds = count()

    def run(self, numbers: Iterator[int], prefixes: Sequence[Sequence[str]]) -> Iterator[Outcome]:
        """Takes numbers until there are none. A failure ends its world."""
        number = next(numbers, None)
        while number is not None:
            with self._world(prefixes) as world:
                for used in range(_SCHEDULES_PER_WORLD):
                    outcome = self._run_one(world, number, new=used == 0)
                    yield outcome
                    number = next(numbers, None)
                    if outcome.failure or number is None:
                        break
                else:
                    world.stop()

    def _run_one(self, world: World, number: int, *, new: bool) -> Outcome:
        size = self._size or Random(f"{self._seed}/{number}").randint(LEAST, MOST)
        try:
            if new:
                world.start(size)
            else:
                world.fill(LEAST if self._size is None else size, size)
        except Failed as failure:
            return Outcome(number, size, failure=str(failure))
        return world.run(number)

    @contextmanager
    def _world(self, prefixes: Sequence[Sequence[str]]) -> Iterator[World]:
        folder = self._folder / f"world-{next(self._worlds)}"
        folder.mkdir()
        world = World(folder, self._seed, prefixes)
        try:
            yield world
        finally:
            world.kill_all()


class Summary:
    """Of all schedules on so many hosts."""

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        self._began = time.monotonic()
        self._outcomes: list[Outcome] = []

    def add(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)

    @property
    def failures(self) -> Counter[str]:
        return Counter(each.failure.partition(":")[0] for each in self._outcomes if each.failure)

    def __str__(self) -> str:
        seconds = [each for outcome in self._outcomes for each in outcome.seconds] or [0.0]
        verbs = set().union(*(each.verbs for each in self._outcomes))
        interrupted: Counter[str] = sum((each.interrupted for each in self._outcomes), Counter())
        failures = ", ".join(f"{kind}s {self.failures[kind]}" for kind in _KINDS)
        missing = ", ".join(sorted(_wanted() - _names(verbs))) or "none"
        elapsed, kills = time.monotonic() - self._began, sum(each.kills for each in self._outcomes)
        return (
            f"{self._hosts} host{'s' * (self._hosts > 1)}: {len(self._outcomes)} schedules in {elapsed:.0f} s, "
            f"{kills} kills; {failures}\n"
            "  from a kill to the next right result of the last survivor: "
            f"median {1e3 * median(seconds):.0f} ms, worst {1e3 * max(seconds):.0f} ms\n"
            f"  {len(verbs)} calls in their forms; not called: {missing}\n"
            f"  interrupted: {', '.join(f'{what} {times}' for what, times in interrupted.most_common())}"
        )


def _wanted() -> set[str]:
    others = {"remote call", "agree", "checkpoint", "leave", "split", "group", "revoke, shrink", "batch"}
    return {*COLLECTIVES, *MESSAGES, *(f"team.{verb}" for verb in TEAM_CALLS), *others}


def _names(verbs: set[str]) -> set[str]:
    return {verb.partition(" (")[0] for verb in verbs}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 if no schedule failed."""
    given = _parser().parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="nexar-kills-", dir=given.folder))
    hosts = _hosts(given.hosts)
    _write(f"{given.count} kill schedules with --seed {given.seed}; output in {folder}")
    failed = False
    first, end = given.first, given.first + given.count
    for index, number in enumerate(hosts):
        middle = first + (end - first) // (len(hosts) - index)
        summary = _run(given, folder, number, range(first, middle))
        first = middle
        _write(str(summary))
        failed = failed or bool(summary.failures)
    if not failed:
        shutil.rmtree(folder)
    return int(failed)


def _hosts(wanted: int | None) -> list[int]:
    if wanted is not None:
        return [wanted]
    reason = permitted()
    if reason:
        _write(f"one host only: {reason}")
    return [1] if reason else [1, 2]


def _run(given: argparse.Namespace, folder: Path, hosts: int, share: range) -> Summary:
    summary, numbers = Summary(hosts), iter(share)  # one step of a range iterator is atomic
    place = folder / f"hosts-{hosts}"
    place.mkdir()
    runner = Runner(place, given.seed, given.size)

    def work(prefixes: Sequence[Sequence[str]]) -> None:
        for outcome in runner.run(numbers, prefixes):
            summary.add(outcome)
            if outcome.failure:
                again = f"--seed {given.seed} --first {outcome.number} --count 1 --hosts {hosts} --size {outcome.size}"
                _write(f"schedule {outcome.number} FAILED ({again}): {outcome.failure}")
            elif given.verbose:
                took = ", ".join(f"{1e3 * each:.0f}" for each in outcome.seconds)
                _write(f"schedule {outcome.number}: {outcome.size} ranks, {outcome.kills} killed, {took} ms")

    with _prefixes(hosts) as prefixes, ThreadPoolExecutor(given.jobs) as pool:
        for running in [pool.submit(work, prefixes) for _ in range(given.jobs)]:
            running.result()
    return summary


@contextmanager
def _prefixes(hosts: int) -> Iterator[Sequence[Sequence[str]]]:
    if hosts == 1:
        yield ((),)
        return
    with NetworkNamespaces(hosts) as network:
        yield [place.prefix for place in network.places]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m nexar_tools.kill_schedules", description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="number of schedules, half of them on two hosts")
    parser.add_argument("--seed", type=int, default=SystemRandom().randrange(1 << 31), help="random seed; printed")
    parser.add_argument("--first", type=int, default=0, help="number of the first schedule")
    parser.add_argument("--hosts", type=int, choices=(1, 2), help="default: both; two hosts need root")
    parser.add_argument("--size", type=int, help="ranks at the beginning of each schedule; default: 4 to 6")
    parser.add_argument("--jobs", type=int, default=1, help="worlds at the same time")
    parser.add_argument("--folder", help="where the output folder is made; it is kept after a failure")
    parser.add_argument("--verbose", action="store_true", help="a line for each schedule")
    return parser


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
