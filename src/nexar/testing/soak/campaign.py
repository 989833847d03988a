"""What happens next in a soak. Pure: chance is given.

A process of a soak, with what it says in files. It is ended by its process id, and has ended when `end` returns.

A soak, from the first process to the last: it starts and kills, looks after everybody, and says what went wrong.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from nexar.testing.soak.census import Census
from nexar.testing.soak.resources import ResourceWatch

if TYPE_CHECKING:
    from random import Random


LEAST, MOST = 2, 10
"""So many processes are alive."""
_SPAWN: Final = 0.6
_PAUSE: Final = (0.5, 2.0)


class SoakAction(NamedTuple):
    """One thing that happens."""

    pause: float
    """Seconds until the next."""
    victim: str | None = None
    """Who is killed; None: a process is started, if there is room."""


def next_action(chance: Random, alive: int, killable: Sequence[str]) -> SoakAction | None:
    """A start or a death; None: what chance wants cannot be now, ask again a little later."""
    spawn = chance.random() < _SPAWN
    pause = chance.uniform(*_PAUSE)
    if spawn:
        return SoakAction(pause) if alive < MOST else None
    if alive <= LEAST or not killable:
        return None
    return SoakAction(pause, chance.choice(sorted(killable)))


_SHOWN_CHARACTERS: Final = 6_000
_DUMP_SECONDS: Final = 1.0  # for a process to write where its threads are


class MemberProcess:
    """Started at once."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.started_at = time.monotonic()
        self._said = folder / f"{name}.out"
        self._complained = folder / f"{name}.err"
        with self._said.open("wb") as out, self._complained.open("wb") as err:
            self._process = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        self._read_bytes = 0
        self._dumped_at = 0  # how much had been read then

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    def reports(self) -> Iterator[dict[str, Any]]:
        """What it said since this was last asked; whole lines."""
        with self._said.open("rb") as said:
            said.seek(self._read_bytes)
            news = said.read()
        whole = news[: news.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.splitlines():
            yield json.loads(line)

    def kill(self) -> None:
        """At once, without a word."""
        self._process.kill()
        self._process.wait()

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def end(self, timeout: float) -> bool:
        """Whether it ended by itself in time; it has ended afterwards in any case. Idempotent."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        return True

    def dump(self) -> bool:
        """Let it write where its threads are, once while it is silent; not before it knows the signal."""
        if self.exit_code is not None or self._dumped_at == self._read_bytes:
            return False
        self._dumped_at = self._read_bytes
        os.kill(self.pid, signal.SIGUSR2)
        return True

    def tell(self) -> str:
        """How it is, where its threads are if it runs, and the last that it wrote to standard error."""
        if self.dump():
            time.sleep(_DUMP_SECONDS)
        state = "runs" if self.exit_code is None else f"ended with {self.exit_code}"
        return f"{self.name} (process {self.pid}) {state}:\n{self.complaints()[-_SHOWN_CHARACTERS:]}"

    def complaints(self) -> str:
        """All that it wrote to standard error."""
        return self._complained.read_text(errors="replace")


STALL_SECONDS: Final = 60.0
_SUSPICIOUS_SECONDS: Final = 8.0  # who says nothing for so long writes down where it is
_TICK: Final = 0.05
_AGAIN: Final = 0.2
_TELL_SECONDS: Final = 10.0
_END_SECONDS: Final = 60.0
_SHOWN: Final = 4  # processes whose state is told in full when something goes wrong


class SoakFailure(Exception):
    """The soak has found something. The text says what, and all that is known about it."""


class Campaign:
    """`run` it once."""

    def __init__(
        self, folder: Path, seed: int, say: Callable[[str], None], member: Sequence[str] | None = None
    ) -> None:
        """Everything is written to `folder`. `say` gets a line now and then. `member`: the command of each member."""
        self._member = member or [sys.executable, "-m", "nexar.testing.soak.member_main"]
        self._folder = folder
        self._chance = random.Random(seed)
        self._say = say
        self._processes: dict[str, MemberProcess] = {}
        self._killed: set[str] = set()
        self._environment = dict(os.environ)
        self._seed: MemberProcess | None = None
        self._watch = ResourceWatch()
        self.census: Final = Census()
        self.kills = 0

    def run(self, minutes: float) -> None:
        """Failure says what was found. Nothing that it started runs afterwards."""
        with self._everything_ends():
            self._open_seed()
            for _ in range(LEAST):
                self._start()
            self._misfortune(time.monotonic() + 60 * minutes)
            self._calm_down()
            self._stop()
            leaks = self._watch.leaks()
            if leaks:
                raise SoakFailure("\n".join(leaks))

    def summary(self) -> str:
        """The figures of all of it."""
        return f"{self._line()}\n{self._watch.summary()}"

    # -- the parts of it -------------------------------------------------------------------------------------

    def _open_seed(self) -> None:
        ticket = self._folder / "ticket"
        place = self._folder / "tmp"
        place.mkdir()
        self._environment |= {"TMPDIR": str(place), "NEXAR_ELASTIC_ENABLED": "true"}
        command = ["seed", "--size", str(LEAST), "--elastic", "--listen", "127.0.0.1:0", "--ticket-file", str(ticket)]
        python = [sys.executable, "-m", "nexar"]
        self._seed = MemberProcess("seed", [*python, *command], self._folder, self._environment)
        self._await(ticket.exists, "the seed does not open")
        self._environment["NEXAR_TICKET"] = ticket.read_text().strip()

    def _misfortune(self, end: float) -> None:
        due, tell_at = time.monotonic(), time.monotonic() + _TELL_SECONDS
        while (now := time.monotonic()) < end:
            self._look()
            if now >= due and self.census.epoch:
                due = now + self._happen(now)
            if now >= tell_at:
                tell_at += _TELL_SECONDS
                self._say(self._line())
            time.sleep(_TICK)

    def _happen(self, now: float) -> float:
        """One thing, or nothing; seconds until the next."""
        killable = self.census.killable(now, self._watch.protected)
        step = next_action(self._chance, len(self.census.alive), killable)
        if step is None:
            return _AGAIN
        if step.victim is None:
            self._start()
        else:
            self._kill(step.victim)
        return step.pause

    def _calm_down(self) -> None:
        """Nobody is killed any more: all that live come to be members, and compute together."""
        self._await(self.census.all_are_in, "not everybody that lives has become a member")
        before = self.census.rounds
        self._await(lambda: self.census.rounds > before, "nobody goes on when all are members")

    def _stop(self) -> None:
        (self._folder / "stop").touch()
        for name in self.census.alive:
            process = self._processes[name]
            if not process.end(_END_SECONDS) or process.exit_code:
                raise self._failure(f"{name} does not end when all stop", name)
        self._look()
        assert self._seed is not None
        self._seed.terminate()
        if not self._seed.end(_END_SECONDS):
            raise self._failure("the seed does not end when it is stopped")

    # -- what happens ----------------------------------------------------------------------------------------

    def _start(self) -> None:
        name = f"member-{len(self._processes)}"
        self._processes[name] = MemberProcess(name, self._member, self._folder, self._environment)
        self.census.started(name, time.monotonic())

    def _kill(self, name: str) -> None:
        self._processes[name].kill()
        self._killed.add(name)
        self.kills += 1
        self.census.killed(name, time.monotonic())

    # -- looking after them ------------------------------------------------------------------------------------

    def _look(self) -> None:
        now = time.monotonic()
        for name, process in self._processes.items():
            if self.census.lives[name].alive or name in self._killed:
                for report in process.reports():
                    self.census.heard(name, report)
                self._killed.discard(name)  # it has said its last
        self._check_alive(now)
        self._check_progress(now)
        assert self._seed is not None
        self._watch.look(
            now, self.census, self._seed.pid, {name: self._processes[name].pid for name in self.census.alive}
        )

    def _check_alive(self, now: float) -> None:
        stopping = (self._folder / "stop").exists()
        for name in self.census.alive:
            if self._processes[name].exit_code is not None and not stopping:
                raise self._failure(f"{name} ended, and was not killed", name)
            silent = now - self.census.lives[name].moved_at
            if silent > _SUSPICIOUS_SECONDS:
                self._processes[name].dump()
            if silent > STALL_SECONDS and not stopping:
                raise self._failure(f"{name} has said nothing for {silent:.0f} s", name)
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
            self._look()
            time.sleep(_TICK)

    def _failure(self, what: str, first: str | None = None) -> SoakFailure:
        """With what is known of everybody that lives."""
        names = sorted(self.census.alive, key=lambda name: (name != first, name))
        told = [self._processes[name].tell() for name in names[:_SHOWN]]
        seed = [] if self._seed is None else [self._seed.tell()]
        lives = [f"{name}: {life}" for name, life in self.census.lives.items() if life.alive]
        return SoakFailure("\n".join([what, self._line(), *lives, *told, *seed, f"the rest is in {self._folder}"]))

    def _line(self) -> str:
        census = self.census
        minutes, seconds = divmod(int(self._watch.age), 60)
        rate = census.rounds / max(self._watch.age, 1.0)
        return (
            f"{minutes:3}:{seconds:02}  {len(census.alive)} alive, {len(census.nodes)} in epoch {census.epoch}; "
            f"{rate:.0f} rounds/s; {self.kills} killed, {census.joined} joined; "
            f"{len(census.recoveries)} recoveries, median {1e3 * census.median_recovery:.0f} ms"
        )

    @contextmanager
    def _everything_ends(self) -> Iterator[None]:
        try:
            yield
        finally:
            everybody = [*self._processes.values(), *([] if self._seed is None else [self._seed])]
            for process in everybody:
                if process.exit_code is None:
                    process.kill()
