"""One world of processes that goes through schedules: starts, kills and monitors them. Every wait has a deadline."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nexar_tools import environment
from nexar_tools.kill_schedules.agreement import Agreement
from nexar_tools.kill_schedules.member_main import STOP, Position
from nexar_tools.kill_schedules.schedule import Kill, Schedule, draw_schedule
from nexar_tools.member_process import MemberProcess

LIMIT: Final = 120.0
"""Seconds for a schedule: four times as long as the timeout of any call in it, for a busy machine."""
_START_LIMIT: Final = 300.0  # seconds for processes to start and to become members
_TICK: Final = 0.004


class Failed(Exception):
    """A schedule failed. The text describes it; its first word is the kind of failure."""


@dataclass(slots=True)
class Rank:
    """What is known of one process."""

    process: MemberProcess
    node: int | None = None
    """None until it is a member."""
    ended: int | None = None
    """The last schedule that it completed."""
    left: bool = False
    killed_at: float | None = None
    settled: list[tuple[float, frozenset[int]]] = field(default_factory=list)
    """When it got the right result of the first call on a communicator, and the members of that."""

    @property
    def alive(self) -> bool:
        return self.killed_at is None and not self.left

    def went_on(self, killed_at: float, victim: int) -> float | None:
        """When it had its first right result without the victim; None: not yet."""
        moments = (at for at, nodes in self.settled if at > killed_at and victim not in nodes)
        return next(moments, None)


@dataclass(slots=True)
class Outcome:
    """Of one schedule."""

    number: int
    size: int
    kills: int = 0
    seconds: list[float] = field(default_factory=list)
    """From each kill until the last survivor had its next right result."""
    failure: str | None = None
    verbs: set[str] = field(default_factory=set)
    interrupted: Counter[str] = field(default_factory=Counter)


class World:
    """`start` it, `run` schedules, `stop` it; `kill_all` in any case."""

    def __init__(self, folder: Path, seed: int, prefixes: Sequence[Sequence[str]]) -> None:
        """`prefixes`: the commands that enter the hosts; an empty one is this host."""
        self._folder = folder
        self._seed = seed
        self._prefixes = prefixes
        self._ranks: dict[str, Rank] = {}
        self._seed_process: MemberProcess | None = None
        self._environment = environment() | {"TMPDIR": str(folder), "NEXAR_ELASTIC_ENABLED": "true"}
        # What these limit is not tested here, and a busy machine starts processes slowly.
        self._environment |= dict.fromkeys(("NEXAR_FORMATION_TIMEOUT_SECS", "NEXAR_JOIN_TIMEOUT_SECS"), "300")
        self._agreement = Agreement()
        self._roster: list[int] = []
        self._step = -1  # the furthest step that a rank has begun
        self._outcome = Outcome(Position().number, 0)

    # -- beginning and end -----------------------------------------------------------------------------------

    def start(self, size: int) -> None:
        """Returns when `size` ranks have formed a cluster."""
        self._order(Position().number)
        ticket = self._folder / "ticket"
        listen = () if self._prefixes[0] else ("--listen", "127.0.0.1:0")
        seed = ("seed", "--size", str(size), "--elastic", *listen, "--ticket-file", str(ticket))
        command = [*self._prefixes[0], sys.executable, "-m", "nexar", *seed]
        self._seed_process = MemberProcess("seed", command, self._folder, self._environment)
        self._await(ticket.exists, "hang: the seed does not start", _START_LIMIT)
        self._environment["NEXAR_TICKET"] = ticket.read_text().strip()
        self.fill(size, size)

    def fill(self, least: int, size: int) -> None:
        """Starts ranks until `size` processes live; returns when `least` of them are members."""
        while sum(rank.alive for rank in self._ranks.values()) < size:
            self._start_rank()
        self._await(lambda: len(self._members()) >= least, "hang: the ranks do not become members", _START_LIMIT)

    def _start_rank(self) -> None:
        number = len(self._ranks)
        program = ("-m", "nexar_tools.kill_schedules.member_main", "--seed", str(self._seed))
        command = [*self._prefixes[number % len(self._prefixes)], sys.executable, *program]
        name = f"rank-{number}"
        self._ranks[name] = Rank(MemberProcess(name, command, self._folder, self._environment))

    def stop(self) -> None:
        self._order(STOP)
        living = [rank for rank in self._ranks.values() if rank.alive and rank.node is not None]
        waiting = [rank for rank in self._ranks.values() if rank.alive and rank.node is None]
        for rank in living:
            self._await(lambda rank=rank: rank.left, "hang: a rank does not stop")  # type: ignore[misc]
        for rank in waiting:
            rank.process.kill()

    def kill_all(self) -> None:
        """Idempotent."""
        processes = [rank.process for rank in self._ranks.values()]
        for process in [*processes, *([] if self._seed_process is None else [self._seed_process])]:
            if process.exit_code is None:
                process.kill()

    # -- one schedule ----------------------------------------------------------------------------------------

    def run(self, number: int) -> Outcome:
        """Blocks until all survivors have completed it; the outcome says what went wrong, if anything did."""
        self._roster, self._step = [], -1
        self._outcome = outcome = Outcome(number, 0)
        self._order(number)
        try:
            self._await(lambda: bool(self._roster), "hang: the schedule does not begin")
            outcome.size = len(self._roster)
            schedule = draw_schedule(self._seed, number, outcome.size)
            self._kill_by(schedule)
            self._await(lambda: self._is_over(schedule), "hang: a survivor does not complete the schedule")
            outcome.seconds = [self._seconds(victim, schedule) for victim in schedule.victims]
        except Failed as failure:
            outcome.failure = str(failure)
        return outcome

    def _kill_by(self, schedule: Schedule) -> None:
        previous = time.monotonic()
        for kill in schedule.kills:
            if kill.step is not None:
                self._await(lambda kill=kill: self._step >= kill.step, "hang: no rank comes to the step of a kill")  # type: ignore[misc]
                previous = time.monotonic()
            self._pause_until(previous + kill.delay)
            self._kill(kill)
            previous = time.monotonic()

    def _pause_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - time.monotonic()))

    def _kill(self, kill: Kill) -> None:
        """All signals first, because `kill` waits. Others are started in their place, which join at any moment."""
        victims = [self._rank_of(self._roster[victim]) for victim in kill.victims]
        for victim in victims:
            victim.killed_at = time.monotonic()
            victim.process.send_kill()
            self._outcome.kills += 1
        for victim in victims:
            victim.process.kill()
            self._start_rank()

    def _is_over(self, schedule: Schedule) -> bool:
        victims = {self._roster[victim] for victim in schedule.victims}
        leavers = {self._roster[rank] for rank in (schedule.leaver, schedule.closer) if rank is not None}
        if not all(self._rank_of(node).left for node in leavers):
            return False
        members = self._members()
        settled = all(rank.settled and victims.isdisjoint(rank.settled[-1][1]) for rank in members)
        return settled and all(rank.ended == schedule.number for rank in members)

    def _seconds(self, victim: int, schedule: Schedule) -> float:
        gone = schedule.victims | {schedule.leaver, schedule.closer}
        dead = self._rank_of(self._roster[victim])
        assert dead.killed_at is not None
        survivors = [self._rank_of(node) for rank, node in enumerate(self._roster) if rank not in gone]
        moments = [rank.went_on(dead.killed_at, self._roster[victim]) for rank in survivors]
        if None in moments:
            raise self._failure("error: a rank was lost before it was killed", dead.process.name)
        return max(moment for moment in moments if moment is not None) - dead.killed_at

    # -- monitoring --------------------------------------------------------------------------------------------

    def _members(self) -> list[Rank]:
        return [rank for rank in self._ranks.values() if rank.alive and rank.node is not None]

    def _rank_of(self, node: int) -> Rank:
        return next(rank for rank in self._ranks.values() if rank.node == node)

    def _order(self, number: int) -> None:
        draft = self._folder / "draft"
        draft.write_text(str(number))
        draft.rename(self._folder / "order")

    def _await(self, true: Callable[[], bool], complaint: str, limit: float = LIMIT) -> None:
        deadline = time.monotonic() + limit
        while not true():
            if time.monotonic() > deadline:
                raise self._failure(complaint)
            self._monitor()
            time.sleep(_TICK)

    def _monitor(self) -> None:
        for name, rank in self._ranks.items():
            if rank.alive:
                ended = rank.process.exit_code
                for report in rank.process.reports():
                    self._heard(name, rank, report)
                if ended is not None and not (rank.left and ended == 0):
                    raise self._failure(f"error: {name} ended with {ended}", name)
        if self._seed_process is not None and self._seed_process.exit_code is not None:
            raise self._failure("error: the seed has ended")

    def _heard(self, name: str, rank: Rank, report: Mapping[str, Any]) -> None:
        match report["what"]:
            case "here":
                rank.node = report["node"]
            case "begin":
                self._roster = report["roster"]
            case "step" if report["number"] == self._outcome.number:
                self._step = max(self._step, report["step"])
            case "settled":
                rank.settled.append((report["at"], frozenset(report["nodes"])))
            case "end":
                rank.ended = report["number"]
                self._outcome.verbs.update(report["verbs"])
            case "interrupted":
                self._outcome.interrupted[report["doing"]] += 1
            case "left":
                rank.left = True
            case "fact":
                disagreement = self._agreement.add(name, report)
                if disagreement:
                    raise self._failure(f"disagreement: {disagreement}", name)

    def _failure(self, what: str, first: str | None = None) -> Failed:
        ranks = sorted(self._ranks.items(), key=lambda item: item[0] != first)
        described = [rank.process.describe() for name, rank in ranks if rank.killed_at is None or name == first]
        seed = [] if self._seed_process is None else [self._seed_process.describe()]
        text = "\n\n".join([what, *described, *seed])
        path = self._folder / f"failure-{self._outcome.number}.txt"
        path.write_text(text)
        return Failed(f"{what}; stacks and errors of all ranks: {path}")
