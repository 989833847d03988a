"""An all_reduce of few bytes, run to its end by the thread that calls it.

The same round as in shared_memory, but with what can be made beforehand made once for each count and dtype: views of
the slots, and the function that folds. Calls of few bytes come in great numbers, and mostly alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from numpy.typing import NDArray

from nexar.arrays.operations import ReduceCode, Reduction
from nexar.arrays.reduce import finish, folder
from nexar.collectives.arena_slots import Slots

_MOST_PLANS: Final = 64


class Plan:
    """For one count, dtype and reduction."""

    __slots__ = ("_finishes", "_fold", "_inputs", "_mine", "_reduction", "_size")

    def __init__(self, slots: Slots, array: NDArray[Any], reduction: Reduction) -> None:
        count, given = len(array), slots.of(array.dtype).given
        self._size = slots.size
        self._reduction = reduction
        self._finishes = reduction.code == ReduceCode.AVG
        self._fold = folder(reduction, array.dtype)
        self._mine = tuple(rows[slots.rank][:count] for rows in given)
        self._inputs = tuple([row[:count] for row in rows] for rows in given)

    def give(self, parity: int, array: NDArray[Any]) -> None:
        """Into this rank's slot."""
        self._mine[parity][...] = array

    def fold(self, parity: int, out: NDArray[Any]) -> None:
        """What all have given in."""
        self._fold(out, self._inputs[parity])
        if self._finishes:
            finish(self._reduction, out, self._size)

    def rest(self, parity: int, out: NDArray[Any]) -> Iterator[None]:
        """What remains of the operation when this rank has given in: no round, and then the fold."""
        self.fold(parity, out)
        yield from ()


class Plans:
    """Belongs to who has the turn."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._plans: dict[tuple[int, int, int], tuple[Plan, Reduction]] = {}  # the reduction: so that its id stays its

    def of(self, array: NDArray[Any], reduction: Reduction) -> Plan:
        """The oldest is forgotten where there are too many."""
        key = (len(array), array.dtype.num, id(reduction))
        found = self._plans.get(key)
        if found is not None:
            return found[0]
        while len(self._plans) >= _MOST_PLANS:
            del self._plans[next(iter(self._plans))]
        plan = Plan(self._slots, array, reduction)
        self._plans[key] = plan, reduction
        return plan

    def release(self) -> None:
        """Let go of the memory."""
        self._plans.clear()
