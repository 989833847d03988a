"""The user's arrays as a compressed all_reduce; written to when it has succeeded, and not before."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.allocations import Allocations
from nexar.arrays.compression.compressor import Compressor
from nexar.arrays.compression.terms import work_dtype
from nexar.arrays.dtypes import kind_of
from nexar.arrays.operand import Operand
from nexar.arrays.operations import ReduceCode, Reduction, reduction_of
from nexar.collectives.assembly import Assembly
from nexar.collectives.compressed import Compressed, Outcome
from nexar.collectives.compressed import all_reduce_compressed as begin
from nexar.collectives.work import Work
from nexar.communicator.calls import Op
from nexar.errors import UsageError

_DEFINED: Final = (ReduceCode.SUM, ReduceCode.AVG)


def all_reduce_compressed(
    assembly: Assembly, array: Any, compressor: Compressor, *, residual: Any, op: Op, out: Any
) -> Work:
    """In place, or in `out`."""
    memory = Allocations()
    given = memory.adapt(array, writable=out is None)
    reduction = _reduction(op, given.array.dtype)
    target = given if out is None else _fitting(memory, "out=", out, given.array, (given.array.dtype,), read=False)
    kept = None if residual is None else _residual(memory, residual, given, target)
    if not isinstance(compressor, Compressor):
        raise UsageError(
            f"{compressor!r} is no compressor; give nexar.TopK(0.01), another one of nexar's, or an instance of a "
            "nexar.Compressor of your own"
        )
    flat = None if kept is None else kept.array.reshape(-1)
    work = begin(assembly, Compressed(given.array.reshape(-1), flat, compressor, reduction)).failing(memory.error)
    writing = _Writing(target, kept)
    return work.then(writing.prepare).commit(writing.write)


class _Writing:
    """The results of one call, on their way into the caller's memory."""

    def __init__(self, target: Operand, residual: Operand | None) -> None:
        self._target = target
        self._residual = residual
        self._outcome: Outcome | None = None

    def prepare(self, outcome: Outcome) -> Any:
        """What the verb returns. Fills only what is memory of ours, of which a number is made now."""
        self._outcome = outcome
        if not self._target.shares:
            _copy(self._target.array, outcome.total)
        return self._target.result()

    def write(self) -> None:
        """The call has succeeded. Memory of the host does not fail now. A device may: if the array's does, the residual
        stays as it was.
        """
        assert self._outcome is not None
        if self._target.shares:
            _copy(self._target.array, self._outcome.total)
        self._target.commit()
        if self._residual is not None and self._outcome.residual is not None:
            _copy(self._residual.array, self._outcome.residual)
            self._residual.commit()


def _copy(into: NDArray[Any], source: NDArray[Any]) -> None:
    with np.errstate(all="ignore"):
        np.copyto(into.reshape(-1), source, casting="unsafe")


def _reduction(op: Op, dtype: np.dtype[Any]) -> Reduction:
    reduction = reduction_of(op)
    if reduction.code not in _DEFINED:
        raise UsageError(
            f"all_reduce_compressed has op='sum' and op='avg', and not {reduction.name!r}: what was left out counts as "
            "nought, which means nothing to it; use all_reduce"
        )
    if kind_of(dtype) != "float":
        raise UsageError(
            f"all_reduce_compressed is for float types, and not for {dtype}; convert it, or use all_reduce"
        )
    return reduction


def _fitting(
    memory: Allocations,
    name: str,
    value: Any,
    like: NDArray[Any],
    dtypes: tuple[np.dtype[Any], ...],
    *,
    read: bool = True,
) -> Operand:
    """An array of the caller's that is written to, and has as many elements as another one. `read`: it is, too."""
    operand = memory.adapt(value, writable=True, read=read)
    found = operand.array
    if found.dtype not in dtypes or found.size != like.size:
        kinds = " or ".join(map(str, dict.fromkeys(dtypes)))
        raise UsageError(
            f"{name} is {found.dtype}{list(found.shape)}, but has to be {kinds}{list(like.shape)}; "
            "give an array of that dtype and as many elements"
        )
    return operand


def _residual(memory: Allocations, value: Any, given: Operand, target: Operand) -> Operand:
    """It may be wider than a half type: then rounding is fed back as well."""
    dtype = given.array.dtype
    residual = _fitting(memory, "residual=", value, given.array, (dtype, work_dtype(dtype)))
    if residual.result() is not value:
        raise UsageError(
            "residual= is a number, which cannot be written to; give an array, zeros before the first call"
        )
    if residual.may_share_memory(given) or residual.may_share_memory(target):
        raise UsageError("residual= lies in the memory of the array; give one of its own, zeros before the first call")
    return residual
