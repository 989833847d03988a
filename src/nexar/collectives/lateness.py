"""Who keeps the others waiting. Collectives make all ranks equally slow, so durations cannot show it; arrivals can.

Pure. An arrival is the moment in which a rank was first heard of in a call, on this rank's clock; so it includes the
way of that message, and where a schedule lets a rank speak only after it has heard others, their lateness too. Over
many calls what is left is the rank that really comes last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from nexar.types import Rank


class Straggler(NamedTuple):
    """How late one rank came, compared with the first of each call. Seconds."""

    rank: Rank
    mean_lateness: float
    worst: float
    times_last: int
    share: float
    """Of the lateness of all ranks together: 1 if nobody else was ever late."""


class _Sum:
    """Of one rank."""

    __slots__ = ("calls", "last", "seconds", "worst")

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0
        self.worst = 0.0
        self.last = 0


class Lateness:
    """Sums over all calls so far. One thread at a time."""

    def __init__(self) -> None:
        self._sums: dict[Rank, _Sum] = {}

    def saw(self, arrivals: Mapping[Rank, float]) -> None:
        """One call: when each rank came that is known of."""
        if len(arrivals) < 2:
            return
        first, last = min(arrivals.values()), max(arrivals.values())
        for rank, when in arrivals.items():
            found = self._sums.get(rank)
            if found is None:
                found = self._sums[rank] = _Sum()
            late = when - first
            found.calls += 1
            found.seconds += late
            found.worst = max(found.worst, late)
            if when == last:
                found.last += 1

    def stragglers(self) -> list[Straggler]:
        """Every rank that was seen, the one that cost most first."""
        total = sum(each.seconds for each in self._sums.values()) or 1.0
        ranks = [
            Straggler(rank, each.seconds / each.calls, each.worst, each.last, each.seconds / total)
            for rank, each in self._sums.items()
        ]
        return sorted(ranks, key=lambda each: (-each.share, each.rank))
