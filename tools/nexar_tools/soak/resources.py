"""Resource usage of the seed and of one protected member at a time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from nexar_tools.soak.census import Census

_PROC: Final = Path("/proc")
_PAGE_MB: Final = 4096 / 1e6
_MIN_SAMPLES: Final = 6  # samples needed for a statement


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """Usage at one moment, or a difference of two."""

    descriptors: float
    threads: float
    megabytes: float

    def less(self, other: ResourceUsage) -> ResourceUsage:
        return ResourceUsage(
            self.descriptors - other.descriptors, self.threads - other.threads, self.megabytes - other.megabytes
        )

    def __str__(self) -> str:
        return f"{self.descriptors:g} descriptors, {self.threads:g} threads, {self.megabytes:.1f} MB"


LIMITS: Final = ResourceUsage(descriptors=12, threads=6, megabytes=64)
"""Allowed growth: memberships differ in size, and memory is kept for reuse."""


def usage_of(pid: int) -> ResourceUsage | None:
    """The usage of a process; None if it has ended."""
    folder = _PROC / str(pid)
    try:
        descriptors = len(list((folder / "fd").iterdir()))
        threads = len(list((folder / "task").iterdir()))
        resident = int((folder / "statm").read_text().split()[1])
    except (OSError, IndexError):
        return None
    return ResourceUsage(descriptors, threads, resident * _PAGE_MB)


def medians(samples: list[ResourceUsage]) -> ResourceUsage:
    """The median of each figure."""
    return ResourceUsage(
        median(each.descriptors for each in samples),
        median(each.threads for each in samples),
        median(each.megabytes for each in samples),
    )


class UsageHistory:
    """Usage of one process, relative to the usual value, which varies with the membership."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._excess: list[ResourceUsage] = []

    def add(self, held: ResourceUsage, usual: ResourceUsage) -> None:
        self._excess.append(held.less(usual))

    @property
    def growth(self) -> ResourceUsage:
        """Growth from the first to the last third of its life."""
        third = max(1, len(self._excess) // 3)
        if len(self._excess) < _MIN_SAMPLES:
            return ResourceUsage(0, 0, 0)
        return medians(self._excess[-third:]).less(medians(self._excess[:third]))

    def leaks(self, limits: ResourceUsage = LIMITS) -> list[str]:
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
_UNPROTECTED_SECONDS: Final = 30.0  # the oldest member has the lowest rank, which must be killed too
_SETTLING_SECONDS: Final = 5.0  # seconds until a process has reached its normal usage


class ResourceWatch:
    """Samples the processes of one soak."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._sampled_at = 0.0
        self._turn_at = 0.0
        self.protected: str | None = None
        """This member must not be killed now."""
        self._seed = UsageHistory("the seed")
        self._histories: dict[str, UsageHistory] = {}
        # The first and the last sample: of the seed, and of the members that had settled.
        self._ends: list[tuple[ResourceUsage, list[ResourceUsage]]] = []

    @property
    def age(self) -> float:
        return time.monotonic() - self._began

    def sample(self, now: float, census: Census, seed: int, pids: dict[str, int]) -> None:
        """Takes a sample if one is due. `seed` and `pids` are process ids."""
        if now < self._sampled_at + _SAMPLE_SECONDS or not census.epoch:
            return
        self._sampled_at = now
        self._rotate_protection(now, census)
        members = [name for name in census.members if now > census.lives[name].started_at + _SETTLING_SECONDS]
        held = {name: found for name in members if (found := usage_of(pids[name])) is not None}
        seed_usage = usage_of(seed)
        if seed_usage is not None:
            self._seed.add(seed_usage, ResourceUsage(len(census.alive), 0, 0))
        if seed_usage is not None and held:
            self._ends = [*self._ends[:1], (seed_usage, list(held.values()))]
        others = [found for name, found in held.items() if name != self.protected]
        if self.protected in held and others:
            history = self._histories.setdefault(self.protected, UsageHistory(self.protected))
            history.add(held[self.protected], medians(others))

    def _rotate_protection(self, now: float, census: Census) -> None:
        if now < self._turn_at:
            return
        chosen = None if self.protected is not None or not census.members else census.members[-1]
        self.protected = chosen
        self._turn_at = now + (_PROTECTED_SECONDS if chosen is not None else _UNPROTECTED_SECONDS)

    def leaks(self) -> list[str]:
        return [leak for history in (self._seed, *self._histories.values()) for leak in history.leaks()]

    def summary(self) -> str:
        """Usage at the start and at the end, then the growth of each process that was not killed for a while."""
        ends = [
            f"at the {when}: the seed {seed}; median of {len(members)} members {medians(members)}"
            for when, (seed, members) in zip(("start", "end"), self._ends, strict=False)
        ]
        growth = [f"{each.name}: {each.growth} more" for each in (self._seed, *self._histories.values())]
        return "\n".join([*ends, *growth])
