"""a ⊕ b and a ⊕ b ⊕ c … on flat arrays: one pass, no large temporaries, no warnings."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.dtypes import kind_of
from nexar.arrays.half import HALF_TYPES, fold_half, fold_wide, round_half
from nexar.arrays.operations import ReduceCode, ReduceFunction, Reduction, check
from nexar.arrays.quiet import quiet, quiet_ufunc
from nexar.errors import UsageError

Array: TypeAlias = NDArray[Any]
Combiner: TypeAlias = Callable[[Array, Array, Array], None]
"""`(out, left, right)`: out = left ⊕ right."""
Folder: TypeAlias = Callable[[Array, Sequence[Array]], None]
"""`(out, inputs)`: out = ((in0 ⊕ in1) ⊕ in2) …"""

_FEW: Final = 512  # elements: fresh memory for the total is quicker than anything else
# Whole passes are the quickest as long as everything stays in the last-level cache: each start of one costs some time.
# Beyond it blocks, whose running total stays in the second-level cache, save traffic to memory.
_WHOLE_BYTES: Final = 8 << 20
_BLOCK_BYTES: Final = 512 << 10

_UFUNCS: Final = {
    ReduceCode.SUM: np.add,
    ReduceCode.AVG: np.add,  # finish() divides
    ReduceCode.PROD: np.multiply,
    ReduceCode.MIN: np.minimum,  # these propagate NaN
    ReduceCode.MAX: np.maximum,
    ReduceCode.BAND: np.bitwise_and,
    ReduceCode.BOR: np.bitwise_or,
    ReduceCode.BXOR: np.bitwise_xor,
    ReduceCode.LAND: np.logical_and,  # into an array of numbers these write 0 and 1
    ReduceCode.LOR: np.logical_or,
    ReduceCode.LXOR: np.logical_xor,
}
_ROUNDING: Final = (ReduceCode.SUM, ReduceCode.PROD, ReduceCode.AVG)
_LOGIC: Final = (np.logical_and, np.logical_or, np.logical_xor)
_LOGICAL: Final = (ReduceCode.LAND, ReduceCode.LOR, ReduceCode.LXOR)


def rounds(reduction: Reduction, dtype: np.dtype[Any]) -> bool:
    """Whether partial results lose digits that float32 keeps: sums, products and averages of narrow floats. Minima,
    maxima and logic are exact, and a user's function works on the dtype itself.
    """
    return dtype in HALF_TYPES and reduction.code in _ROUNDING


def combiner(reduction: Reduction, dtype: np.dtype[Any], size: int = 1) -> Combiner:
    """What combines two flat contiguous arrays of `dtype`; `out` may be one of them. UsageError if it is not defined.

    Any thread may call it, several at a time. Nothing is warned of, whatever np.seterr says: overflow is infinity, as
    in IEEE 754, and integers wrap. An error of a user's function comes out as it is, with `out` untouched. `size` as
    for `folder`.
    """
    check(reduction, dtype)
    if reduction.function is not None:
        return _user_combiner(reduction.name, reduction.function)
    if _divides(reduction, size):
        return _dividing_combiner(dtype, size)
    return _combiner(_UFUNCS[reduction.code], dtype)


def folder(reduction: Reduction, dtype: np.dtype[Any], size: int = 1) -> Folder:
    """What folds one or more flat contiguous arrays of `dtype`, from the left; `out` may be any of them.

    An average is divided by `size`. Half types accumulate in f32 over all inputs, are divided there, and are rounded
    once. Else as `combiner`.
    """
    check(reduction, dtype)
    if reduction.function is not None:
        return _user_folder(_user_combiner(reduction.name, reduction.function))
    if _divides(reduction, size):
        return _dividing_folder(dtype, size)
    return _folder(_UFUNCS[reduction.code], dtype)


def wide_folder(reduction: Reduction, dtype: np.dtype[Any]) -> Folder:
    """What folds arrays of a half type into a float32 array, without rounding; an average is not divided yet."""
    check(reduction, dtype)
    ufunc = _UFUNCS[reduction.code]
    return lambda out, inputs: _fold_wide_quietly(ufunc, out, inputs)


def round_total(reduction: Reduction, out: Array, total: Array, size: int) -> None:
    """`out`, of a half type, becomes the float32 `total` of `size` ranks, rounded once; an average is divided before.
    Overwrites `total`.
    """
    _round_half_quietly(_UFUNCS[reduction.code], out, total, size if reduction.code is ReduceCode.AVG else 1)


def combine(reduction: Reduction, out: Array, left: Array, right: Array) -> None:
    """out = left ⊕ right, once; who does it often keeps the `combiner`."""
    combiner(reduction, out.dtype)(out, left, right)


def fold(reduction: Reduction, out: Array, inputs: Sequence[Array]) -> None:
    """out = ((in0 ⊕ in1) ⊕ in2) …, once; who does it often keeps the `folder`."""
    folder(reduction, out.dtype)(out, inputs)


def finish(reduction: Reduction, array: Array, size: int) -> None:
    """What is left to do with the total of `size` ranks, in place: avg divides by it, what one rank alone brought to a
    logical operation becomes zeros and ones too, the others are done.

    The total of a half type is rounded already: to divide before that, give `size` to the folder, or use round_total.
    """
    if size == 1:
        if reduction.code in _LOGICAL:
            fold(reduction, array, (array,))
        return
    if reduction.code is not ReduceCode.AVG:
        return
    if array.dtype in HALF_TYPES:
        _fold_half_quietly(np.add, array, [array], size)
    else:
        _divide_quietly(array, array, array.dtype.type(size))


@cache
def _combiner(ufunc: np.ufunc, dtype: np.dtype[Any]) -> Combiner:
    if dtype in HALF_TYPES:
        return lambda out, left, right: _fold_half_quietly(ufunc, out, (left, right))
    if kind_of(dtype) in ("float", "complex"):
        return quiet_ufunc(ufunc)
    return lambda out, left, right: ufunc(left, right, out=out)  # integers wrap in silence


@cache
def _folder(ufunc: np.ufunc, dtype: np.dtype[Any]) -> Folder:
    run = _fold_half_quietly if dtype in HALF_TYPES else _fold_plain_quietly
    if ufunc not in _LOGIC:
        return lambda out, inputs: run(ufunc, out, inputs)

    def call(out: Array, inputs: Sequence[Array]) -> None:
        if len(inputs) == 1:
            run(np.logical_or, out, (inputs[0], inputs[0]))  # one array alone becomes zeros and ones too
        else:
            run(ufunc, out, inputs)

    return call


def _divides(reduction: Reduction, size: int) -> bool:
    return reduction.code is ReduceCode.AVG and size > 1


@cache
def _dividing_combiner(dtype: np.dtype[Any], size: int) -> Combiner:
    if dtype in HALF_TYPES:
        return lambda out, left, right: _fold_half_quietly(np.add, out, (left, right), size)
    add, divisor = _combiner(np.add, dtype), dtype.type(size)

    def call(out: Array, left: Array, right: Array) -> None:
        add(out, left, right)
        _divide_quietly(out, out, divisor)

    return call


@cache
def _dividing_folder(dtype: np.dtype[Any], size: int) -> Folder:
    if dtype in HALF_TYPES:
        return lambda out, inputs: _fold_half_quietly(np.add, out, inputs, size)
    divisor = dtype.type(size)

    def call(out: Array, inputs: Sequence[Array]) -> None:
        _fold_plain_quietly(np.add, out, inputs)
        _divide_quietly(out, out, divisor)

    return call


def _fold_plain(ufunc: np.ufunc, out: Array, inputs: Sequence[Array]) -> None:
    if len(inputs) == 1:
        np.copyto(out, inputs[0])
    elif len(inputs) == 2:
        ufunc(inputs[0], inputs[1], out=out)
    elif out.size <= _FEW:
        _fold_piece(ufunc, out, None, inputs)
    elif out.nbytes <= _WHOLE_BYTES and not any(np.may_share_memory(out, one) for one in inputs[2:]):
        _fold_piece(ufunc, out, out, inputs)
    else:
        _fold_blocks(ufunc, out, inputs)


def _fold_blocks(ufunc: np.ufunc, out: Array, inputs: Sequence[Array]) -> None:
    step = _BLOCK_BYTES // out.itemsize
    total = _scratch.memory.view(out.dtype)
    for start in range(0, out.size, step):
        block = slice(start, start + step)
        _fold_piece(ufunc, out[block], total[: min(step, out.size - start)], [one[block] for one in inputs])


def _fold_piece(ufunc: np.ufunc, out: Array, room: Array | None, inputs: Sequence[Array]) -> None:
    # With room elsewhere only the last step writes to `out`, when all is read: it may be any of the inputs.
    total = ufunc(inputs[0], inputs[1], out=room)
    for one in inputs[2:-1]:
        ufunc(total, one, out=total)
    ufunc(total, inputs[-1], out=out)


class _Scratch(threading.local):
    """One block per thread, kept: fresh memory would cost more than the arithmetic."""

    def __init__(self) -> None:
        self.memory = np.empty(_BLOCK_BYTES, np.uint8)


_scratch: Final = _Scratch()

_fold_plain_quietly: Final = quiet(_fold_plain)
_fold_half_quietly: Final = quiet(fold_half)
_fold_wide_quietly: Final = quiet(fold_wide)
_round_half_quietly: Final = quiet(round_half)
_divide_quietly: Final = quiet_ufunc(np.divide)


def _user_combiner(name: str, function: ReduceFunction) -> Combiner:
    def call(out: Array, left: Array, right: Array) -> None:
        np.copyto(out, _checked(name, function(left, right), out))

    return call


def _checked(name: str, result: object, like: Array) -> Array:
    if not isinstance(result, np.ndarray) or result.dtype != like.dtype or result.shape != like.shape:
        raise UsageError(
            f"the reduction function {name} returned {_describe(result)} for two arrays of {_describe(like)}; "
            "it must return an array of the same shape and dtype, e.g. with .astype(a.dtype)"
        )
    return result


def _describe(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    return f"{type(value).__name__}, which is no array"


def _user_folder(combine_two: Combiner) -> Folder:
    def call(out: Array, inputs: Sequence[Array]) -> None:
        total = inputs[0].copy()
        for one in inputs[1:]:
            combine_two(total, total, one)
        np.copyto(out, total)

    return call
