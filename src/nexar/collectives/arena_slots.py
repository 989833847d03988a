"""The slots of an arena as arrays: for each parity of rounds, one for each rank."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nexar.collectives.arena_memory import ArenaMemory
from nexar.errors import UsageError

Rows = tuple[tuple[NDArray[Any], ...], tuple[NDArray[Any], ...]]
"""For each parity, for each rank, a row of elements."""


class Slots:
    """Belongs to who has the arena's turn."""

    def __init__(self, memory: ArenaMemory, rank: int) -> None:
        self.rank = rank
        self.size = memory.geometry.size
        self.parity = 0
        """Of the round that the operation which begins now prepares first. The next one has the other, and so on."""
        self.slot_bytes = memory.geometry.slot_bytes
        self._mapping = memory.mapping
        self._begin = memory.geometry.slots_at
        self._rows: dict[np.dtype[Any], Rows] = {}

    def of(self, dtype: np.dtype[Any]) -> Rows:
        """As rows of that dtype; kept for each that is used."""
        rows = self._rows.get(dtype)
        if rows is None:
            rows = self._rows[dtype] = self._row(0, dtype), self._row(1, dtype)
        return rows

    def capacity(self, dtype: np.dtype[Any]) -> int:
        """Elements of a slot."""
        return self.slot_bytes // dtype.itemsize

    def _row(self, parity: int, dtype: np.dtype[Any]) -> tuple[NDArray[Any], ...]:
        mapping = self._mapping
        if mapping is None:
            raise UsageError(
                "this communicator is closed, or of the parent of this process; use it before closing it, and in a "
                "forked child make another one with nexar.init()"
            )
        length = self.slot_bytes
        begins = (self._begin + (parity * self.size + rank) * length for rank in range(self.size))
        return tuple(np.frombuffer(mapping, np.uint8, length, at).view(dtype) for at in begins)

    def release(self) -> None:
        """Let go of the memory."""
        self._rows.clear()
        self._mapping = None
