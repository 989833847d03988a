"""A cluster of real processes, what happens to it, and what its ranks wrote down: see story_rank."""

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from tests.ports import free_port
from tests.processes.launcher import EVENT_TIMEOUT
from tests.processes.nexar_command import Nexar, Python, await_ticket

ROOT = Path(__file__).parents[2]
RANK = Path(__file__).with_name("story_rank.py")
INTERVAL = 0.002
"""Seconds between two rounds: others want the cores, too."""

Line = dict[str, Any]


class Story:
    """`with` block: `size` ranks and a seed run, and have summed at least once. None is left afterwards.

    Ranks are called by their first numbers, whatever number they have later.
    """

    script = RANK
    """What each of them runs."""

    def __init__(
        self,
        folder: Path,
        size: int,
        *,
        prefixes: Sequence[Sequence[str]] = ((),),
        state: bool = False,
        interval: float = INTERVAL,
        **settings: object,
    ) -> None:
        """`prefixes`: where each rank runs; the last one stands for all that follow; the seed runs where rank 0 does.
        `state`: the seed keeps a state. `settings` are those of Config.
        """
        self.folder = folder
        self.size = size
        self._prefixes = [*prefixes, *itertools.repeat(prefixes[-1], size)][:size]
        self._round_sync = interval
        self._variables = {variable(name): str(value) for name, value in settings.items()}
        self._stack = ExitStack()
        listen = () if prefixes[0] else ("--listen", f"127.0.0.1:{free_port()}")
        kept = ("--state-dir", folder / "state") if state else ()
        self._seed_command = ("seed", "--size", size, "--ticket-file", folder / "ticket", *listen, *kept)
        self.killed: set[int] = set()

    def __enter__(self) -> Self:
        with self._stack:
            self.seed = self.start_seed()
            ticket = await_ticket(self.folder / "ticket", self.seed)
            self.ranks = [self._start(rank, ticket) for rank in range(self.size)]
            self.await_all(
                range(self.size), lambda rank: bool(self.reported(rank, "right")), "first sum", 2 * EVENT_TIMEOUT
            )
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        for rank in self.ranks:
            if rank.process.poll() is None:
                rank.process.send_signal(signal.SIGKILL)  # also one that is stopped
        self._stack.close()

    def start_seed(self) -> Nexar:
        """Again, after it was killed: with the same address, and its state where it keeps one."""
        self.seed = self._stack.enter_context(
            Nexar(*self._seed_command, cwd=self.folder, prefix=self._prefixes[0], **self._variables)
        )
        return self.seed

    def _start(self, rank: int, ticket: str) -> Python:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        place = {"PYTHONPATH": path, "RANK": str(rank), "WORLD_SIZE": str(self.size), "NEXAR_TICKET": ticket}
        return self._stack.enter_context(
            Python(
                self.script, self._round_sync, cwd=self.folder, prefix=self._prefixes[rank], **place, **self._variables
            )
        )

    # -- what happens ----------------------------------------------------------------------------------------

    def kill(self, *ranks: int) -> float:
        """When they were killed, all at once."""
        moment = time.monotonic()
        for rank in ranks:
            self.ranks[rank].process.kill()
        self.killed |= set(ranks)
        return moment

    def kill_seed(self) -> None:
        self.seed.process.kill()
        self.seed.process.wait(EVENT_TIMEOUT)

    def stop(self, rank: int) -> None:
        self.ranks[rank].process.send_signal(signal.SIGSTOP)

    def go_on(self, rank: int) -> None:
        self.ranks[rank].process.send_signal(signal.SIGCONT)

    def order(self, rank: int, verb: str, *arguments: object) -> None:
        """See Life.do_…"""
        draft = self.folder / f"draft-{rank}"
        draft.write_text(json.dumps([verb, *arguments]))
        draft.rename(self.folder / f"order-{rank}")

    # -- what they wrote ---------------------------------------------------------------------------------------

    def reported(self, rank: int, what: str = "", /, **facts: object) -> list[Line]:
        """What a rank wrote, so far: lines of this kind, in which these facts stand."""
        facts = {"what": what, **facts} if what else facts
        lines = read_diary(self.folder, rank)
        return [line for line in lines if all(line.get(name) == value for name, value in facts.items())]

    def await_all(
        self, ranks: Iterable[int], true: Callable[[int], bool], what: str, patience: float = EVENT_TIMEOUT
    ) -> None:
        """Wait until something is true of each of these ranks."""
        deadline = time.monotonic() + patience
        for rank in ranks:
            while not true(rank):
                running = self.ranks[rank].process.poll() is None
                assert running or true(rank), f"no {what} of rank {rank}, which has ended\n{self.describe()}"
                assert time.monotonic() < deadline, f"no {what} of rank {rank} in {patience} s\n{self.describe()}"
                time.sleep(0.005)

    def describe(self) -> str:
        """All that is known, for who has to find out why something did not happen."""
        lines = []
        for rank, launch in enumerate(self.ranks):
            if launch.process.poll() is not None and not launch.process.stderr.closed:  # type: ignore[union-attr]
                launch.end()
            lines += [f"  {rank}: {line}" for line in launch.stderr.splitlines()[-40:]]
            for _, same in itertools.groupby(self.reported(rank), lambda line: (line["what"], line.get("error"))):
                first, *more = same
                lines.append(f"  {rank}: {json.dumps(first)[:600]}" + f" and {len(more)} like that" * bool(more))
        return "\n".join(lines)

    # -- how it ends ---------------------------------------------------------------------------------------------

    def await_sum(self, ranks: Sequence[int], patience: float = EVENT_TIMEOUT) -> float:
        """Wait until these, and only these, sum together; since when the last of them does. Their ranks are dense."""
        ranks = sorted(ranks)
        self.await_all(ranks, lambda rank: bool(self.reported(rank, "right", ranks=ranks)), f"sum of {ranks}", patience)
        first = [self.reported(rank, "right", ranks=ranks)[0] for rank in ranks]
        assert [line["rank"] for line in first] == list(range(len(ranks)))
        assert {line["size"] for line in first} == {len(ranks)}
        assert len({line["epoch"] for line in first}) == 1
        return max(float(line["at"]) for line in first)

    def await_error(self, rank: int, error: str, patience: float = EVENT_TIMEOUT) -> Line:
        """Wait until this rank's call raises it."""
        self.await_all([rank], lambda each: bool(self.reported(each, "raised", error=error)), error, patience)
        return self.reported(rank, "raised", error=error)[0]

    def await_more(self, ranks: Sequence[int], rounds: int = 20) -> None:
        """Wait until these have summed so many times more than now."""
        before = {rank: self.rounds(rank) for rank in ranks}
        self.await_all(ranks, lambda rank: self.rounds(rank) >= before[rank] + rounds, "further sums")

    def rounds(self, rank: int) -> int:
        """How many calls of it have succeeded."""
        return max((line.get("rounds", 0) for line in self.reported(rank)), default=0)

    def finish(self, ranks: Iterable[int] | None = None) -> None:
        """All that run stop and end well, and the story was right. Of those that are `ranks`; None: not killed."""
        (self.folder / "stop").touch()
        for rank in set(range(self.size)) - self.killed if ranks is None else ranks:
            assert self.ranks[rank].end() == 0, self.ranks[rank].stderr + self.describe()
        self.check()

    def check(self) -> None:
        """No sum was ever wrong, and no epoch had two memberships."""
        known: dict[int, str] = {}
        for rank in range(self.size):
            assert not self.reported(rank, "wrong"), self.reported(rank, "wrong")
            for line in self.reported(rank, "adopted"):
                assert known.setdefault(line["epoch"], line["membership"]) == line["membership"], self.describe()


def read_diary(folder: Path, rank: int) -> list[Line]:
    """What a rank wrote, so far."""
    path = folder / f"diary-{rank}"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def await_diaries(folder: Path, size: int, what: str) -> dict[int, list[Line]]:
    """Wait until each rank has written a line of this kind; all that they wrote."""
    deadline = time.monotonic() + EVENT_TIMEOUT
    while True:
        diaries = {rank: read_diary(folder, rank) for rank in range(size)}
        if all(any(line["what"] == what for line in lines) for lines in diaries.values()):
            return diaries
        assert time.monotonic() < deadline, diaries
        time.sleep(0.01)


def variable(name: str) -> str:
    """How a setting is called in the environment."""
    return f"NEXAR_{name.upper()}" + ("_SECS" if name.endswith(("_timeout", "_interval")) else "")


def causes(line: Mapping[str, Any]) -> dict[int, str]:
    """Why ranks are lost, by the numbers they had; of a line "changed"."""
    return {int(rank): cause for rank, cause in line["lost"].items()}
