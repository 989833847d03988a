"""Runs a schedule that reduces, and finishes the result: where narrow floats are rounded, and where averages divide.

Floats narrower than float32 are added up in float32. A schedule in which one rank gets all operands of an element
rounds once, by itself; so does every schedule of two ranks. Any other schedule passes partial results on: these travel
as float32 and are rounded at the end, unless the array is so large that twice the bytes would cost too much. Then each
combination rounds, and an average is scaled before the first one, so that no sum leaves the range of the dtype.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.operations import ReduceCode, Reduction, reduction_of
from nexar.arrays.partition import Span
from nexar.arrays.reduce import finish, folder, round_total, rounds, wide_folder
from nexar.collectives.assembly import Assembly
from nexar.collectives.call import Call
from nexar.collectives.executor import Arithmetic, Run
from nexar.collectives.operations import OperationCode
from nexar.collectives.schedules.catalog import algorithms_of

WIDE: Final = np.dtype(np.float32)
_SCANS: Final = (OperationCode.SCAN, OperationCode.EXCLUSIVE_SCAN)
_SUM: Final = reduction_of("sum")


class Rounding(Enum):
    """How often the elements of one call are rounded to their dtype."""

    NATURAL = "natural"
    """As the arithmetic of the dtype does. An average is divided at the end."""
    ONCE = "once"
    """All operands of an element are combined in one go, which divides an average too."""
    AT_THE_END = "at the end"
    """Partial results are float32; they are divided and rounded at the end."""
    EACH = "each"
    """With each combination. An average is scaled before the first."""


def rounding_of(
    name: str, operation: OperationCode, reduction: Reduction, dtype: np.dtype[Any], *, size: int, large: bool
) -> Rounding:
    """Of a call by the schedule `name` among `size` ranks: the same on every rank."""
    if not rounds(reduction, dtype):
        return Rounding.NATURAL
    if size <= 2 or algorithms_of(operation)[name].in_one_go:
        return Rounding.ONCE
    return Rounding.EACH if large and operation not in _SCANS else Rounding.AT_THE_END


class Reducing(NamedTuple):
    """How calls of one kind reduce: one schedule, operation, dtype and number of ranks. It serves many calls."""

    rounding: Rounding
    reduction: Reduction
    operands: int
    """How many ranks' arrays the result stands for: an average is divided by it."""
    dtype: np.dtype[Any]
    """Of the array that the schedule works on."""
    widens: bool
    """That dtype is not the caller's."""
    arithmetic: Arithmetic

    @classmethod
    def of(cls, rounding: Rounding, reduction: Reduction, dtype: np.dtype[Any], operands: int) -> Self:
        """Of arrays of this dtype."""
        widens = rounding is Rounding.AT_THE_END
        inner = WIDE if widens else dtype
        if rounding is Rounding.ONCE:
            arithmetic = Arithmetic.of(reduction, inner, operands)
        else:
            arithmetic = Arithmetic.of(_SUM if reduction.code is ReduceCode.AVG else reduction, inner)
        return cls(rounding, reduction, operands, inner, widens, arithmetic)

    def load(self, work: NDArray[Any], array: NDArray[Any]) -> None:
        """Put this rank's elements into `work`, on which the schedule works: `array` itself, or memory of its own."""
        if self.widens:
            wide_folder(self.reduction, array.dtype)(work, (array,))
        elif self.rounding is Rounding.EACH and self.reduction.code is ReduceCode.AVG:
            folder(self.reduction, array.dtype, self.operands)(work, (array,))
        elif work is not array:
            np.copyto(work, array)

    def deliver(self, into: NDArray[Any], result: NDArray[Any]) -> None:
        """`into` gets what the schedule left of the elements that are wanted; it may be their memory."""
        if self.widens:
            round_total(self.reduction, into, result, self.operands)
            return
        if into is not result and not np.may_share_memory(into, result):
            np.copyto(into, result)
        if self.rounding is Rounding.NATURAL:
            finish(self.reduction, into, self.operands)


class Job(NamedTuple):
    """What is reduced, flat, and where the result goes."""

    array: NDArray[Any]
    """Stays as it is, unless it is also `into`."""
    into: NDArray[Any] | None
    """Gets `span` of the result; None: nothing is wanted at this rank."""
    reduction: Reduction
    operands: int
    """See Reducing."""
    span: Span


def reduce_by(
    assembly: Assembly,
    call: Call,
    name: str,
    operation: OperationCode,
    job: Job,
    *,
    root: int = 0,
    spans: tuple[Span, ...] | None = None,
    team: list[int] | None = None,
) -> Run:
    """Run the schedule, and finish its result."""
    array, into, reduction, operands, span = job
    size = assembly.group.size if team is None else len(team)
    large = array.nbytes >= assembly.config.large_msg_bytes
    rounding = rounding_of(name, operation, reduction, array.dtype, size=size, large=large)
    reducing = Reducing.of(rounding, reduction, array.dtype, operands)
    work, memory = _work(assembly, job, reducing)
    reducing.load(work, array)
    yield from assembly.execute(
        call, name, operation, work, arithmetic=reducing.arithmetic, root=root, spans=spans, team=team
    )
    if into is not None:
        reducing.deliver(into, work[span.start : span.stop])
    if memory is not None:
        assembly.scratch.give_back(memory)


def _work(assembly: Assembly, job: Job, reducing: Reducing) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """The array that the schedule works on; and the scratch memory behind it, if any."""
    array, into, dtype = job.array, job.into, reducing.dtype
    if into is not None and len(into) == len(array) and not reducing.widens:
        return into, None
    memory = assembly.scratch.take(len(array) * dtype.itemsize)
    return memory[: len(array) * dtype.itemsize].view(dtype), memory
