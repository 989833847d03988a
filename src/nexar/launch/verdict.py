"""How a run ended: one exit code for all ranks, who failed first, who was lost. Pure."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from nexar.types import Rank


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of one rank. `stopped`: it came after we had told the ranks to stop, so it says nothing of its own."""

    rank: Rank
    code: int
    """Its exit code; negative: the signal that ended it."""
    stopped: bool = False
    blames_another: bool = False
    """It failed because another rank was gone."""
    name: str = ""
    """What people know it by; empty: its rank says it."""
    replaced: bool = False
    """Another was started in its place, and its end is what counts."""
    came_too_late: bool = False
    """It was started in the place of another, and nobody was left who could have let it in."""

    @property
    def who(self) -> str:
        """For messages."""
        return self.name or f"rank {self.rank}"

    def __str__(self) -> str:
        """In words, as the cause of a death."""
        return f"was killed by {signal_name(-self.code)}" if self.code < 0 else f"ended with exit code {self.code}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the launcher says and returns."""

    exit_code: int
    failed: Ending | None = None
    """The first rank that ended with a code of its own other than 0, and does not blame another for it. A rank that
    raises leaves the cluster before its process ends, so those that miss it may be seen to end earlier."""
    lost: tuple[Ending, ...] = ()
    """Ranks that a signal of somebody else ended, or that came too late to take the place of one."""


def judge(endings: Sequence[Ending], *, interrupted: int | None = None, aborted: bool = False) -> Verdict:
    """The verdict on all ranks, in the order of their ends.

    A rank that failed by itself decides. Ranks that were killed count as lost: the others may well have gone on without
    them, so the run is good if one of those ended well. Of a rank that was started again the last end counts.
    `interrupted`: the signal that stopped this launcher;
    `aborted`: a loss made it stop the others, so nobody went on.
    """
    own = [ending for ending in endings if not ending.stopped and not ending.replaced]
    lost = tuple(ending for ending in own if ending.code < 0 or ending.came_too_late)
    failures = [ending for ending in own if ending.code > 0 and not ending.came_too_late]
    failed = next((ending for ending in failures if not ending.blames_another), failures[0] if failures else None)
    if failed is not None:
        return Verdict(failed.code, failed, lost)
    if interrupted is not None:
        return Verdict(128 + interrupted, None, lost)
    if lost and (aborted or not any(ending.code == 0 for ending in own)):
        return Verdict(lost[0].code if lost[0].code > 0 else 128 - lost[0].code, None, lost)
    return Verdict(0, None, lost)


def signal_name(number: int) -> str:
    """`SIGKILL`; real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
