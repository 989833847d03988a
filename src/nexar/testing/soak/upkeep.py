"""What a process holds, and whether it holds more and more."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

_PROC: Final = Path("/proc")
_PAGE_MB: Final = 4096 / 1e6
_FEWEST: Final = 6  # samples, to say anything


@dataclass(frozen=True, slots=True)
class Upkeep:
    """Of one process at one moment; or a difference of two."""

    descriptors: float
    threads: float
    megabytes: float

    def less(self, other: Upkeep) -> Upkeep:
        """The difference."""
        return Upkeep(
            self.descriptors - other.descriptors, self.threads - other.threads, self.megabytes - other.megabytes
        )

    def __str__(self) -> str:
        return f"{self.descriptors:g} descriptors, {self.threads:g} threads, {self.megabytes:.1f} MB"


LIMITS: Final = Upkeep(descriptors=12, threads=6, megabytes=64)
"""What a process may hold more than in the beginning: worlds differ in size, and memory is kept for reuse."""


def upkeep_of(pid: int) -> Upkeep | None:
    """What it holds now; None: it has ended."""
    folder = _PROC / str(pid)
    try:
        descriptors = len(list((folder / "fd").iterdir()))
        threads = len(list((folder / "task").iterdir()))
        resident = int((folder / "statm").read_text().split()[1])
    except (OSError, IndexError):
        return None
    return Upkeep(descriptors, threads, resident * _PAGE_MB)


def middle(samples: list[Upkeep]) -> Upkeep:
    """The median of each figure."""
    return Upkeep(
        median(each.descriptors for each in samples),
        median(each.threads for each in samples),
        median(each.megabytes for each in samples),
    )


class Account:
    """Of one process, over its life. What it holds is compared with what is usual at that moment, because that grows
    and shrinks with the world.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._excess: list[Upkeep] = []

    def add(self, held: Upkeep, usual: Upkeep) -> None:
        """One more sample."""
        self._excess.append(held.less(usual))

    @property
    def growth(self) -> Upkeep:
        """How much more it holds in the last third of its life than in the first."""
        third = max(1, len(self._excess) // 3)
        if len(self._excess) < _FEWEST:
            return Upkeep(0, 0, 0)
        return middle(self._excess[-third:]).less(middle(self._excess[:third]))

    def leaks(self, limits: Upkeep = LIMITS) -> list[str]:
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
