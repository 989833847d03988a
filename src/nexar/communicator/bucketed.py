"""all_reduce_bucketed: reduces many arrays in few operations.

Device copies overlap with reductions: they start with the call, and each finished bucket is copied back at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.operand import Allocations, Operand, adapt, staged_array_of
from nexar.arrays.operators import Reduction, check, reduction_of
from nexar.arrays.staging import CopyBatch, StagedArray, gather, scatter
from nexar.arrays.views import placeholder
from nexar.collectives.context import CallOptions, CollectiveContext
from nexar.collectives.executor import Run
from nexar.collectives.operations import COLLECTIVES, OperationCode
from nexar.collectives.prepared_call import CallArrays, begin_call
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
    """Arrays of one dtype, reduced together."""

    # indices of the arrays
    members: tuple[int, ...]
    count: int  # type: ignore[assignment]  # a bucket has no use for a tuple's count()
    dtype: np.dtype[Any]


def buckets(arrays: Sequence[SizedArray], limit_bytes: int) -> list[Bucket]:
    """Assign arrays to buckets, in order. Only a single array may exceed the limit. Pure: equal dtypes and sizes give
    equal buckets on every rank.
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
    """Return an array per bucket. Buckets never in flight together share memory."""
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
    """Start the call. It takes all its sequence numbers now."""
    limit = whole(context.config.bucket_bytes if bucket_bytes is None else bucket_bytes)
    if limit is None or limit < 1:
        raise UsageError(
            f"bucket_bytes={bucket_bytes!r} is too small or not a number; give a whole number of at least 1"
        )
    if hasattr(arrays, "dtype"):
        raise UsageError("all_reduce_bucketed takes a list of arrays, and got one array; call all_reduce for it")
    memory = Allocations()
    given = [staged_array_of(array) or memory.adapt(array, writable=True) for array in arrays]
    reduction = reduction_of(op, commutative=commutative)
    for each in given:
        check(reduction, _sized(each).dtype)
    return _BucketedCall(context, memory, given, reduction, options=options, limit=limit).work()


def _sized(each: Operand | StagedArray) -> SizedArray:
    return each.array if isinstance(each, Operand) else each


class _HostBucket:
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
    """Owns its memory, because the copies of all buckets start at once."""

    def __init__(self, staged_arrays: Sequence[StagedArray], bucket: Bucket) -> None:
        self._staged_arrays = staged_arrays
        self.memory = staged_arrays[0].allocate((bucket.count,), bucket.dtype)
        self._copying: CopyBatch = gather(staged_arrays, self.memory)

    def fill(self) -> None:
        self._copying.wait()

    def empty(self) -> None:
        scatter(self._staged_arrays, self.memory)

    def shares_stream(self, other: _DeviceBucket) -> bool:
        return _same_stream(self._staged_arrays[0], other._staged_arrays[0])


class _BucketedCall:
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
            _HostBucket(arrays, next(rows)) if staged_arrays is None else _DeviceBucket(staged_arrays, bucket)
            for bucket, arrays, staged_arrays in zip(made, members, devices, strict=True)
        ]
        row = COLLECTIVES[OperationCode.ALL_REDUCE]
        self._works = [
            begin_call(context, row, CallArrays(bucket.memory, bucket.memory, reduction), options)
            for bucket in self._buckets
        ]

    def work(self) -> PendingCollective:
        work = PendingCollective(self._run(), None, lambda error: error, "all_reduce_bucketed")
        work.writes = len(self._buckets) > 1  # the first buckets are already written when a later one fails
        return work

    def _await_devices(self) -> None:
        """Earlier work may delay each stream's first copy: the calling thread waits for it, as the driver must not."""
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
    """None unless all use one adapter, device and stream."""
    staged = [each for each in members if isinstance(each, StagedArray)]
    return staged if len(staged) == len(members) and all(_same_stream(staged[0], each) for each in staged) else None


def _same_stream(one: StagedArray, other: StagedArray) -> bool:
    return (
        one.staging is other.staging and one.outline.device == other.outline.device and bool(one.stream == other.stream)
    )
