"""How a run ended: one exit code for all ranks, who failed first, who was lost. Pure.

What a launcher writes to standard error about ranks that failed.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from nexar.launch.output import Console
from nexar.launch.stop_policy import RankFailure
from nexar.types import Rank


@dataclass(frozen=True, slots=True)
class RankExit:
    """The end of one rank. `stopped`: it came after we had told the ranks to stop, so it says nothing of its own."""

    rank: Rank
    code: int
    """Its exit code; negative: the signal that ended it."""
    stopped: bool = False
    blames_another: bool = False
    """It failed because another rank was gone."""
    interrupted: bool = False
    """It ended by a KeyboardInterrupt, or by SIGINT, as Python does then."""
    name: str = ""
    """What people know it by; empty: its rank says it."""
    replaced: bool = False
    """Another was started in its place, and its end is what counts."""
    given_up: bool = False
    """It would have been started again, but all restarts were used up."""
    came_too_late: bool = False
    """It was started in the place of another, and nobody was left who could have let it in."""

    @property
    def who(self) -> str:
        """For messages."""
        return self.name or f"rank {self.rank}"

    @property
    def exit_code(self) -> int:
        """That of a shell for such an end: 128 + the signal that killed it."""
        return self.code if self.code >= 0 else 128 - self.code

    def __str__(self) -> str:
        """In words, as the cause of a death."""
        return f"was killed by {signal_name(-self.code)}" if self.code < 0 else f"ended with exit code {self.code}"


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """What the launcher says and returns."""

    exit_code: int
    failed: RankExit | None = None
    """The rank that made the run fail: the first that does not blame another. A rank that raises leaves the cluster
    before its process ends, so those that miss it may be seen to end earlier."""
    lost: tuple[RankExit, ...] = ()
    """Ranks without which the others went on."""


def judge_run(endings: Sequence[RankExit], *, interrupted: int | None = None) -> LaunchResult:
    """The verdict on a run whose ranks go on without those that fail. `endings` are in the order of the ends.

    A rank that raised, ended with an exit code other than 0, or was killed, is lost. The run is good if a rank ended
    well, and none failed because it missed another, and none was started again as often as allowed. Of a rank that was
    started again the last end counts. `interrupted`: the signal that stopped this launcher.
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
    """The rank to blame if survivors did not end well; None: they did. One that was killed may be lost for good, but is
    to blame where another rank missed it.
    """
    if any(ending.blames_another for ending in failures):
        return next((ending for ending in failures if not ending.blames_another), failures[0])
    return next((ending for ending in failures if ending.given_up), None)


def signal_name(number: int) -> str:
    """`SIGKILL`; real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class FailureReport:
    """One run. The culprit is written with its traceback, ranks that failed because of it in one line each."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._texts: dict[str, str] = {}  # tracebacks that nobody has seen yet, by rank
        self._exceptions: dict[str, str] = {}  # names of their classes, by rank
        self._folded: dict[str, str] = {}  # lines that follow the report of the culprit, by rank
        self._culprit: RankFailure | None = None

    def keep(self, failure: RankFailure, text: str, exception: str) -> None:
        """A rank failed. `text`: its traceback, if it was not shown; `exception`: the name of its class."""
        self._texts[failure.who], self._exceptions[failure.who] = text, exception
        if failure.consequence and text:
            self._folded[failure.who] = f"{failure.who} {failure.cause}: {exception}"
        self._write_folded()

    def report(self, failure: RankFailure) -> None:
        """This is the culprit, as far as is known."""
        self._culprit = failure
        self._folded.pop(failure.who, None)
        text = self._texts.pop(failure.who, "").rstrip()
        where = f" on {failure.host}" if failure.host else ""
        self.say(f"{failure.who}{where} {failure.cause}, the first to fail" + (f":\n{text}" if text else ""))
        self._write_folded()

    def _write_folded(self) -> None:
        if self._culprit is None:
            return
        culprit = self._culprit.who
        for who, words in self._folded.items():
            same = self._exceptions[who] == self._exceptions.get(culprit)
            self.say(f"{words}, as on {culprit}" if same else f"{words}, because {culprit} failed")
        self._folded.clear()

    def stopping(self, names: Sequence[str], seconds: float) -> None:
        """These ranks did not end by themselves."""
        self.say(f"stopping {', '.join(names)}: not ended {seconds:g} s after the failure")

    def interrupted(self, signal_name: str, seconds: float) -> None:
        """The launcher was asked to stop."""
        self.say(f"{signal_name}: stopping all ranks; they have {seconds:g} s to end")

    def say(self, words: str) -> None:
        """A line of the launcher itself."""
        self._console.write("stderr", f"nexar: {words}\n".encode())
