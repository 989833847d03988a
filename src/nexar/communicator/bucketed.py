"""Many arrays, fused: fewer and larger operations, each of at most a bucket."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.operand import Operand, adapt
from nexar.arrays.operations import Reduction, check, reduction_of
from nexar.collectives.all_reduce import all_reduce
from nexar.collectives.assembly import Assembly, Wish
from nexar.collectives.executor import Run
from nexar.collectives.work import Work
from nexar.communicator.calls import Op
from nexar.errors import UsageError
from nexar.types import whole

_IN_FLIGHT: Final = 2  # one is filled or emptied while another travels


class Bucket(NamedTuple):
    """Arrays of one dtype that travel together."""

    members: tuple[int, ...]
    """Which ones."""
    count: int  # type: ignore[assignment]  # a bucket has no use for a tuple's count()
    dtype: np.dtype[Any]


def buckets(arrays: Sequence[NDArray[Any]], limit_bytes: int) -> list[Bucket]:
    """Each array in one bucket, in order; a bucket holds one dtype, and more than the limit only for a single array.

    Pure: every rank that brings the same dtypes and sizes gets the same buckets.
    """
    filling: dict[np.dtype[Any], list[int]] = {}
    made: list[list[int]] = []
    for index, array in enumerate(arrays):
        members = filling.get(array.dtype)
        held = sum(arrays[each].nbytes for each in members or ())
        if members is None or held + array.nbytes > limit_bytes:
            members = filling[array.dtype] = []
            made.append(members)
        members.append(index)
    return [
        Bucket(tuple(members), sum(arrays[each].size for each in members), arrays[members[0]].dtype) for members in made
    ]


def memory_for(made: Sequence[Bucket]) -> list[NDArray[Any]]:
    """A row for each bucket. Those that are in flight together do not overlap; others lie in the same memory, so that
    the whole takes a few buckets and not as much as all arrays.
    """
    sizes = [bucket.count * bucket.dtype.itemsize for bucket in made]
    rooms = [np.empty(max(sizes), np.uint8) for _ in sizes[:_IN_FLIGHT]]
    return [rooms[at % _IN_FLIGHT][:size].view(made[at].dtype) for at, size in enumerate(sizes)]


def all_reduce_bucketed(
    assembly: Assembly, arrays: Sequence[Any], op: Op, bucket_bytes: int | None, wish: Wish, *, commutative: bool
) -> Work:
    """In place; the result is the list of arrays. All numbers are taken now, so the order of calls is kept."""
    limit = whole(assembly.config.bucket_bytes if bucket_bytes is None else bucket_bytes)
    if limit is None or limit < 1:
        raise UsageError(f"bucket_bytes={bucket_bytes!r} holds nothing; give a whole number from 1")
    if hasattr(arrays, "dtype"):
        raise UsageError("all_reduce_bucketed takes a list of arrays, and got one array; call all_reduce for it")
    operands = [adapt(array, writable=True) for array in arrays]
    reduction = reduction_of(op, commutative=commutative)
    for operand in operands:
        check(reduction, operand.array.dtype)
    return _Fusion(assembly, operands, reduction, wish, limit).work()


class _Fusion:
    """One call."""

    def __init__(
        self, assembly: Assembly, operands: Sequence[Operand], reduction: Reduction, wish: Wish, limit: int
    ) -> None:
        self._assembly = assembly
        self._operands = operands
        self._buckets = buckets([operand.array for operand in operands], limit)
        self._memory = memory_for(self._buckets)
        self._works = [all_reduce(assembly, memory, reduction, wish) for memory in self._memory]

    def work(self) -> Work:
        """Of all its buckets."""
        work = Work(self._run(), None, lambda error: error, "all_reduce_bucketed")
        work.writes = len(self._buckets) > 1  # those of the first ones are there when a later one fails
        return work

    def _run(self) -> Run:
        running: deque[Any] = deque()
        waiting = deque(enumerate(self._works))
        try:
            while waiting or running:
                while waiting and len(running) < _IN_FLIGHT:
                    index, work = waiting.popleft()
                    self._fill(index)
                    running.append((index, self._assembly.conductor.start(work)))
                index, oldest = running[0]
                yield (oldest,)
                running.popleft()
                self._empty(index)
        except BaseException as error:
            for _, each in running:
                each.cancel()
            for _, work in waiting:
                work.finish(error)
            raise
        return [operand.result() for operand in self._operands]

    def _fill(self, index: int) -> None:
        arrays = [self._operands[each].array.reshape(-1) for each in self._buckets[index].members]
        np.concatenate(arrays, out=self._memory[index])

    def _empty(self, index: int) -> None:
        start = 0
        for each in self._buckets[index].members:
            operand = self._operands[each]
            stop = start + operand.array.size
            np.copyto(operand.array.reshape(-1), self._memory[index][start:stop])
            operand.commit()
            start = stop
