"""Collective calls on the user's arrays: check arguments, start the call, convert the result.

A call in place returns its array; a new array is of the input's kind; a number gives a number. Arguments are checked
before the call takes its sequence number, so no rank waits for a rejected call. A failed allocation fails the call
later, because the other ranks need an answer (nexar.arrays.operand).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.compression.base import Compressor, work_dtype
from nexar.arrays.dtypes import kind_of
from nexar.arrays.operand import Allocations, Operand
from nexar.arrays.operators import ReduceCode, Reduction, check, identity, reduction_of
from nexar.arrays.views import Span, split
from nexar.collectives import data_movement
from nexar.collectives.compressed import CompressedArguments, CompressedResult
from nexar.collectives.compressed import all_reduce_compressed as begin
from nexar.collectives.context import CallOptions, CollectiveContext
from nexar.collectives.operations import COLLECTIVES, Collective, Layout, OperationCode, RootRole
from nexar.collectives.prepared_call import CallArrays, begin_call
from nexar.collectives.requests import PendingCollective
from nexar.errors import BufferMismatch, UsageError
from nexar.types import whole

# Name of a reduction, or a function of two arrays that returns one.
Op = str | Callable[[Any, Any], Any]

# Local names: an attribute of an enum class costs 0.1 µs, and a small call makes several comparisons.
_NO_ROOT, _SOURCE, _TARGET = RootRole.NONE, RootRole.SOURCE, RootRole.TARGET
_COPY, _GATHERED, _SHARE, _EXCHANGED = Layout.COPY, Layout.GATHERED, Layout.SHARE, Layout.EXCHANGED


def start_in_place(
    context: CollectiveContext,
    code: OperationCode,
    array: Any,
    options: CallOptions,
    *,
    op: Op = "sum",
    commutative: bool = True,
    root: int = 0,
    out: Any = None,
) -> PendingCollective:
    """Start an operation of Layout.IN_PLACE. Ignores `op` or `root` if the operation has none."""
    row = COLLECTIVES[code]
    rank_of_root = None if row.root is _NO_ROOT else context.group.check(root)
    at_root = context.group.rank == rank_of_root
    is_source, is_target = row.root is _SOURCE, row.root is _TARGET
    written = at_root if is_target else not (at_root and is_source)
    memory = Allocations()
    given = memory.adapt(array, writable=written and out is None, read=at_root or not is_source)
    reduction = None if row.operands is None else _reduction(op, given.array, commutative=commutative)
    target = (given if out is None else _target(memory, given, out)) if at_root or not is_target else None
    # the target holds a copy of the input, even if they overlap
    mine = _flat(given.array if target is None else target.array)
    arrays = CallArrays(mine, None if target is None else mine, reduction, rank_of_root)
    work = begin_call(context, row, arrays, options).failing(memory.error)
    return work.map_result(
        lambda _: None if target is None else _in_place_result(target), writes=target is not None and target.shares
    )


def start_new(
    context: CollectiveContext,
    code: OperationCode,
    array: Any,
    options: CallOptions,
    *,
    op: Op = "sum",
    commutative: bool = True,
    root: int = 0,
    out: Any = None,
    counts: Sequence[int] | None = None,
) -> PendingCollective:
    """Start an operation that returns a new array, or `out`. Ignores `op` or `root` if the operation has none."""
    row, group = COLLECTIVES[code], context.group
    rank_of_root = None if row.root is _NO_ROOT else group.check(root)
    memory = Allocations()
    given = memory.adapt(array)
    reduction = None if row.operands is None else _new_reduction(row, op, given.array, commutative=commutative)
    shape, spans = _result_shape(context, row, given.array, counts)
    has_result = row.root is not _TARGET or group.rank == rank_of_root
    output = _output(memory, given, shape, out) if has_result else None
    source, target = _flat(given.array), None
    if output is not None:
        target = _flat(output.array)
        if row.layout is _COPY or np.may_share_memory(source, target):
            source = _separate(memory, row, source, target, group.rank)
    arrays = CallArrays(source, target, reduction, rank_of_root, spans, counts is not None)
    work = begin_call(context, row, arrays, options).failing(memory.error)
    return work.map_result(
        lambda _: None if output is None else _new_result(given, output, out), writes=_writes(output, out)
    )


def _new_reduction(row: Collective, op: Op, array: NDArray[Any], *, commutative: bool) -> Reduction:
    reduction = _reduction(op, array, commutative=commutative)
    if row.has_identity:
        identity(reduction, array.dtype)  # raises on every rank if the reduction has no identity
    return reduction


def _result_shape(
    context: CollectiveContext, row: Collective, array: NDArray[Any], counts: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[Span, ...] | None]:
    """Return the result's shape and, for Layout.SHARE, each rank's elements."""
    size = context.group.size
    if row.layout is _GATHERED:
        return (size, *array.shape), None
    if row.layout is _SHARE:
        rows = _rows(array, size, counts)
        width = math.prod(array.shape[1:])
        spans = tuple(Span(each.start * width, each.stop * width) for each in rows)
        return (rows[context.group.rank].count, *array.shape[1:]), spans
    if row.layout is _EXCHANGED:
        _check_blocks(array, size, row.name)
    return array.shape, None


def _separate(
    memory: Allocations, row: Collective, source: NDArray[Any], target: NDArray[Any], rank: int
) -> NDArray[Any]:
    """Return the call's input: a copy, or the part of the result where the call expects it."""
    if row.layout is _COPY:
        if memory.error is None:
            np.copyto(target, source)
        return target
    if row.layout is _GATHERED and _are_same(source, target[rank * len(source) :]):
        return source
    return memory.copy(source)


def scatter(context: CollectiveContext, array: Any, root: int, out: Any, options: CallOptions) -> PendingCollective:
    """Start scatter."""
    root = context.group.check(root)
    memory = Allocations()
    given = memory.adapt(array) if context.group.rank == root else None
    output = None if out is None else memory.adapt(out, writable=True, read=False)
    blocks = None if given is None else _blocks(given.array, context.group.size, "scatter")
    work = data_movement.scatter(context, blocks, root, OperationCode.SCATTER, options).failing(memory.error)

    def made(block: NDArray[Any]) -> Any:
        if output is None:
            return block if given is None else given.like(block)
        _fill(output, block, root)
        return _in_place_result(output)

    return work.map_result(made)


# -- unequal counts ------------------------------------------------------------------------------------------------


def all_gather_v(context: CollectiveContext, array: Any) -> PendingCollective:
    """Start all_gather_v."""
    memory = Allocations()
    given = memory.adapt(array)
    return data_movement.all_gather_v(context, given.array).failing(memory.error).map_result(_each(given))


def gather_v(context: CollectiveContext, array: Any, root: int) -> PendingCollective:
    """Start gather_v."""
    memory = Allocations()
    given = memory.adapt(array)
    work = data_movement.gather_v(context, given.array, context.group.check(root))
    return work.failing(memory.error).map_result(lambda found: None if found is None else _each(given)(found))


def scatter_v(context: CollectiveContext, arrays: Sequence[Any] | None, root: int) -> PendingCollective:
    """Start scatter_v."""
    root = context.group.check(root)
    memory = Allocations()
    given = _list(memory, context, arrays, "scatter_v") if context.group.rank == root else None
    blocks = None if given is None else [each.array for each in given]
    work = data_movement.scatter(context, blocks, root, OperationCode.SCATTER_V)
    return work.failing(memory.error).map_result(lambda block: block if given is None else given[0].like(block))


def all_to_all_v(context: CollectiveContext, arrays: Sequence[Any]) -> PendingCollective:
    """Start all_to_all_v."""
    memory = Allocations()
    given = _list(memory, context, arrays, "all_to_all_v")
    if len({each.array.dtype for each in given}) > 1:
        raise UsageError("all_to_all_v takes arrays of one dtype; convert them before")
    work = data_movement.all_to_all_v(context, [each.array for each in given])
    return work.failing(memory.error).map_result(_each(given[0]))


# -- inside --------------------------------------------------------------------------------------------------------


def _reduction(op: Op, array: NDArray[Any], *, commutative: bool) -> Reduction:
    reduction = reduction_of(op, commutative=commutative)
    check(reduction, array.dtype)
    return reduction


def _flat(array: NDArray[Any]) -> NDArray[Any]:
    return array.reshape(-1)


def _are_same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return bool(one.ctypes.data == other.ctypes.data)


def _target(memory: Allocations, given: Operand, out: object) -> Operand:
    """Return `out`, filled with the input."""
    target = memory.adapt(out, writable=True, read=False)
    _fit(target, given.array.shape, given.array.dtype)
    if memory.error is None:
        np.copyto(_flat(target.array), _flat(given.array))
    return target


def _output(memory: Allocations, given: Operand, shape: tuple[int, ...], out: Any) -> Operand:
    if out is None:
        return memory.allocate(given, shape)
    output = memory.adapt(out, writable=True, read=False)
    _fit(output, shape, given.array.dtype)
    return output


def _fit(output: Operand, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    found = output.array
    if found.dtype != dtype or found.size != math.prod(shape):
        raise UsageError(
            f"out= is {found.dtype}{list(found.shape)}, but the result is {dtype}{list(shape)}; "
            "give an array of that dtype and as many elements"
        )


def _fill(output: Operand, block: NDArray[Any], root: int) -> None:
    if output.array.dtype != block.dtype or output.array.size != block.size:
        raise BufferMismatch(
            expected=f"{output.array.dtype}[{output.array.size}]", found=f"{block.dtype}[{block.size}]", source=root
        )
    np.copyto(_flat(output.array), _flat(block))


def _in_place_result(target: Operand) -> Any:
    target.commit()
    return target.result()


def _new_result(given: Operand, output: Operand, out: Any) -> Any:
    return given.like(output.array) if out is None else _in_place_result(output)


def _writes(output: Operand | None, out: Any) -> bool:
    return out is not None and output is not None and output.shares


def _each(given: Operand) -> Callable[[Sequence[NDArray[Any]]], list[Any]]:
    return lambda found: [given.like(array) for array in found]


def _rows(array: NDArray[Any], size: int, counts: Sequence[int] | None) -> tuple[Span, ...]:
    if not array.ndim:
        raise UsageError("reduce_scatter splits axis 0, and a single number has none; give an array")
    if counts is None:
        return split(len(array), size)
    rows = [whole(count) for count in counts]
    if len(rows) != size or any(count is None or count < 0 for count in rows) or sum(counts) != len(array):
        raise UsageError(
            f"counts={list(counts)} do not cut {len(array)} rows into {size} parts; give one count per rank, "
            f"which add up to {len(array)}"
        )
    ends = np.cumsum([0, *counts]).tolist()
    return tuple(Span(start, stop) for start, stop in pairwise(ends))


def _check_blocks(array: NDArray[Any], size: int, operation: str) -> None:
    if not array.ndim or len(array) % size:
        raise UsageError(
            f"{operation} needs axis 0 in {size} equal blocks, which shape {list(array.shape)} does not give; "
            f"pad it, or use {operation}_v with a list of arrays"
        )


def _blocks(array: NDArray[Any], size: int, operation: str) -> list[NDArray[Any]]:
    """A block of one row loses its axis 0, unless that is its only axis."""
    _check_blocks(array, size, operation)
    rows = len(array) // size
    if rows == 1 and array.ndim > 1:
        return list(array)
    return [array[rank * rows : (rank + 1) * rows] for rank in range(size)]


def _list(
    memory: Allocations, context: CollectiveContext, arrays: Sequence[Any] | None, operation: str
) -> list[Operand]:
    if arrays is None or len(arrays) != context.group.size:
        found = "none" if arrays is None else len(arrays)
        raise UsageError(f"{operation} needs one array for each of {context.group.size} ranks, and got {found}")
    return [memory.adapt(each) for each in arrays]


_DEFINED: Final = (ReduceCode.SUM, ReduceCode.AVG)


def all_reduce_compressed(
    context: CollectiveContext, array: Any, compressor: Compressor, *, residual: Any, op: Op, out: Any
) -> PendingCollective:
    """Start all_reduce_compressed, which writes the caller's arrays only on success."""
    memory = Allocations()
    given = memory.adapt(array, writable=out is None)
    reduction = _compressed_reduction(op, given.array.dtype)
    target = (
        given if out is None else _checked_operand(memory, "out=", out, given.array, (given.array.dtype,), read=False)
    )
    kept = None if residual is None else _residual(memory, residual, given, target)
    if not isinstance(compressor, Compressor):
        raise UsageError(
            f"{compressor!r} is not a compressor; give nexar.TopK(0.01), another one of nexar's, or an instance of a "
            "nexar.Compressor of your own"
        )
    flat = None if kept is None else kept.array.reshape(-1)
    work = begin(context, CompressedArguments(given.array.reshape(-1), flat, compressor, reduction)).failing(
        memory.error
    )
    writing = _ResultWriter(target, kept)
    return work.map_result(writing.prepare).commit(writing.write)


class _ResultWriter:
    def __init__(self, target: Operand, residual: Operand | None) -> None:
        self._target = target
        self._residual = residual
        self._outcome: CompressedResult | None = None

    def prepare(self, outcome: CompressedResult) -> Any:
        self._outcome = outcome
        if not self._target.shares:
            _copy(self._target.array, outcome.total)
        return self._target.result()

    def write(self) -> None:
        """The residual is unchanged if a device fails on the array."""
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


def _compressed_reduction(op: Op, dtype: np.dtype[Any]) -> Reduction:
    reduction = reduction_of(op)
    if reduction.code not in _DEFINED:
        raise UsageError(
            f"all_reduce_compressed supports op='sum' and op='avg', not {reduction.name!r}; use all_reduce\n"
            "elements that are not sent count as zero, which only these two can use"
        )
    if kind_of(dtype) != "float":
        raise UsageError(f"all_reduce_compressed supports float types, not {dtype}; convert it, or use all_reduce")
    return reduction


def _checked_operand(
    memory: Allocations,
    name: str,
    value: Any,
    like: NDArray[Any],
    dtypes: tuple[np.dtype[Any], ...],
    *,
    read: bool = True,
) -> Operand:
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
    """The residual of a 16-bit array may be wider: then it holds rounding errors too."""
    dtype = given.array.dtype
    residual = _checked_operand(memory, "residual=", value, given.array, (dtype, work_dtype(dtype)))
    if residual.result() is not value:
        raise UsageError(
            "residual= is a number, which cannot be written to; give an array, zeros before the first call"
        )
    if residual.may_share_memory(given) or residual.may_share_memory(target):
        raise UsageError("residual= lies in the memory of the array; give one of its own, zeros before the first call")
    return residual
