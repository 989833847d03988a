"""How an all_reduce goes through the slots: in one round, or in two for each chunk.

One    Each rank gives in its array, and folds all that were given in: for few bytes, where a round costs most.
Two    Each rank gives in its array, all but its own share. It folds everybody's part of its share, and writes the
       result over what it read, into the slots of the others; each finds the shares of the others in its own slot. So
       every byte is folded by one rank only. And every cache line goes to and fro between two cores, read and then
       written by each in turn: measured on two cores, that is two to five times as fast as lines that one core only
       writes and the other only reads.

Such calls come in great numbers, and mostly alike. So what can be made beforehand is made once for each count, dtype
and reduction: views of the slots, and the function that folds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from numpy.typing import NDArray

from nexar.arrays.operations import Reduction
from nexar.arrays.partition import split
from nexar.arrays.reduce import combiner, folder
from nexar.collectives.arena_slots import Slots

SMALL_BYTES: Final = 32 << 10
"""Of what all ranks give in together: up to here one round, above it two."""

_MOST_PLANS: Final = 64

Row = NDArray[Any]
Fold = Callable[[Row, list[Row]], None]


class OneRound:
    """For one count, dtype and reduction."""

    rounds: Final = 1
    __slots__ = ("_fold", "_inputs", "_mine", "_slots")

    def __init__(self, slots: Slots, count: int, dtype: Any, fold: Fold) -> None:
        rows = slots.of(dtype)
        self._slots = slots
        self._fold = fold
        self._mine = tuple(each[slots.rank][:count] for each in rows)
        self._inputs = tuple([row[:count] for row in each] for each in rows)

    def run(self, array: Row, out: Row | None, root: int | None) -> Iterator[None]:
        """See shared_memory.all_reduce."""
        parity = self._slots.parity
        self._mine[parity][...] = array
        yield
        if out is not None:
            self._fold(out, self._inputs[parity])


class TwoRounds:
    """For one count, dtype and reduction. Between `give` and `work`, and between `work` and `collect`, is a round."""

    rounds: Final = 2
    __slots__ = ("_fold", "_inputs", "_mine", "_others", "_own", "_rank", "_slots")

    def __init__(self, slots: Slots, count: int, dtype: Any, fold: Fold) -> None:
        rank, rows = slots.rank, slots.of(dtype)
        shares = [slice(*span) for span in split(count, slots.size)]
        self._slots = slots
        self._rank = rank
        self._fold = fold
        self._mine = mine = shares[rank]
        self._inputs = tuple([row[mine] for row in each] for each in rows)
        self._own = tuple(
            [(share, each[rank][share]) for share in shares if share is not mine and share.stop > share.start]
            for each in rows
        )
        self._others = [other for other in range(slots.size) if other != rank]

    def run(self, array: Row, out: Row | None, root: int | None) -> Iterator[None]:
        """See shared_memory.all_reduce."""
        parity = self._slots.parity
        self.give(parity, array)
        yield
        self.work(parity, array, out, root)
        yield
        if out is not None:
            self.collect(parity, out)

    def give(self, parity: int, array: Row) -> None:
        """All but what only this rank needs."""
        for share, slot in self._own[parity]:
            slot[...] = array[share]

    def work(self, parity: int, array: Row, out: Row | None, root: int | None) -> None:
        """My share of everybody's, for everybody or for the root."""
        given = self._inputs[parity]
        inputs = given.copy()
        inputs[self._rank] = array[self._mine]
        result = given[self._rank] if out is None else out[self._mine]
        self._fold(result, inputs)
        for other in self._others:
            if root is None or root == other:
                given[other][...] = result

    def collect(self, parity: int, out: Row) -> None:
        """The shares of the others. My own is there since I worked it out."""
        for share, slot in self._own[parity]:
            out[share] = slot


Plan = OneRound | TwoRounds


class Plans:
    """Made by any thread, used by who has the turn."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self._small = min(SMALL_BYTES // slots.size, slots.slot_bytes)
        self._plans: dict[tuple[int, int, int], tuple[Plan, Reduction]] = {}  # the reduction: so that its id stays its

    def of(self, array: Row, reduction: Reduction) -> Plan | None:
        """None: the array does not fit into a slot. The oldest is forgotten where there are too many."""
        key = (len(array), array.dtype.num, id(reduction))
        found = self._plans.get(key)
        if found is not None:
            return found[0]
        if array.nbytes > self.slots.slot_bytes:
            return None
        while len(self._plans) >= _MOST_PLANS:
            self._plans.pop(next(iter(self._plans)), None)
        kind = OneRound if array.nbytes <= self._small else TwoRounds
        plan = kind(self.slots, len(array), array.dtype, folding(self.slots.size, array.dtype, reduction))
        self._plans[key] = plan, reduction
        return plan

    def release(self) -> None:
        """Let go of the memory."""
        self._plans.clear()


def folding(size: int, dtype: Any, reduction: Reduction) -> Fold:
    """What folds the inputs of all ranks. It divides an average too, before a half type is rounded."""
    return _fold_two(dtype, reduction) if size == 2 else folder(reduction, dtype, size)


def _fold_two(dtype: Any, reduction: Reduction) -> Fold:
    """Without a loop."""
    combine = combiner(reduction, dtype, 2)
    return lambda out, inputs: combine(out, inputs[0], inputs[1])
