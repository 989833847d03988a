"""Which ranks are still free: whole runs, not single numbers.

A world has many ranks and few runs of free ones, because ranks are mostly taken from the bottom and in blocks. The runs
lie in order, never touch, and are found by bisection, so taking or giving back costs the logarithm of their number.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from nexar.types import Rank


class FreeRanks:
    """The free ones of 0..size-1."""

    def __init__(self, size: int) -> None:
        self._starts: list[Rank] = [0] if size else []
        self._ends: list[Rank] = [size] if size else []  # behind the last of each run
        self.count = size
        """How many are free."""

    def __iter__(self) -> Iterator[Rank]:
        """Ascending."""
        for start, end in zip(self._starts, self._ends, strict=True):
            yield from range(start, end)

    def are_free(self, first: Rank, count: int = 1) -> bool:
        """Whether all `count` ranks from `first` on are."""
        run = bisect_right(self._starts, first) - 1
        return run >= 0 and first + count <= self._ends[run]

    def lowest(self, count: int) -> Rank | None:
        """Where the lowest run of at least `count` begins; None: there is none."""
        for start, end in zip(self._starts, self._ends, strict=True):
            if end - start >= count:
                return start
        return None

    def take(self, first: Rank, count: int = 1) -> None:
        """They are free no more. ValueError if one of them was not free."""
        run = bisect_right(self._starts, first) - 1
        if run < 0 or first + count > self._ends[run]:
            raise ValueError(f"ranks {first}..{first + count - 1} are not all free")
        start, end = self._starts[run], self._ends[run]
        rest = [part for part in ((start, first), (first + count, end)) if part[0] < part[1]]
        self._starts[run : run + 1] = [part[0] for part in rest]
        self._ends[run : run + 1] = [part[1] for part in rest]
        self.count -= count

    def give_back(self, rank: Rank) -> None:
        """It is free again, and one run with its neighbours. ValueError if it was free already."""
        after = bisect_right(self._starts, rank)
        if after and self._ends[after - 1] > rank:
            raise ValueError(f"rank {rank} is free already")
        joins_before = after > 0 and self._ends[after - 1] == rank
        joins_after = after < len(self._starts) and self._starts[after] == rank + 1
        first, last = after - joins_before, after + joins_after
        start = self._starts[first] if joins_before else rank
        end = self._ends[last - 1] if joins_after else rank + 1
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        self.count += 1
