"""all_reduce_bucketed: many arrays are reduced in few operations, each of at most one bucket.

Copies from devices start with the call, for all buckets; each bucket is copied back when it is done. So copies overlap
with the reduction of other buckets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.operand import Allocations, Operand, adapt, mirror_of
from nexar.arrays.operators import Reduction, check, reduction_of
from nexar.arrays.staging import CopyBatch, StagedArray, gather, scatter
from nexar.arrays.views import placeholder
from nexar.collectives.context import CallOptions, CollectiveContext
from nexar.collectives.executor import Run
from nexar.collectives.reductions import all_reduce
from nexar.collectives.requests import PendingCollective
from nexar.communicator.collective_calls import Op
from nexar.errors import UsageError
from nexar.types import whole

_IN_FLIGHT: Final = 2  # one is filled or emptied while another is reduced


class SizedArray(Protocol):
    """What `buckets` reads of an array."""

    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def size(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class Bucket(NamedTuple):
    """Arrays of one dtype that are reduced together."""

    # indices of the arrays
    members: tuple[int, ...]
    count: int  # type: ignore[assignment]  # a bucket has no use for a tuple's count()
    dtype: np.dtype[Any]


def buckets(arrays: Sequence[SizedArray], limit_bytes: int) -> list[Bucket]:
    """Assign each array to one bucket, in order. A bucket has one dtype and exceeds the limit only with a single array.
    Pure: equal dtypes and sizes give equal buckets on every rank.
    """
    filling: dict[np.dtype[Any], list[int]] = {}
    held_bytes: dict[np.dtype[Any], int] = {}
    made: list[list[int]] = []
    for index, array in enumerate(arrays):
        dtype, size_bytes = array.dtype, array.nbytes
        members = filling.get(dtype)
        if members is None or held_bytes[dtype] + size_bytes > limit_bytes:
            members = filling[dtype] = []
            held_bytes[dtype] = 0
            made.append(members)
        members.append(index)
        held_bytes[dtype] += size_bytes
    return [
        Bucket(tuple(members), sum(arrays[each].size for each in members), arrays[members[0]].dtype) for members in made
    ]


def memory_for(made: Sequence[Bucket]) -> list[NDArray[Any]]:
    """Return an array for each bucket. Buckets in flight together do not overlap; others share memory."""
    sizes = [bucket.count * bucket.dtype.itemsize for bucket in made]
    rooms = [np.empty(max(sizes), np.uint8) for _ in sizes[:_IN_FLIGHT]]
    return [rooms[at % _IN_FLIGHT][:size].view(made[at].dtype) for at, size in enumerate(sizes)]


def _rows(memory: Allocations, made: Sequence[Bucket]) -> list[NDArray[Any]]:
    try:
        return memory_for(made)
    except MemoryError as error:
        memory.failed(error)
        return [placeholder((bucket.count,), bucket.dtype) for bucket in made]


def all_reduce_bucketed(
    context: CollectiveContext,
    arrays: Sequence[Any],
    op: Op,
    bucket_bytes: int | None,
    options: CallOptions,
    *,
    commutative: bool,
) -> PendingCollective:
    """Start the call. Takes all sequence numbers now, so the order of calls is kept."""
    limit = whole(context.config.bucket_bytes if bucket_bytes is None else bucket_bytes)
    if limit is None or limit < 1:
        raise UsageError(
            f"bucket_bytes={bucket_bytes!r} is too small or not a number; give a whole number of at least 1"
        )
    if hasattr(arrays, "dtype"):
        raise UsageError("all_reduce_bucketed takes a list of arrays, and got one array; call all_reduce for it")
    memory = Allocations()
    given = [mirror_of(array) or memory.adapt(array, writable=True) for array in arrays]
    reduction = reduction_of(op, commutative=commutative)
    for each in given:
        check(reduction, _sized(each).dtype)
    return _BucketedCall(context, memory, given, reduction, options=options, limit=limit).work()


def _sized(each: Operand | StagedArray) -> SizedArray:
    return each.array if isinstance(each, Operand) else each


class _HostBucket:
    """Bucket with at least one array in host memory."""

    def __init__(self, given: Sequence[Operand | StagedArray], memory: NDArray[Any]) -> None:
        self._operands = [each if isinstance(each, Operand) else adapt(each.value, writable=True) for each in given]
        self.memory = memory

    def fill(self) -> None:
        np.concatenate([operand.array.reshape(-1) for operand in self._operands], out=self.memory)

    def empty(self) -> None:
        start = 0
        for operand in self._operands:
            stop = start + operand.array.size
            np.copyto(operand.array.reshape(-1), self.memory[start:stop])
            operand.commit()
            start = stop


class _DeviceBucket:
    """Bucket of arrays of one device. Owns its memory, because the copies of all buckets start at once."""

    def __init__(self, mirrors: Sequence[StagedArray], bucket: Bucket) -> None:
        self._mirrors = mirrors
        self.memory = mirrors[0].room((bucket.count,), bucket.dtype)
        self._copying: CopyBatch = gather(mirrors, self.memory)

    def fill(self) -> None:
        self._copying.wait()

    def empty(self) -> None:
        scatter(self._mirrors, self.memory)

    def shares_stream(self, other: _DeviceBucket) -> bool:
        """Whether both use one stream."""
        return _same_stream(self._mirrors[0], other._mirrors[0])


class _BucketedCall:
    """One call of all_reduce_bucketed."""

    def __init__(
        self,
        context: CollectiveContext,
        memory: Allocations,
        given: Sequence[Operand | StagedArray],
        reduction: Reduction,
        *,
        options: CallOptions,
        limit: int,
    ) -> None:
        self._context = context
        self._memory = memory
        self._given = given
        made = buckets([_sized(each) for each in given], limit)
        members = [[given[each] for each in bucket.members] for bucket in made]
        devices = [_of_one_device(each) for each in members]
        rows = iter(_rows(memory, [bucket for bucket, device in zip(made, devices, strict=True) if device is None]))
        self._buckets = [
            _HostBucket(arrays, next(rows)) if mirrors is None else _DeviceBucket(mirrors, bucket)
            for bucket, arrays, mirrors in zip(made, members, devices, strict=True)
        ]
        self._works = [all_reduce(context, bucket.memory, reduction, options) for bucket in self._buckets]

    def work(self) -> PendingCollective:
        work = PendingCollective(self._run(), None, lambda error: error, "all_reduce_bucketed")
        work.writes = len(self._buckets) > 1  # the first buckets are already written when a later one fails
        return work

    def _await_devices(self) -> None:
        """Wait, in the calling thread, for the first copy of each stream: earlier work of the device may delay it. The
        driver, which must not block, then finds copies finished or running.
        """
        first: list[_DeviceBucket] = []
        for bucket in self._buckets:
            if isinstance(bucket, _DeviceBucket) and not any(bucket.shares_stream(each) for each in first):
                first.append(bucket)
                bucket.fill()

    def _run(self) -> Run:
        running: deque[Any] = deque()
        waiting = deque(zip(self._buckets, self._works, strict=True))
        try:
            if self._memory.error is not None:
                raise self._memory.error
            self._await_devices()
            while waiting or running:
                while waiting and len(running) < _IN_FLIGHT:
                    waiting[0][0].fill()
                    bucket, work = waiting.popleft()
                    running.append((bucket, self._context.runner.start(work)))
                bucket, oldest = running[0]
                yield (oldest,)
                running.popleft()
                bucket.empty()
        except BaseException as error:
            for _, each in running:
                each.cancel()
            for _, work in waiting:
                work.finish(error)
            raise
        return [each.result() if isinstance(each, Operand) else each.value for each in self._given]


def _of_one_device(members: Sequence[Operand | StagedArray]) -> list[StagedArray] | None:
    """Return the members if all are of one adapter, device and stream; else None."""
    mirrors = [each for each in members if isinstance(each, StagedArray)]
    return mirrors if len(mirrors) == len(members) and all(_same_stream(mirrors[0], each) for each in mirrors) else None


def _same_stream(one: StagedArray, other: StagedArray) -> bool:
    return (
        one.staging is other.staging and one.outline.device == other.outline.device and bool(one.stream == other.stream)
    )
