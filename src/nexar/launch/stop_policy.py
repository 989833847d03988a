"""What a launcher does about ranks that fail, where the first failure stops the run. Pure: time comes in.

The rank that failed by itself is the culprit. It is reported at once. A rank that failed because another one was gone
is reported only if no culprit is known after HOLD seconds: a process that raised may end later than those that miss it.
The remaining ranks have GRACE seconds from the first failure on, of either kind, to end by themselves.

On several hosts the seed chooses the culprit, and all launchers take its exit code.
"""

from dataclasses import dataclass
from typing import Final, TypeAlias

from nexar.launch.escalation import GRACE
from nexar.types import Rank

HOLD: Final = 4.0
"""Seconds that a failure waits to be reported which another one has caused, and that a launcher waits for the seed."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank that raised, ended with an exit code other than 0, or was killed."""

    rank: Rank | None
    who: str
    cause: str
    """How it ended: `was killed by SIGKILL`."""
    code: int
    """Exit code of the run, if this is the culprit."""
    consequence: bool = False
    """It failed because another rank was gone."""
    host: str = ""
    """Where, if on another host."""


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the user of this failure, now."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Stop:
    """Make the remaining ranks of this host stop."""


Action: TypeAlias = Report | Stop


class StopPolicy:
    """One run. `alone`: all ranks are on this host, and there is nobody to agree with."""

    def __init__(self, *, alone: bool, grace: float = GRACE, hold: float = HOLD) -> None:
        self._alone, self._grace, self._hold = alone, grace, hold
        self._local: list[Failure] = []
        self._chosen: Failure | None = None  # by the seed
        self._reported: Failure | None = None
        self._report_at: float | None = None  # a consequence, and until then the seed is waited for
        self._stop_at: float | None = None
        self._began = False

    @property
    def culprit(self) -> Failure | None:
        """The failure whose exit code counts, as far as is known."""
        own = next((each for each in self._local if not each.consequence), None)
        if self._chosen is not None and (own is None or not self._chosen.consequence):
            return self._chosen
        return own or next(iter(self._local), None)

    def failed(self, failure: Failure, now: float) -> list[Action]:
        """A rank of this host failed."""
        self._local.append(failure)
        return self._begin(now)

    def chosen(self, failure: Failure, now: float) -> list[Action]:
        """The seed says which failure stops the run. It may choose again."""
        own = (each for each in self._local if each.rank == failure.rank and each.code == failure.code)
        self._chosen = next(own, failure)
        return self._begin(now)

    def _begin(self, now: float) -> list[Action]:
        if not self._began:
            self._began, self._stop_at, self._report_at = True, now + self._grace, now + self._hold
        return self._report(now)

    def tick(self, now: float) -> list[Action]:
        """Time has passed: at the latest when `due` said."""
        actions = self._report(now)
        if self._report_at is not None and now >= self._report_at:
            self._report_at = None
        if self._stop_at is not None and now >= self._stop_at:
            self._stop_at = None
            actions.append(Stop())
        return actions

    def due(self, now: float) -> float | None:
        """Seconds until the next tick is needed; None: none is."""
        times = [each for each in (self._report_at, self._stop_at) if each is not None]
        return max(0.0, min(times) - now) if times else None

    def is_settled(self, now: float) -> bool:
        """Whether the exit code is known, when every rank of this host has ended."""
        if not self._began or self._alone or self._report_at is None or now >= self._report_at:
            return True
        return self._chosen is not None and not self._chosen.consequence

    def finish(self) -> list[Action]:
        """Every rank has ended and nothing more is waited for: report what was held back."""
        culprit = self.culprit
        return [] if culprit is None or culprit == self._reported else self._now(culprit)

    def _report(self, now: float) -> list[Action]:
        culprit = self.culprit
        if culprit is None or culprit == self._reported:
            return []
        held = culprit.consequence and self._report_at is not None and now < self._report_at
        return [] if held else self._now(culprit)

    def _now(self, failure: Failure) -> list[Action]:
        self._reported = failure
        return [Report(failure)]
