"""Reducing collectives: all_reduce, reduce, reduce_scatter and scan.

Floats narrower than float32 are summed in float32 and rounded once, except in large arrays whose partial results are
exchanged: there each combination rounds, and an average is scaled first to avoid overflow.

Two-level all-reduce: with S leaders per host (the ranks of the smallest host), leader i owns share i. The ranks of a
host reduce it in shared memory, the leaders i of all hosts over the network, and shared memory returns it. So each byte
crosses the network as often as between single ranks, on S links at once. A host's sum is sent as float32, or from
`large_msg_bytes` on rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import cached_property
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.dtypes import code_of
from nexar.arrays.operators import ReduceCode, Reduction, identity, reduction_of
from nexar.arrays.reduce import finish, folder, round_total, rounds, wide_folder
from nexar.arrays.views import Span, split
from nexar.collectives.call import PostInRegion, RegionCall
from nexar.collectives.context import CallOptions, CollectiveContext
from nexar.collectives.executor import Kernels, Run
from nexar.collectives.fingerprint import Fingerprint, OperationCode, counted, rooted
from nexar.collectives.requests import PendingCollective
from nexar.collectives.schedules.registry import algorithms_of
from nexar.collectives.selection import SHARED_MEMORY, TWO_LEVEL
from nexar.collectives.shared_region import SharedRegion
from nexar.collectives.shared_region_layout import Fold

WIDE: Final = np.dtype(np.float32)
_SCANS: Final = (OperationCode.SCAN, OperationCode.EXCLUSIVE_SCAN)
_SUM: Final = reduction_of("sum")


class Rounding(Enum):
    """How often elements are rounded to their dtype."""

    NATURAL = "natural"
    """By the dtype's arithmetic. An average is divided at the end."""
    ONCE = "once"
    """All operands of an element are combined at once."""
    AT_THE_END = "at the end"
    """Partial results are float32."""
    EACH = "each"
    """In each combination. An average is scaled first."""


def rounding_of(
    name: str, operation: OperationCode, reduction: Reduction, dtype: np.dtype[Any], *, size: int, large: bool
) -> Rounding:
    """Returns the rounding, equal on every rank."""
    if not rounds(reduction, dtype):
        return Rounding.NATURAL
    if size <= 2 or algorithms_of(operation)[name].single_fold:
        return Rounding.ONCE
    return Rounding.EACH if large and operation not in _SCANS else Rounding.AT_THE_END


class ReducePlan(NamedTuple):
    """How calls of one schedule, operation, dtype and size reduce."""

    rounding: Rounding
    reduction: Reduction
    operands: int
    """Divisor of an average."""
    dtype: np.dtype[Any]
    """Of the array that the schedule works on."""
    widens: bool
    """It is not the caller's dtype."""
    arithmetic: Kernels

    @classmethod
    def of(cls, rounding: Rounding, reduction: Reduction, dtype: np.dtype[Any], operands: int) -> Self:
        widens = rounding is Rounding.AT_THE_END
        inner = WIDE if widens else dtype
        if rounding is Rounding.ONCE:
            arithmetic = Kernels.of(reduction, inner, operands)
        else:
            arithmetic = Kernels.of(_SUM if reduction.code is ReduceCode.AVG else reduction, inner)
        return cls(rounding, reduction, operands, inner, widens, arithmetic)

    def load(self, work: NDArray[Any], array: NDArray[Any]) -> None:
        """Copy this rank's elements into `work`, which may be `array`."""
        if self.widens:
            wide_folder(self.reduction, array.dtype)(work, (array,))
        elif self.rounding is Rounding.EACH and self.reduction.code is ReduceCode.AVG:
            folder(self.reduction, array.dtype, self.operands)(work, (array,))
        elif work is not array:
            np.copyto(work, array)

    def deliver(self, into: NDArray[Any], result: NDArray[Any]) -> None:
        """Write the final elements to `into`, which may be `result`."""
        if self.widens:
            round_total(self.reduction, into, result, self.operands)
            return
        if into is not result and not np.may_share_memory(into, result):
            np.copyto(into, result)
        if self.rounding is Rounding.NATURAL:
            finish(self.reduction, into, self.operands)


class ReduceJob(NamedTuple):
    """The flat arrays of a reduction."""

    array: NDArray[Any]
    """Unchanged, unless it is `into`."""
    into: NDArray[Any] | None
    """Receives `span` of the result; None: no result here."""
    reduction: Reduction
    operands: int
    span: Span


def reduce_by(
    context: CollectiveContext,
    call: RegionCall,
    name: str,
    operation: OperationCode,
    job: ReduceJob,
    *,
    root: int = 0,
    spans: tuple[Span, ...] | None = None,
    team: list[int] | None = None,
) -> Run:
    """Run the schedule and finish its result."""
    array, into, reduction, operands, span = job
    size = context.group.size if team is None else len(team)
    large = array.nbytes >= context.config.large_msg_bytes
    rounding = rounding_of(name, operation, reduction, array.dtype, size=size, large=large)
    reducing = ReducePlan.of(rounding, reduction, array.dtype, operands)
    work, memory = _reduce_steps(context, job, reducing)
    reducing.load(work, array)
    yield from context.execute(
        call, name, operation, work, arithmetic=reducing.arithmetic, root=root, spans=spans, team=team
    )
    if into is not None:
        reducing.deliver(into, work[span.start : span.stop])
    if memory is not None:
        context.scratch.give_back(memory)


def _reduce_steps(
    context: CollectiveContext, job: ReduceJob, reducing: ReducePlan
) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Returns the schedule's array and its scratch memory, if any."""
    array, into, dtype = job.array, job.into, reducing.dtype
    if into is not None and len(into) == len(array) and not reducing.widens:
        return into, None
    memory = context.scratch.take(len(array) * dtype.itemsize)
    return memory[: len(array) * dtype.itemsize].view(dtype), memory


def host_shares(context: CollectiveContext, count: int) -> tuple[Span, ...]:
    """Returns the shares by local rank; empty for non-leaders."""
    leaders = min(map(len, context.hosts))
    others = len(context.group.local_ranks) - leaders
    return (*split(count, leaders), *(Span(count, count),) * others)


class TwoLevel:
    """One two-level all-reduce of a flat array, in place."""

    def __init__(self, context: CollectiveContext, array: NDArray[Any], reduction: Reduction) -> None:
        self._context = context
        self._array = array
        self._reduction = reduction
        self._summing = reduction_of("sum") if reduction.code is ReduceCode.AVG else reduction
        self._spans = host_shares(context, len(array))
        mine = self._spans[context.index]
        self._share = array[mine.start : mine.stop]
        self._rounding = self._choose_rounding()
        wide = self._rounding is Rounding.AT_THE_END
        self._partial = np.empty(len(self._share), WIDE) if wide else self._share
        """This rank's share: of the host's sum, then of the total."""

    def _choose_rounding(self) -> Rounding:
        if not rounds(self._reduction, self._array.dtype):
            return Rounding.NATURAL
        large = self._array.nbytes >= self._context.config.large_msg_bytes
        return Rounding.EACH if large else Rounding.AT_THE_END

    @cached_property
    def _fold(self) -> Fold | None:
        """Sums the arrays of one host; None: the default."""
        dtype = self._array.dtype
        if self._rounding is Rounding.AT_THE_END:
            return wide_folder(self._reduction, dtype)
        if self._rounding is Rounding.EACH:
            return folder(self._reduction, dtype, self._context.group.size)
        return None

    @property
    def region_steps(self) -> Sequence[PostInRegion]:
        region = self._context.region
        if region is None:
            return ()
        array, share, spans = self._array, self._share, self._spans
        return (
            lambda order_number, about, spin: region.reduce_scatter(
                order_number, array, self._partial, spans, self._summing, fold=self._fold, announcement=about, spin=spin
            ),
            lambda order_number, about, spin: region.all_gather(
                order_number, share, array, spans, announcement=about, spin=spin
            ),
        )

    def run(self, call: RegionCall) -> Run:
        if call.region_steps:
            yield (call.post_next(),)
        elif self._fold is not None:
            self._fold(self._partial, [self._share])
        if len(self._share):
            yield from self._between_hosts(call)
            self._finish()
        if call.region_steps:
            yield (call.post_next(),)

    def _between_hosts(self, call: RegionCall) -> Run:
        context, partial = self._context, self._partial
        team = [ranks[context.index] for ranks in context.hosts]
        code = OperationCode.ALL_REDUCE
        name = context.choose_schedule(code, len(partial), partial.dtype, len(team), self._summing)
        job = ReduceJob(partial, partial, self._summing, len(team), Span(0, len(partial)))
        yield from reduce_by(context, call, name, code, job, team=team)

    def _finish(self) -> None:
        size = self._context.group.size
        if self._rounding is Rounding.AT_THE_END:
            round_total(self._reduction, self._share, self._partial, size)
        elif self._rounding is Rounding.NATURAL:
            finish(self._reduction, self._share, size)


_ALL_REDUCE = OperationCode.ALL_REDUCE


def all_reduce(
    context: CollectiveContext, array: NDArray[Any], reduction: Reduction, options: CallOptions
) -> PendingCollective:
    """Reduce a flat array in place."""
    name = context.choose(_ALL_REDUCE, len(array), array.dtype, options, reduction)
    fingerprint = Fingerprint(_ALL_REDUCE, code_of(array.dtype), len(array), 0, reduction.code, options.way(name))
    prepared = PreparedAllReduce(context, name, array, reduction)
    call = context.begin(fingerprint, prepared.region_steps)
    return context.work(call, prepared.run(call))


class PreparedAllReduce:
    """An in-place all-reduce without a sequence number yet."""

    def __init__(self, context: CollectiveContext, name: str, array: NDArray[Any], reduction: Reduction) -> None:
        self._context = context
        self._name = name
        self._array = array
        self._reduction = reduction
        self._levels = TwoLevel(context, array, reduction) if name == TWO_LEVEL else None

    @property
    def region_steps(self) -> Sequence[PostInRegion]:
        if self._levels is not None:
            return self._levels.region_steps
        return self._context.in_memory(self._name, SharedRegion.all_reduce, self._array, self._reduction)

    def run(self, call: RegionCall) -> Run:
        if self._name == SHARED_MEMORY:
            return _in_memory(call)
        if self._levels is not None:
            return self._levels.run(call)
        array, size = self._array, self._context.group.size
        job = ReduceJob(array, array, self._reduction, size, Span(0, len(array)))
        return reduce_by(self._context, call, self._name, _ALL_REDUCE, job)


def _in_memory(call: RegionCall) -> Run:
    yield (call.post_next(),)


_REDUCE = OperationCode.REDUCE


class ReduceArguments(NamedTuple):
    """The flat arrays of a reduce."""

    array: NDArray[Any]
    out: NDArray[Any] | None
    """Used at the root; may be `array`."""
    reduction: Reduction
    root: int


def reduce(context: CollectiveContext, job: ReduceArguments, options: CallOptions) -> PendingCollective:
    """The result is in the root's `out`; other arrays are unchanged."""
    array, _, reduction, root = job
    name = context.choose(_REDUCE, len(array), array.dtype, options, reduction)
    fingerprint = Fingerprint(
        _REDUCE, code_of(array.dtype), len(array), rooted(root), reduction.code, options.way(name)
    )
    call = context.begin(fingerprint, context.in_memory(name, SharedRegion.reduce, *job))
    return context.work(call, _run_reduce(context, call, name, job))


def _run_reduce(context: CollectiveContext, call: RegionCall, name: str, job: ReduceArguments) -> Run:
    if name == SHARED_MEMORY:
        yield (call.post_next(),)
        return
    array, out, reduction, root = job
    into = out if context.group.rank == root else None
    yield from reduce_by(
        context,
        call,
        name,
        _REDUCE,
        ReduceJob(array, into, reduction, context.group.size, Span(0, len(array))),
        root=root,
    )


_REDUCE_SCATTER = OperationCode.REDUCE_SCATTER


class ReduceScatterArguments(NamedTuple):
    """The flat arrays of a reduce_scatter."""

    array: NDArray[Any]
    out: NDArray[Any]
    """Separate from `array`."""
    spans: tuple[Span, ...]
    reduction: Reduction


def reduce_scatter(
    context: CollectiveContext, job: ReduceScatterArguments, options: CallOptions, code: OperationCode = _REDUCE_SCATTER
) -> PendingCollective:
    """The result is in `out`."""
    array, reduction = job.array, job.reduction
    name = context.choose(_REDUCE_SCATTER, len(array), array.dtype, options, reduction)
    root = 0 if code is _REDUCE_SCATTER else counted(span.count for span in job.spans)
    fingerprint = Fingerprint(code, code_of(array.dtype), len(array), root, reduction.code, options.way(name))
    call = context.begin(fingerprint, context.in_memory(name, SharedRegion.reduce_scatter, *job))
    return context.work(call, _run_reduce_scatter(context, call, name, job))


def _run_reduce_scatter(context: CollectiveContext, call: RegionCall, name: str, job: ReduceScatterArguments) -> Run:
    if name == SHARED_MEMORY:
        yield (call.post_next(),)
        return
    array, out, spans, reduction = job
    whole = ReduceJob(array, out, reduction, context.group.size, spans[context.group.rank])
    yield from reduce_by(context, call, name, _REDUCE_SCATTER, whole, spans=spans)


def scan(
    context: CollectiveContext, out: NDArray[Any], reduction: Reduction, options: CallOptions, *, exclusive: bool
) -> PendingCollective:
    """Scan a flat array in place. Exclusive: rank 0 gets the identity."""
    code = OperationCode.EXCLUSIVE_SCAN if exclusive else OperationCode.SCAN
    name = context.choose(code, len(out), out.dtype, options, reduction)
    call = context.begin(Fingerprint(code, code_of(out.dtype), len(out), 0, reduction.code, options.way(name)))
    return context.work(call, _run_scan(context, call, name, out, reduction))


def _run_scan(context: CollectiveContext, call: RegionCall, name: str, out: NDArray[Any], reduction: Reduction) -> Run:
    code = OperationCode(call.fingerprint.operation)
    operands = context.group.rank + (code is OperationCode.SCAN)
    job = ReduceJob(out, out, reduction, operands, Span(0, len(out)))
    yield from reduce_by(context, call, name, code, job)
    if not operands:
        np.copyto(out, identity(reduction, out.dtype))
