"""The result of a run: exit code, first failure, lost ranks."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from nexar.launch.output import Console
from nexar.launch.stop_policy import RankFailure
from nexar.types import Rank


@dataclass(frozen=True, slots=True)
class RankExit:
    """`stopped`: after the launcher stopped the ranks."""

    rank: Rank
    code: int
    """Exit code; negative: the signal that ended it."""
    stopped: bool = False
    blames_another: bool = False
    """It failed because another rank was gone."""
    interrupted: bool = False
    """A KeyboardInterrupt or SIGINT ended it."""
    name: str = ""
    """For messages; empty: its rank."""
    replaced: bool = False
    """A replacement was started, whose end counts instead."""
    given_up: bool = False
    """It was not restarted because all restarts were used up."""
    came_too_late: bool = False
    """It was a replacement, and no member was left to admit it."""

    @property
    def who(self) -> str:
        return self.name or f"rank {self.rank}"

    @property
    def exit_code(self) -> int:
        """As a shell gives it: 128 + signal."""
        return self.code if self.code >= 0 else 128 - self.code

    def __str__(self) -> str:
        return f"was killed by {signal_name(-self.code)}" if self.code < 0 else f"ended with exit code {self.code}"


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """The launcher's report and exit code."""

    exit_code: int
    failed: RankExit | None = None
    """The rank that made the run fail: the first that does not blame another. A rank that raises leaves the cluster
    before its process ends, so the ranks that miss it may end earlier.
    """
    lost: tuple[RankExit, ...] = ()
    """Ranks that failed while the others continued."""


def run_result(endings: Sequence[RankExit], *, interrupted: int | None = None) -> LaunchResult:
    """For a run that continues without ranks that fail. `endings` are in order of time; of a restarted rank the last
    counts.

    Success: a rank ended well, none failed because it missed another, and none used up its restarts.
    """
    own = [ending for ending in endings if not ending.stopped and not ending.replaced]
    bad = [ending for ending in own if ending.code != 0]
    failed = _failed([ending for ending in bad if not ending.came_too_late])
    lost = tuple(ending for ending in bad if ending is not failed and not ending.blames_another)
    if failed is not None:
        return LaunchResult(failed.exit_code, failed, lost)
    if interrupted is not None:
        return LaunchResult(128 + interrupted, None, lost)
    if lost and len(bad) == len(own):
        return LaunchResult(lost[0].exit_code, None, lost)
    return LaunchResult(0, None, lost)


def _failed(failures: Sequence[RankExit]) -> RankExit | None:
    """A killed rank is to blame only if another missed it."""
    if any(ending.blames_another for ending in failures):
        return next((ending for ending in failures if not ending.blames_another), failures[0])
    return next((ending for ending in failures if ending.given_up), None)


def signal_name(number: int) -> str:
    """Real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class FailureReport:
    """Writes the culprit with its traceback, and a line for each rank that failed because of it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._texts: dict[str, str] = {}  # tracebacks that were not shown yet, by rank
        self._exceptions: dict[str, str] = {}  # class names of their exceptions, by rank
        self._deferred: dict[str, str] = {}  # lines to write after the report of the culprit, by rank
        self._culprit: RankFailure | None = None

    def keep(self, failure: RankFailure, text: str, exception: str) -> None:
        """`text`: its traceback, if not yet shown; `exception`: its class."""
        self._texts[failure.who], self._exceptions[failure.who] = text, exception
        if failure.consequence and text:
            self._deferred[failure.who] = f"{failure.who} {failure.cause}: {exception}"
        self._write_deferred()

    def report(self, failure: RankFailure) -> None:
        self._culprit = failure
        self._deferred.pop(failure.who, None)
        text = self._texts.pop(failure.who, "").rstrip()
        where = f" on {failure.host}" if failure.host else ""
        self.write_line(f"{failure.who}{where} {failure.cause}, the first to fail" + (f":\n{text}" if text else ""))
        self._write_deferred()

    def _write_deferred(self) -> None:
        if self._culprit is None:
            return
        culprit = self._culprit.who
        for who, summary in self._deferred.items():
            same = self._exceptions[who] == self._exceptions.get(culprit)
            self.write_line(f"{summary}, as on {culprit}" if same else f"{summary}, because {culprit} failed")
        self._deferred.clear()

    def stopping(self, names: Sequence[str], seconds: float) -> None:
        self.write_line(f"stopping {', '.join(names)}: not ended {seconds:g} s after the failure")

    def interrupted(self, signal_name: str, seconds: float) -> None:
        self.write_line(f"{signal_name}: stopping all ranks; they have {seconds:g} s to end")

    def write_line(self, summary: str) -> None:
        self._console.write("stderr", f"nexar: {summary}\n".encode())
