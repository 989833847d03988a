"""The slots of an arena as arrays: for each parity of rounds and each rank, what it gives in and what it worked out."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nexar.collectives.arena_memory import ArenaMemory

Rows = tuple[tuple[NDArray[Any], ...], tuple[NDArray[Any], ...]]
"""For each parity, for each rank, a row of elements."""


class Views(NamedTuple):
    """All slots as rows of one dtype."""

    given: Rows
    worked: Rows
    capacity: int
    """Elements that a rank can give in at a time."""


class Slots:
    """Belongs to who has the arena's turn."""

    def __init__(self, memory: ArenaMemory, rank: int) -> None:
        self.rank = rank
        self.size = memory.geometry.size
        self.parity = 0
        """Of the round that the operation which begins now prepares first. The next one has the other, and so on."""
        self.slot_bytes = memory.geometry.slot_bytes
        self._mapping = memory.mapping
        self._geometry = memory.geometry
        self._views: dict[np.dtype[Any], Views] = {}

    def of(self, dtype: np.dtype[Any]) -> Views:
        """Kept for each dtype that is used."""
        views = self._views.get(dtype)
        if views is None:
            views = self._views[dtype] = self._cast(dtype)
        return views

    def _cast(self, dtype: np.dtype[Any]) -> Views:
        capacity = self._geometry.slot_bytes // dtype.itemsize
        given = self._rows(dtype, 0, capacity)
        worked = self._rows(dtype, self._geometry.slot_bytes, self._geometry.share_bytes // dtype.itemsize)
        return Views(given, worked, capacity)

    def _rows(self, dtype: np.dtype[Any], within: int, count: int) -> Rows:
        mapping = self._mapping
        assert mapping is not None
        begin, each = self._geometry.slots_at, self._geometry.slot_bytes + self._geometry.share_bytes

        def row(parity: int, rank: int) -> NDArray[Any]:
            at = begin + (parity * self.size + rank) * each + within
            return np.frombuffer(mapping, np.uint8, count * dtype.itemsize, at).view(dtype)

        even, odd = (tuple(row(parity, rank) for rank in range(self.size)) for parity in (0, 1))
        return even, odd

    def release(self) -> None:
        """Let go of the memory."""
        self._views.clear()
        self._mapping = None
