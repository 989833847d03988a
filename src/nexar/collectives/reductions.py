"""Reduction by schedules and on two levels, and the rounding of narrow floats.

Floats narrower than float32 are summed in float32 and rounded once. In large arrays whose partial results are
exchanged, each combination rounds, and an average is scaled first to avoid overflow.

Two-level all-reduce: each host has S leaders, S being the size of the smallest host. Leader i owns share i. The host
reduces it in shared memory, the leaders i of all hosts over the network, and shared memory returns it. So each byte
crosses the network as often as between single ranks, on S links at once. A host's sum is sent as float32, or rounded
from `large_msg_bytes` on.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import cached_property
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.operators import ReduceCode, Reduction, reduction_of
from nexar.arrays.reduce import finish, folder, round_total, rounds, wide_folder
from nexar.arrays.views import Span, split
from nexar.collectives.call import PostInRegion, RegionCall
from nexar.collectives.context import CollectiveContext
from nexar.collectives.executor import Kernels, Run
from nexar.collectives.operations import COLLECTIVES, OperationCode, algorithms_of
from nexar.collectives.shared_region_layout import Fold

WIDE: Final = np.dtype(np.float32)
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
    return Rounding.EACH if large and not COLLECTIVES[operation].is_scan else Rounding.AT_THE_END


class ReducePlan(NamedTuple):
    """The reduction of one schedule, operation, dtype and size."""

    rounding: Rounding
    reduction: Reduction
    operands: int
    """Divisor of an average."""
    dtype: np.dtype[Any]
    """Dtype of the array that the schedule works on."""
    widens: bool
    """`dtype` is not the caller's."""
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
    array, into, dtype = job.array, job.into, reducing.dtype
    if into is not None and len(into) == len(array) and not reducing.widens:
        return into, None
    memory = context.scratch.take(len(array) * dtype.itemsize)
    return memory[: len(array) * dtype.itemsize].view(dtype), memory


def host_shares(context: CollectiveContext, count: int) -> tuple[Span, ...]:
    """Shares by local rank; empty for non-leaders."""
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
