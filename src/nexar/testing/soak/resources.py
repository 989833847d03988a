"""What a process holds, and whether it holds more and more.

Who holds more and more: the seed, and one member after the other that is not killed for a while.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from nexar.testing.soak.census import Census

_PROC: Final = Path("/proc")
_PAGE_MB: Final = 4096 / 1e6
_FEWEST: Final = 6  # samples, to say anything


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """Of one process at one moment; or a difference of two."""

    descriptors: float
    threads: float
    megabytes: float

    def less(self, other: ResourceUsage) -> ResourceUsage:
        """The difference."""
        return ResourceUsage(
            self.descriptors - other.descriptors, self.threads - other.threads, self.megabytes - other.megabytes
        )

    def __str__(self) -> str:
        return f"{self.descriptors:g} descriptors, {self.threads:g} threads, {self.megabytes:.1f} MB"


LIMITS: Final = ResourceUsage(descriptors=12, threads=6, megabytes=64)
"""What a process may hold more than in the beginning: worlds differ in size, and memory is kept for reuse."""


def usage_of(pid: int) -> ResourceUsage | None:
    """What it holds now; None: it has ended."""
    folder = _PROC / str(pid)
    try:
        descriptors = len(list((folder / "fd").iterdir()))
        threads = len(list((folder / "task").iterdir()))
        resident = int((folder / "statm").read_text().split()[1])
    except (OSError, IndexError):
        return None
    return ResourceUsage(descriptors, threads, resident * _PAGE_MB)


def middle(samples: list[ResourceUsage]) -> ResourceUsage:
    """The median of each figure."""
    return ResourceUsage(
        median(each.descriptors for each in samples),
        median(each.threads for each in samples),
        median(each.megabytes for each in samples),
    )


class UsageHistory:
    """Of one process, over its life. What it holds is compared with what is usual at that moment, because that grows
    and shrinks with the world.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._excess: list[ResourceUsage] = []

    def add(self, held: ResourceUsage, usual: ResourceUsage) -> None:
        """One more sample."""
        self._excess.append(held.less(usual))

    @property
    def growth(self) -> ResourceUsage:
        """How much more it holds in the last third of its life than in the first."""
        third = max(1, len(self._excess) // 3)
        if len(self._excess) < _FEWEST:
            return ResourceUsage(0, 0, 0)
        return middle(self._excess[-third:]).less(middle(self._excess[:third]))

    def leaks(self, limits: ResourceUsage = LIMITS) -> list[str]:
        """What grew too much, in words."""
        grown = self.growth
        found = {
            "descriptors": (grown.descriptors, limits.descriptors),
            "threads": (grown.threads, limits.threads),
            "MB": (grown.megabytes, limits.megabytes),
        }
        return [
            f"{self.name} leaks: {more:g} {what} more, over {len(self._excess)} samples"
            for what, (more, limit) in found.items()
            if more > limit
        ]


_SAMPLE_SECONDS: Final = 2.0
_PROTECTED_SECONDS: Final = 150.0
_UNPROTECTED_SECONDS: Final = 30.0
"""Between two that are protected: the oldest member has the lowest rank, and that has to die, too."""
_YOUTH: Final = 5.0  # seconds until a process holds what it is going to


class ResourceWatch:
    """Of one soak."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._sampled_at = 0.0
        self._turn_at = 0.0
        self.protected: str | None = None
        """Who is not to be killed at the moment."""
        self._seed = UsageHistory("the seed")
        self._accounts: dict[str, UsageHistory] = {}

    @property
    def age(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    def look(self, now: float, census: Census, seed: int, pids: dict[str, int]) -> None:
        """Take a sample, if it is time. `seed` and `pids` are process ids."""
        if now < self._sampled_at + _SAMPLE_SECONDS or not census.epoch:
            return
        self._sampled_at = now
        self._take_turns(now, census)
        members = [name for name in census.members if now > census.lives[name].started_at + _YOUTH]
        held = {name: found for name in members if (found := usage_of(pids[name])) is not None}
        lines = usage_of(seed)
        if lines is not None:
            self._seed.add(lines, ResourceUsage(len(census.alive), 0, 0))
        others = [found for name, found in held.items() if name != self.protected]
        if self.protected in held and others:
            account = self._accounts.setdefault(self.protected, UsageHistory(self.protected))
            account.add(held[self.protected], middle(others))

    def _take_turns(self, now: float, census: Census) -> None:
        """Somebody is protected for a while, then nobody."""
        if now < self._turn_at:
            return
        chosen = None if self.protected is not None or not census.members else census.members[-1]
        self.protected = chosen
        self._turn_at = now + (_PROTECTED_SECONDS if chosen is not None else _UNPROTECTED_SECONDS)

    def leaks(self) -> list[str]:
        """Of all that were looked at, in words."""
        return [leak for account in (self._seed, *self._accounts.values()) for leak in account.leaks()]

    def summary(self) -> str:
        """How much more each of them held in the end."""
        return "\n".join(f"{each.name}: {each.growth} more" for each in (self._seed, *self._accounts.values()))
