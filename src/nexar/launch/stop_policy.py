"""Decides what a launcher does when the first failure stops the run. Pure: the caller passes the time.

A rank that failed by itself is the culprit, reported at once. One that failed because another was gone is reported
only if no culprit is known after HOLD seconds: a process that raised may end later than those that miss it. The
remaining ranks have GRACE seconds to end. On several hosts the seed chooses the culprit, and all launchers exit with
its code.
"""

import signal
from dataclasses import dataclass
from typing import Final, TypeAlias

from nexar.types import Rank

GRACE = 5.0
"""Seconds a rank has to clean up after the first request."""

SHORT_GRACE = 1.0
"""Seconds after the second: a second Ctrl-C is urgent."""


class Escalation:
    """The signals of one stop."""

    def __init__(self, grace: float = GRACE, short_grace: float = SHORT_GRACE) -> None:
        self._grace, self._short_grace = grace, short_grace
        self._kill_at: float | None = None
        self.asked = False

    def ask(self, number: int, now: float) -> int:
        """The signal to send now."""
        if not self.asked:
            self.asked, self._kill_at = True, now + self._grace
            return number
        if self._kill_at is not None:
            self._kill_at = min(self._kill_at, now + self._short_grace)
        return signal.SIGTERM

    def due(self, now: float) -> float | None:
        return None if self._kill_at is None else max(0.0, self._kill_at - now)

    def tick(self, now: float) -> int | None:
        if self._kill_at is None or now < self._kill_at:
            return None
        self._kill_at = None
        return signal.SIGKILL


HOLD: Final = 4.0
"""Seconds that the report of a consequence is held, and that a launcher waits for the seed."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """It raised, exited with a code other than 0, or was killed."""

    rank: Rank | None
    who: str
    cause: str
    """How it ended: `was killed by SIGKILL`."""
    code: int
    """Exit code of the run, if this is the culprit."""
    consequence: bool = False
    """It failed because another rank was gone."""
    host: str = ""
    """Set if on another host."""


@dataclass(frozen=True, slots=True)
class ReportFailure:
    """Report this failure to the user."""

    failure: RankFailure


@dataclass(frozen=True, slots=True)
class StopRanks:
    """Stop the remaining ranks of this host."""


StopAction: TypeAlias = ReportFailure | StopRanks


class StopPolicy:
    """`alone`: all ranks are on this host."""

    def __init__(self, *, alone: bool, grace: float = GRACE, hold: float = HOLD) -> None:
        self._alone, self._grace, self._hold = alone, grace, hold
        self._local: list[RankFailure] = []
        self._chosen: RankFailure | None = None  # by the seed
        self._reported: RankFailure | None = None
        self._report_at: float | None = None  # until then a consequence is held and the seed's choice is awaited
        self._stop_at: float | None = None
        self._began = False

    @property
    def culprit(self) -> RankFailure | None:
        own = next((each for each in self._local if not each.consequence), None)
        if self._chosen is not None and (own is None or not self._chosen.consequence):
            return self._chosen
        return own or next(iter(self._local), None)

    def failed(self, failure: RankFailure, now: float) -> list[StopAction]:
        self._local.append(failure)
        return self._begin(now)

    def chosen(self, failure: RankFailure, now: float) -> list[StopAction]:
        """By the seed, which may choose again."""
        own = (each for each in self._local if each.rank == failure.rank and each.code == failure.code)
        self._chosen = next(own, failure)
        return self._begin(now)

    def _begin(self, now: float) -> list[StopAction]:
        if not self._began:
            self._began, self._stop_at, self._report_at = True, now + self._grace, now + self._hold
        return self._report(now)

    def tick(self, now: float) -> list[StopAction]:
        actions = self._report(now)
        if self._report_at is not None and now >= self._report_at:
            self._report_at = None
        if self._stop_at is not None and now >= self._stop_at:
            self._stop_at = None
            actions.append(StopRanks())
        return actions

    def due(self, now: float) -> float | None:
        """Seconds until `tick` is needed."""
        times = [each for each in (self._report_at, self._stop_at) if each is not None]
        return max(0.0, min(times) - now) if times else None

    def is_settled(self, now: float) -> bool:
        if not self._began or self._alone or self._report_at is None or now >= self._report_at:
            return True
        return self._chosen is not None and not self._chosen.consequence

    def finish(self) -> list[StopAction]:
        """Call when every rank has ended."""
        culprit = self.culprit
        return [] if culprit is None or culprit == self._reported else self._now(culprit)

    def _report(self, now: float) -> list[StopAction]:
        culprit = self.culprit
        if culprit is None or culprit == self._reported:
            return []
        held = culprit.consequence and self._report_at is not None and now < self._report_at
        return [] if held else self._now(culprit)

    def _now(self, failure: RankFailure) -> list[StopAction]:
        self._reported = failure
        return [ReportFailure(failure)]
