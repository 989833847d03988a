"""Calls on flat arrays of known sizes, which the table of operations describes completely."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.operators import Reduction, identity
from nexar.arrays.views import Span, split
from nexar.collectives.call import PostInRegion, RegionCall
from nexar.collectives.context import PLAIN, CallOptions, CollectiveContext
from nexar.collectives.executor import Run
from nexar.collectives.fingerprint import counted
from nexar.collectives.operations import Collective, Layout, OperationCode
from nexar.collectives.reductions import ReduceJob, TwoLevel, reduce_by
from nexar.collectives.requests import PendingCollective
from nexar.collectives.selection import SHARED_MEMORY, TWO_LEVEL
from nexar.collectives.shared_region import SharedRegion

# Local names: an attribute of an enum class costs 0.1 µs.
_GATHERED, _EXCHANGED = Layout.GATHERED, Layout.EXCHANGED


class CallArrays(NamedTuple):
    """The flat arrays of a call."""

    array: NDArray[Any]
    """The input; unchanged, unless it is `out`."""
    out: NDArray[Any] | None
    """Receives the result; None: no result here. The array itself, or separate from it (Layout.GATHERED: or this rank's
    block). Layouts IN_PLACE and COPY: the array, if there is a result.
    """
    reduction: Reduction | None = None
    root: int | None = None
    spans: tuple[Span, ...] | None = None
    """Layout.SHARE: the share of each rank."""
    has_counts: bool = False
    """The caller gave the shares, so all ranks must agree on them."""


def begin_call(
    context: CollectiveContext, row: Collective, arrays: CallArrays, options: CallOptions = PLAIN
) -> PendingCollective:
    """Returns the call with its sequence number. Raises UsageError for an unsuitable algorithm."""
    array, _, reduction, root, spans, has_counts = arrays
    digest = counted(span.count for span in spans) if has_counts and spans is not None else 0
    name, fingerprint = context.identify(
        row.code, len(array), array.dtype, options, root=root, digest=digest, reduction=reduction
    )
    if name == TWO_LEVEL:
        prepared = PreparedCall(context, row, name, arrays)
        call = context.begin(fingerprint, prepared.region_steps)
        return context.work(call, prepared.run(call))
    if name == SHARED_MEMORY:
        call = context.begin(fingerprint, _region_steps(context, row, arrays))
        return context.work(call, _in_memory(call))
    call = context.begin(fingerprint)
    return context.work(call, _run_schedule(context, call, row, name, arrays))


class PreparedCall:
    """A call without a sequence number yet."""

    def __init__(self, context: CollectiveContext, row: Collective, name: str, arrays: CallArrays) -> None:
        self._context = context
        self._row = row
        self._name = name
        self._arrays = arrays
        self._levels: TwoLevel | None = None
        if name == TWO_LEVEL:
            assert arrays.reduction is not None
            self._levels = TwoLevel(context, arrays.array, arrays.reduction)

    @property
    def region_steps(self) -> Sequence[PostInRegion]:
        if self._levels is not None:
            return self._levels.region_steps
        return _region_steps(self._context, self._row, self._arrays) if self._name == SHARED_MEMORY else ()

    def run(self, call: RegionCall) -> Run:
        if self._levels is not None:
            return self._levels.run(call)
        if self._name == SHARED_MEMORY:
            return _in_memory(call)
        return _run_schedule(self._context, call, self._row, self._name, self._arrays)


def _region_steps(context: CollectiveContext, row: Collective, arrays: CallArrays) -> Sequence[PostInRegion]:
    post, arguments = _IN_REGION[row.base_operation]
    return context.in_memory(SHARED_MEMORY, post, *arguments(arrays, context.group.size))


def _run_schedule(context: CollectiveContext, call: RegionCall, row: Collective, name: str, arrays: CallArrays) -> Run:
    array, out, reduction, root, spans, _ = arrays
    rank, size = context.group.rank, context.group.size
    if reduction is not None:
        assert row.operands is not None
        operands = row.operands(rank, size)
        span = Span(0, len(array)) if spans is None else spans[rank]
        job = ReduceJob(array, out, reduction, operands, span)
        run = reduce_by(context, call, name, row.base_operation, job, root=root or 0, spans=spans)
        return run if operands or out is None else _then_identity(run, out, reduction)
    if row.layout is _GATHERED:
        return _run_gather(context, call, row, name, arrays)
    if row.layout is _EXCHANGED:
        assert out is not None
        return context.execute(call, name, row.base_operation, array, more=(out,), count=len(array) // size)
    return context.execute(call, name, row.base_operation, array, root=root or 0)


def _run_gather(context: CollectiveContext, call: RegionCall, row: Collective, name: str, arrays: CallArrays) -> Run:
    array, out = arrays.array, arrays.out
    count, size, rank = len(array), context.group.size, context.group.rank
    memory = context.scratch.take(size * array.nbytes) if out is None else None
    work = out if memory is None else memory[: size * array.nbytes].view(array.dtype)
    assert work is not None
    np.copyto(work[rank * count : (rank + 1) * count], array)
    yield from context.execute(call, name, row.base_operation, work, root=arrays.root or 0, count=count)
    if memory is not None:
        context.scratch.give_back(memory)


def _in_memory(call: RegionCall) -> Run:
    yield (call.post_next(),)


def _then_identity(run: Run, out: NDArray[Any], reduction: Reduction) -> Run:
    yield from run
    np.copyto(out, identity(reduction, out.dtype))


_Arguments = Callable[[CallArrays, int], tuple[Any, ...]]

_IN_REGION: Final[Mapping[OperationCode, tuple[Callable[..., Any], _Arguments]]] = {
    OperationCode.ALL_REDUCE: (SharedRegion.all_reduce, lambda a, _: (a.array, a.reduction)),
    OperationCode.BROADCAST: (SharedRegion.broadcast, lambda a, _: (a.array, a.root)),
    OperationCode.REDUCE: (SharedRegion.reduce, lambda a, _: (a.array, a.out, a.reduction, a.root)),
    OperationCode.ALL_GATHER: (SharedRegion.all_gather, lambda a, n: (a.array, a.out, split(n * len(a.array), n))),
    OperationCode.REDUCE_SCATTER: (SharedRegion.reduce_scatter, lambda a, _: (a.array, a.out, a.spans, a.reduction)),
}
"""For rows with `shared_memory`, except the barrier: the method of the shared region and its arguments."""
