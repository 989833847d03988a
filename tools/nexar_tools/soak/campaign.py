"""The soak test: starts, kills and monitors processes."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from nexar_tools import environment
from nexar_tools.member_process import MemberProcess
from nexar_tools.soak.census import Census
from nexar_tools.soak.hosts import SoakHosts
from nexar_tools.soak.resources import ResourceWatch

if TYPE_CHECKING:
    from random import Random


LEAST, MOST = 2, 10  # number of living members
_SPAWN: Final = 0.6  # share of starts; the rest are kills
_PAUSE: Final = (0.5, 2.0)  # seconds between two actions


class SoakAction(NamedTuple):
    """One start or kill."""

    pause: float
    """Seconds until the next action."""
    victim: str | None = None
    """The process to kill; None: start one."""


def next_action(rng: Random, alive: int, killable: Sequence[str]) -> SoakAction | None:
    """Draws a start or a kill; None if the drawn one is not possible now."""
    spawn = rng.random() < _SPAWN
    pause = rng.uniform(*_PAUSE)
    if spawn:
        return SoakAction(pause) if alive < MOST else None
    if alive <= LEAST or not killable:
        return None
    return SoakAction(pause, rng.choice(sorted(killable)))


STALL_SECONDS: Final = 60.0
_SUSPICIOUS_SECONDS: Final = 8.0  # a process that reports nothing for so long dumps its stacks
_TICK: Final = 0.05
_RETRY_SECONDS: Final = 0.2  # after an action that was not possible
_PROGRESS_SECONDS: Final = 10.0  # between two progress lines
_END_SECONDS: Final = 60.0
_SHOWN: Final = 4  # processes described in full in a failure


class SoakFailure(Exception):
    """The soak found an error; the text describes it."""


class Campaign:
    """One soak test. Call `run` once."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        on_progress: Callable[[str], None],
        *,
        hosts: SoakHosts | None = None,
        member: Sequence[str] | None = None,
    ) -> None:
        """`on_progress` receives progress lines. `hosts`: opened ones; None: this host. `member`: the command of each
        member.
        """
        self._hosts = hosts or SoakHosts()
        self._host_of: dict[str, int] = {}
        self._member = member or [sys.executable, "-m", "nexar_tools.soak.member_main"]
        self._folder = folder
        self._rng = random.Random(seed)
        self._on_progress = on_progress
        self._processes: dict[str, MemberProcess] = {}
        self._killed: set[str] = set()
        self._environment = environment()
        self._seed: MemberProcess | None = None
        self._watch = ResourceWatch()
        self.census: Final = Census()
        self.kills = 0

    def run(self, minutes: float) -> None:
        """Blocks for `minutes` and the time to stop. Raises SoakFailure. Ends every process it started."""
        with self._ending_all():
            self._open_seed()
            for _ in range(LEAST):
                self._start()
            self._run_faults(time.monotonic() + 60 * minutes)
            self._settle()
            self._stop()
            leaks = self._watch.leaks()
            if leaks:
                raise SoakFailure("\n".join(leaks))

    def summary(self) -> str:
        stall = f"longest time without a round of any member: {self.census.longest_stall:.1f} s"
        return f"{self._line()}\n{stall}\n{self._watch.summary()}"

    # -- phases ----------------------------------------------------------------------------------------------

    def _open_seed(self) -> None:
        ticket = self._folder / "ticket"
        place = self._folder / "tmp"
        place.mkdir()
        self._environment |= {"TMPDIR": str(place), "NEXAR_ELASTIC_ENABLED": "true"}
        prefix = self._hosts.prefix(0)
        listen = [] if prefix else ["--listen", "127.0.0.1:0"]
        command = ["seed", "--size", str(LEAST), "--elastic", *listen, "--ticket-file", str(ticket)]
        python = [*prefix, sys.executable, "-m", "nexar"]
        self._seed = MemberProcess("seed", [*python, *command], self._folder, self._environment)
        self._await(ticket.exists, "the seed does not start")
        self._environment["NEXAR_TICKET"] = ticket.read_text().strip()

    def _run_faults(self, end: float) -> None:
        due, print_at = time.monotonic(), time.monotonic() + _PROGRESS_SECONDS
        while (now := time.monotonic()) < end:
            self._monitor()
            if self.census.epoch and self._hosts.is_due(now):
                self._change_partition(now)
            if now >= due and self.census.epoch:
                due = now + self._act(now)
            if now >= print_at:
                print_at += _PROGRESS_SECONDS
                self._on_progress(self._line())
            time.sleep(_TICK)

    def _act(self, now: float) -> float:
        """Returns the seconds until the next action."""
        killable = self.census.killable(now, self._watch.protected)
        action = next_action(self._rng, len(self.census.alive), killable)
        if action is None:
            return _RETRY_SECONDS
        if action.victim is None:
            self._start()
        else:
            self._kill(action.victim)
        return action.pause

    def _change_partition(self, now: float) -> None:
        """Begins one if the other hosts keep a majority, or ends it when they have removed the isolated members."""
        if self._hosts.isolated is not None:
            if not self.census.has_isolated_members:  # if this lasts too long, `_check_progress` raises
                self._hosts.heal(now)
            return
        for host in self._rng.sample(range(1, self._hosts.count), self._hosts.count - 1):
            names = [name for name in self.census.alive if self._host_of[name] == host]
            if set(names) & set(self.census.members) and self.census.may_isolate(now, names):
                self._hosts.isolate(host, now, self._rng)
                self.census.isolated |= set(names)
                return

    def _settle(self) -> None:
        """Waits, without further kills, until all are members and compute."""
        if self._hosts.isolated is not None:
            self._hosts.heal(time.monotonic())
        self._await(self.census.all_are_in, "not every living process has become a member")
        before = self.census.rounds
        self._await(lambda: self.census.rounds > before, "no member computes after all have joined")

    def _stop(self) -> None:
        (self._folder / "stop").touch()
        for name in self.census.alive:
            process = self._processes[name]
            if not process.end(_END_SECONDS) or process.exit_code:
                raise self._failure(f"{name} does not end after the stop", name)
        self._monitor()
        assert self._seed is not None
        self._seed.terminate()
        if not self._seed.end(_END_SECONDS):
            raise self._failure("the seed does not end when it is stopped")

    # -- actions ---------------------------------------------------------------------------------------------

    def _start(self) -> None:
        number = len(self._processes)
        name, host = f"member-{number}", number % self._hosts.count
        if host == self._hosts.isolated:
            host = 0
        command = [*self._hosts.prefix(host), *self._member]
        self._processes[name] = MemberProcess(name, command, self._folder, self._environment)
        self._host_of[name] = host
        self.census.started(name, time.monotonic())

    def _kill(self, name: str) -> None:
        self._processes[name].kill()
        self._killed.add(name)
        self.kills += 1
        self.census.killed(name, time.monotonic())

    # -- monitoring --------------------------------------------------------------------------------------------

    def _monitor(self) -> None:
        now = time.monotonic()
        # Read once, before the reports: what a process that has ended wrote is then complete, and all checks agree on
        # which processes have ended.
        exit_codes = {name: self._processes[name].exit_code for name in self.census.alive}
        for name, process in self._processes.items():
            if self.census.lives[name].alive or name in self._killed:
                for report in process.reports():
                    self.census.heard(name, report)
                self._killed.discard(name)  # these are its last reports
        self._end_isolation(exit_codes)
        self._check_alive(now, exit_codes)
        self._check_progress(now)
        assert self._seed is not None
        self._watch.sample(
            now, self.census, self._seed.pid, {name: self._processes[name].pid for name in self.census.alive}
        )

    def _end_isolation(self, exit_codes: Mapping[str, int | None]) -> None:
        """After a partition a process computes, or has ended: expelled as a member, or as a joiner in `init()`."""
        for name in list(self.census.isolated):
            life, ended = self.census.lives[name], exit_codes[name]
            if ended is not None and (life.node is None or (life.expelled and ended == 0)):
                self.census.ended(name)
            elif self._hosts.isolated is None and life.round_at > self._hosts.healed_at:
                self.census.isolated.discard(name)

    def _check_alive(self, now: float, exit_codes: Mapping[str, int | None]) -> None:
        stopping = (self._folder / "stop").exists()
        for name in self.census.alive:
            if exit_codes[name] is not None and not stopping:
                raise self._failure(f"{name} ended and was not killed", name)
            silent = now - self.census.lives[name].moved_at
            if silent > _SUSPICIOUS_SECONDS:
                self._processes[name].dump()
            if silent > STALL_SECONDS and not stopping:
                raise self._failure(f"{name} has reported nothing for {silent:.0f} s", name)
        assert self._seed is not None
        if self._seed.exit_code is not None and not stopping:
            raise self._failure("the seed has ended")

    def _check_progress(self, now: float) -> None:
        if self.census.moved_at and now - self.census.moved_at > STALL_SECONDS:
            raise self._failure(f"no progress for {now - self.census.moved_at:.0f} s")

    def _await(self, true: Callable[[], bool], complaint: str) -> None:
        deadline = time.monotonic() + STALL_SECONDS
        while not true():
            if time.monotonic() > deadline:
                raise self._failure(complaint)
            self._monitor()
            time.sleep(_TICK)

    def _failure(self, what: str, first: str | None = None) -> SoakFailure:
        names = sorted(self.census.alive, key=lambda name: (name != first, name))
        described = [self._processes[name].describe() for name in names[:_SHOWN]]
        seed = [] if self._seed is None else [self._seed.describe()]
        lives = [f"{name}: {life}" for name, life in self.census.lives.items() if life.alive]
        return SoakFailure("\n".join([what, self._line(), *lives, *described, *seed, f"the rest is in {self._folder}"]))

    def _line(self) -> str:
        census = self.census
        minutes, seconds = divmod(int(self._watch.age), 60)
        rate = census.rounds / max(self._watch.age, 1.0)
        return (
            f"{minutes:3}:{seconds:02}  {len(census.alive)} alive, {len(census.nodes)} in epoch {census.epoch}; "
            f"{rate:.0f} rounds/s; {self.kills} killed, {census.joined} joined, {self._hosts.partitions} partitions, "
            f"{sum(life.expelled for life in census.lives.values())} expelled; "
            f"{len(census.recoveries)} recoveries, median {1e3 * census.median_recovery:.0f} ms"
        )

    @contextmanager
    def _ending_all(self) -> Iterator[None]:
        try:
            yield
        finally:
            everybody = [*self._processes.values(), *([] if self._seed is None else [self._seed])]
            for process in everybody:
                if process.exit_code is None:
                    process.kill()
