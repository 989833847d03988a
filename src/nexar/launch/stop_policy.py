"""How ranks are made to stop: asked, asked again, killed. Pure: time comes in.

What a launcher does about ranks that fail, where the first failure stops the run. Pure: time comes in.

The rank that failed by itself is the culprit. It is reported at once. A rank that failed because another one was gone
is reported only if no culprit is known after HOLD seconds: a process that raised may end later than those that miss it.
The remaining ranks have GRACE seconds from the first failure on, of either kind, to end by themselves.

On several hosts the seed chooses the culprit, and all launchers take its exit code.
"""

import signal
from dataclasses import dataclass
from typing import Final, TypeAlias

from nexar.types import Rank

GRACE = 5.0
"""Seconds a rank has to clean up after the first request."""

SHORT_GRACE = 1.0
"""Seconds after the second: whoever presses Ctrl-C twice means it."""


class Escalation:
    """One stop. Nothing happens before the first `ask`; after the last step nothing is due any more."""

    def __init__(self, grace: float = GRACE, short_grace: float = SHORT_GRACE) -> None:
        self._grace, self._short_grace = grace, short_grace
        self._kill_at: float | None = None
        self.asked = False

    def ask(self, number: int, now: float) -> int:
        """Somebody wants the ranks to stop, by this signal. The signal to send them now."""
        if not self.asked:
            self.asked, self._kill_at = True, now + self._grace
            return number
        if self._kill_at is not None:
            self._kill_at = min(self._kill_at, now + self._short_grace)
        return signal.SIGTERM

    def due(self, now: float) -> float | None:
        """Seconds until the next step; None: none is coming."""
        return None if self._kill_at is None else max(0.0, self._kill_at - now)

    def tick(self, now: float) -> int | None:
        """The signal that is due by now."""
        if self._kill_at is None or now < self._kill_at:
            return None
        self._kill_at = None
        return signal.SIGKILL


HOLD: Final = 4.0
"""Seconds that a failure waits to be reported which another one has caused, and that a launcher waits for the seed."""


@dataclass(frozen=True, slots=True)
class RankFailure:
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
class ReportFailure:
    """Tell the user of this failure, now."""

    failure: RankFailure


@dataclass(frozen=True, slots=True)
class StopRanks:
    """Make the remaining ranks of this host stop."""


StopAction: TypeAlias = ReportFailure | StopRanks


class StopPolicy:
    """One run. `alone`: all ranks are on this host, and there is nobody to agree with."""

    def __init__(self, *, alone: bool, grace: float = GRACE, hold: float = HOLD) -> None:
        self._alone, self._grace, self._hold = alone, grace, hold
        self._local: list[RankFailure] = []
        self._chosen: RankFailure | None = None  # by the seed
        self._reported: RankFailure | None = None
        self._report_at: float | None = None  # a consequence, and until then the seed is waited for
        self._stop_at: float | None = None
        self._began = False

    @property
    def culprit(self) -> RankFailure | None:
        """The failure whose exit code counts, as far as is known."""
        own = next((each for each in self._local if not each.consequence), None)
        if self._chosen is not None and (own is None or not self._chosen.consequence):
            return self._chosen
        return own or next(iter(self._local), None)

    def failed(self, failure: RankFailure, now: float) -> list[StopAction]:
        """A rank of this host failed."""
        self._local.append(failure)
        return self._begin(now)

    def chosen(self, failure: RankFailure, now: float) -> list[StopAction]:
        """The seed says which failure stops the run. It may choose again."""
        own = (each for each in self._local if each.rank == failure.rank and each.code == failure.code)
        self._chosen = next(own, failure)
        return self._begin(now)

    def _begin(self, now: float) -> list[StopAction]:
        if not self._began:
            self._began, self._stop_at, self._report_at = True, now + self._grace, now + self._hold
        return self._report(now)

    def tick(self, now: float) -> list[StopAction]:
        """Time has passed: at the latest when `due` said."""
        actions = self._report(now)
        if self._report_at is not None and now >= self._report_at:
            self._report_at = None
        if self._stop_at is not None and now >= self._stop_at:
            self._stop_at = None
            actions.append(StopRanks())
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

    def finish(self) -> list[StopAction]:
        """Every rank has ended and nothing more is waited for: report what was held back."""
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
