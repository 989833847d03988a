"""Element-wise reductions of flat arrays, without large temporaries and warnings.

`nexar_native.reduce` computes them. Without the native package NumPy does, with the same bits except for the payload of
a NaN: so ranks with and without the package may compute the same element, and none has to know which others have it.

Types narrower than f32 are computed in f32 and rounded once to nearest even, in cache-sized blocks.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from nexar.arrays.dtypes import code_of, kind_of
from nexar.arrays.operators import ReduceCode, ReduceFunction, Reduction, check
from nexar.errors import UsageError
from nexar.native import native_problem

# An overflowing sum must be infinite on all ranks. If the caller's np.seterr(over="raise") or a warnings filter
# applied, one rank would leave a collective in which the others wait for it. NumPy 2 keeps its error state in a context
# variable; a call in a copy of our context costs 0.1 µs, np.errstate 1 µs. NumPy 1 keeps it per thread, where a change
# would outlive the call. It is a copy because a context can be entered only once at a time, and several threads (and
# signal handlers) reduce.


def _silent_context() -> contextvars.Context | None:
    context = contextvars.Context()
    before = np.geterr()
    context.run(np.seterr, all="ignore")
    if np.geterr() == before:
        return context
    np.seterr(**before)
    return None


_CONTEXT: Final = _silent_context()


def quiet(function: Callable[..., object]) -> Callable[..., None]:
    """Returns `function` with floating-point errors ignored and its result dropped."""
    if _CONTEXT is None:
        return _with_errstate(function)
    copy = _CONTEXT.copy

    def call(*arguments: object) -> None:
        copy().run(function, *arguments)

    return call


def quiet_ufunc(ufunc: Callable[..., Any]) -> Callable[[Any, Any, Any], None]:
    """Returns `(out, left, right)` with floating-point errors ignored."""
    if _CONTEXT is None:
        return _with_errstate(lambda out, left, right: ufunc(left, right, out=out))
    copy = _CONTEXT.copy

    def call(out: Any, left: Any, right: Any) -> None:
        copy().run(ufunc, left, right, out=out)

    return call


def _with_errstate(function: Callable[..., object]) -> Callable[..., None]:
    def call(*arguments: object) -> None:
        with np.errstate(all="ignore"):
            function(*arguments)

    return call


Array: TypeAlias = NDArray[Any]

BLOCK: Final = 64 << 10  # elements: a pass uses two f32 rows, 512 KiB, which fit the second-level cache
_FEW_NARROW: Final = 1536  # elements; up to here fewer calls matter more than faster ones
_VERY_FEW: Final = 256  # elements; up to here a single call is fastest

# NumPy converts f16 and ml_dtypes converts f8 element by element; integer arithmetic on whole rows is faster. If the
# bits of a narrow float are shifted so that its exponent ends where that of an f32 ends, they are an f32 of the same
# value except for a power of two (2⁻¹¹² for f16). Subnormal numbers stay subnormal, zeros stay zero. Sums, minima and
# maxima commute with a common power of two, so they are computed unscaled and exactly as in f32: subnormal f32 are
# multiples of 2⁻¹⁴⁹, so nothing is lost at the lower end. Rounding adds half of the last remaining place as an integer,
# also for subnormals, because the layouts agree; a carry correctly moves into the exponent. Only infinities and NaN are
# wrong. A block that contains one, or whose result is as large as one, is computed by conversion. bf16 is the upper
# half of an f32: nothing is scaled, infinities are right, and a NaN from widened ones has zeros in the lower half, so
# rounding does not change it.


class _Layout(NamedTuple):
    """Sign, exponent, mantissa, with IEEE's bias: an exponent of e bits has the bias 2ᵉ⁻¹ - 1."""

    signed: np.dtype[Any]
    unsigned: np.dtype[Any]
    shift: int  # from the last place of the narrow type to that of f32
    nonfinite_from: int | None  # bits of the smallest magnitude that is not finite; None: they need no care


_LAYOUTS: Final[dict[np.dtype[Any], _Layout]] = {
    np.dtype(np.float16): _Layout(np.dtype(np.int16), np.dtype(np.uint16), 13, 0x7C00),
    np.dtype(ml_dtypes.bfloat16): _Layout(np.dtype(np.int16), np.dtype(np.uint16), 16, None),
    np.dtype(ml_dtypes.float8_e4m3fn): _Layout(np.dtype(np.int8), np.dtype(np.uint8), 20, 0x7F),
    np.dtype(ml_dtypes.float8_e5m2): _Layout(np.dtype(np.int8), np.dtype(np.uint8), 21, 0x7C),
}

NARROW_FLOATS: Final = frozenset(_LAYOUTS)

_SAME_IN_NARROW: Final = (np.add, np.multiply)  # these types compute via f32 too; min and max of -0 and 0 differ
_HOMOGENEOUS: Final = (np.add, np.minimum, np.maximum)  # f(s·a, s·b) = s·f(a, b)


class _NarrowScratch(threading.local):
    """Per thread: fresh memory costs more than the arithmetic."""

    def __init__(self) -> None:
        pair = np.empty(2 * BLOCK, np.float32)
        self.total, self.operand = pair[:BLOCK], pair[BLOCK:]
        self.index = pair.view(np.intp)[:BLOCK]  # in the memory of the pair: table lookups do not widen
        self.spare = np.empty(BLOCK, np.int32)


_narrow_scratch: Final = _NarrowScratch()


def fold_narrow(arithmetic: np.ufunc, out: Array, inputs: Sequence[Array], divisor: int = 1) -> None:
    """out = (((in0 ⊕ in1) ⊕ in2) …) / divisor, rounded once. `out` may be an input."""
    if out.size <= _VERY_FEW and len(inputs) == 2 and divisor == 1 and arithmetic in _SAME_IN_NARROW:
        arithmetic(inputs[0], inputs[1], out=out)
        return
    fold = _method(arithmetic, out, len(inputs), divisor)
    for start in range(0, out.size, BLOCK):
        block = slice(start, start + BLOCK)
        pieces = [one[block] for one in inputs]
        if not fold(arithmetic, out[block], pieces, divisor):
            _fold_by_conversion(arithmetic, out[block], pieces, divisor)


def fold_wide(arithmetic: np.ufunc, out: Array, inputs: Sequence[Array]) -> None:
    """out = ((in0 ⊕ in1) ⊕ in2) …, in f32; `out` is separate memory."""
    widen = _widening(inputs[0].dtype, out.size)
    for start in range(0, out.size, BLOCK):
        block = slice(start, start + BLOCK)
        total = out[block]
        widen(inputs[0][block], total)
        for one in inputs[1:]:
            operand = _narrow_scratch.operand[: total.size]
            widen(one[block], operand)
            arithmetic(total, operand, out=total)


def round_narrow(arithmetic: np.ufunc, out: Array, total: Array, divisor: int = 1) -> None:
    """out = total / divisor, rounded once. `total` is f32 and overwritten."""
    bits = _bits_of(out.dtype)
    by_bits = out.size > _FEW_NARROW and bits.can(
        arithmetic, 2 * divisor
    )  # twice: the quotient and its scaling both round
    for start in range(0, out.size, BLOCK):
        block = slice(start, start + BLOCK)
        piece = total[block]
        if divisor != 1:
            np.divide(piece, np.float32(divisor), piece)
        if not (by_bits and bits.round(piece, out[block])):
            np.copyto(out[block], piece, casting="unsafe")


def _widening(dtype: np.dtype[Any], count: int) -> Callable[[Array, Array], None]:
    if count <= _FEW_NARROW or dtype == ml_dtypes.bfloat16:  # its conversion to f32 is fast
        return _convert
    return _bits_of(dtype).to_float


def _convert(source: Array, into: Array) -> None:
    np.copyto(into, source)


def _method(arithmetic: np.ufunc, out: Array, inputs: int, divisor: int) -> Callable[..., bool]:
    if out.size <= _FEW_NARROW:
        return _fold_by_conversion
    if out.itemsize == 1 and inputs == 2 and divisor == 1:
        return _fold_by_table
    bits = _bits_of(out.dtype)
    return bits.fold if bits.can(arithmetic, divisor) else _fold_by_conversion


def _fold_by_conversion(arithmetic: np.ufunc, out: Array, inputs: Sequence[Array], divisor: int) -> bool:
    total, operand = _narrow_scratch.total[: out.size], _narrow_scratch.operand[: out.size]
    np.copyto(total, inputs[0])
    for one in inputs[1:]:
        np.copyto(operand, one)
        arithmetic(total, operand, out=total)
    if divisor != 1:
        np.divide(total, np.float32(divisor), total)
    np.copyto(out, total, casting="unsafe")
    return True


def _fold_by_table(arithmetic: np.ufunc, out: Array, inputs: Sequence[Array], _divisor: int) -> bool:
    """Two bytes have 65,536 results."""
    table = _table(arithmetic, out.dtype)  # first, because making it uses the scratch memory too
    count, index = out.size, _narrow_scratch.index[: out.size]
    both = _narrow_scratch.spare.view(np.uint16)
    left, right = both[:count], both[BLOCK : BLOCK + count]
    np.copyto(left, inputs[0].view(np.uint8))
    np.left_shift(left, _EIGHT, left)
    np.copyto(right, inputs[1].view(np.uint8))
    np.bitwise_or(left, right, left)
    np.copyto(index, left)
    table.take(index, out=out.view(np.uint8), mode="clip")  # the default mode would work on a copy of `out`
    return True


_EIGHT: Final = np.array(8, np.uint16)


@cache
def _table(arithmetic: np.ufunc, dtype: np.dtype[Any]) -> Array:
    table, every = np.empty((256, 256), dtype), np.arange(256, dtype=np.uint8).view(dtype)
    for left, row in zip(every, table, strict=True):
        _fold_by_conversion(arithmetic, row, [left, every], 1)
    return table.reshape(-1).view(np.uint8)


@cache
def _bits_of(dtype: np.dtype[Any]) -> _Bits:
    return _Bits(_LAYOUTS[dtype])


class _Bits:
    """Widening and rounding of one type by integer arithmetic."""

    def __init__(self, layout: _Layout) -> None:
        self._layout = layout
        self.scaled = layout.nonfinite_from is not None
        width = 8 * layout.signed.itemsize
        # Constants are 0-d arrays: converting a Python number costs as much as the call.
        self._shift = np.array(layout.shift, np.int32)
        self._mask = np.array((0x7FFFFFFF >> (31 - layout.shift - (width - 1))) - (1 << 31), np.int32)
        self._one = np.array(1, np.int32)
        self._below_half = np.array((1 << (layout.shift - 1)) - 1, np.int32)
        self._sign_shift = np.array(32 - width, np.int32)
        self._sign = np.array(1 << (width - 1), np.int32)
        self._nonfinite_from = layout.nonfinite_from or 0
        # The difference of the biases: that of f32 is 127.
        exponent = 127 - ((1 << (width - 2 - (23 - layout.shift))) - 1)
        self._scale, self._unscale = np.array(2.0**-exponent, np.float32), np.array(2.0**exponent, np.float32)
        self._doubled = 1 << (23 - layout.shift)  # bits that doubling adds to a magnitude

    def can(self, arithmetic: np.ufunc, divisor: int) -> bool:
        """Whether the result of scaled numbers is exactly the scaled result.

        A quotient of n is the middle between two numbers, or at least 1/2n of a last place away. f32 has 2⁻ˢ of a last
        place, so for n < 2ˢ rounding to f32 first is harmless.
        """
        return not self.scaled or (arithmetic in _HOMOGENEOUS and divisor < 1 << self._layout.shift)

    def fold(self, arithmetic: np.ufunc, out: Array, inputs: Sequence[Array], divisor: int) -> bool:
        """Returns False, with `out` unchanged, for infinities or NaN."""
        count = out.size
        total, operand = _narrow_scratch.total[:count], _narrow_scratch.operand[:count]
        largest = max(map(self._largest, inputs)) if self.scaled else -1
        if largest >= self._nonfinite_from:
            return False
        self._widen(inputs[0], total)
        for one in inputs[1:]:
            self._widen(one, operand)
            arithmetic(total, operand, out=total)
        if divisor != 1:
            np.divide(total, np.float32(divisor), total)
        # n numbers sum to at most n times the largest, at most 2ᵏ times it.
        bound = largest + self._doubled * (len(inputs) - 1).bit_length()
        return self._round(total.view(np.int32), out.view(self._layout.signed), careful=bound >= self._nonfinite_from)

    def to_float(self, source: Array, into: Array) -> None:
        if self._largest(source) >= self._nonfinite_from:
            np.copyto(into, source)
            return
        self._widen(source, into)
        np.multiply(into, self._unscale, into)  # exact: a power of two, and subnormal numbers become normal

    def round(self, total: Array, out: Array) -> bool:
        """Returns False, with both unchanged, for infinities, NaN and too large numbers. For subnormal results scaling
        rounds first, which is harmless if `can`.
        """
        if not self.scaled:
            return self._round(total.view(np.int32), out.view(self._layout.signed), careful=False)
        wide = _narrow_scratch.operand[: out.size]
        np.multiply(total, self._scale, wide)
        return self._round(wide.view(np.int32), out.view(self._layout.signed), careful=True)

    def _largest(self, source: Array) -> int:
        return _largest(source.view(self._layout.signed), source.view(self._layout.unsigned), int(self._sign))

    def _widen(self, source: Array, into: Array) -> None:
        wide = into.view(np.int32)
        np.copyto(wide, source.view(self._layout.signed))
        np.left_shift(wide, self._shift, wide)
        if self.scaled:
            np.bitwise_and(wide, self._mask, wide)  # sign only at the top, not in the exponent's upper bits

    def _round(self, wide: Array, out: Array, *, careful: bool) -> bool:
        spare = _narrow_scratch.spare[: out.size]
        np.right_shift(wide, self._shift, spare)
        np.bitwise_and(spare, self._one, spare)
        np.add(wide, spare, wide)
        np.add(wide, self._below_half, wide)
        if (
            self.scaled
            and careful
            and _largest(wide, wide.view(np.uint32), 1 << 31) >= self._nonfinite_from << self._layout.shift
        ):
            return False
        np.right_shift(wide, self._shift, spare)
        if self.scaled:
            np.right_shift(wide, self._sign_shift, wide)
            np.bitwise_and(wide, self._sign, wide)
            np.bitwise_or(spare, wide, spare)
        np.copyto(out, spare, casting="unsafe")
        return True


def _largest(signed: Array, unsigned: Array, sign: int) -> int:
    """Positive numbers are largest as signed integers, negative ones as unsigned."""
    return max(int(np.maximum.reduce(signed)), int(np.maximum.reduce(unsigned)) - sign)


Combiner: TypeAlias = Callable[[Array, Array, Array], None]
"""`(out, left, right)`: out = left ⊕ right."""
Folder: TypeAlias = Callable[[Array, Sequence[Array]], None]
"""`(out, inputs)`: out = ((in0 ⊕ in1) ⊕ in2) …"""

_FEW: Final = 512  # elements: fresh memory for the total is fastest
# Whole passes are fastest while everything fits the last-level cache, because each start costs time. Beyond it, blocks
# whose running total stays in the second-level cache save memory traffic.
_WHOLE_BYTES: Final = 8 << 20
_BLOCK_BYTES: Final = 512 << 10


def _multiply_complex(left: Array, right: Array, out: Array | None = None) -> Array:
    """Returns (ac - bd, ad + bc), each operation rounded, in `out`, which may be an input.

    np.multiply contracts a·c - b·d where the processor can, and then not in all elements.
    """
    out = np.empty_like(left) if out is None else out
    for start in range(0, out.size, BLOCK):
        block = slice(start, start + BLOCK)
        (a, b), (c, d) = ((one[block].real, one[block].imag) for one in (left, right))
        real, imaginary = a * c - b * d, a * d + b * c
        out[block].real, out[block].imag = real, imaginary
    return out


_UFUNCS: Final = {
    ReduceCode.SUM: np.add,
    ReduceCode.AVG: np.add,  # finish() divides
    ReduceCode.PROD: np.multiply,
    ReduceCode.MIN: np.minimum,  # these propagate NaN
    ReduceCode.MAX: np.maximum,
    ReduceCode.BAND: np.bitwise_and,
    ReduceCode.BOR: np.bitwise_or,
    ReduceCode.BXOR: np.bitwise_xor,
    ReduceCode.LAND: np.logical_and,  # these write 0 and 1 into numeric arrays
    ReduceCode.LOR: np.logical_or,
    ReduceCode.LXOR: np.logical_xor,
}


def _arithmetic(code: ReduceCode, dtype: np.dtype[Any]) -> Callable[..., Any]:
    if code is ReduceCode.PROD and dtype.kind == "c":
        return _multiply_complex
    return _UFUNCS[code]


_ROUNDING: Final = (ReduceCode.SUM, ReduceCode.PROD, ReduceCode.AVG)
_LOGIC: Final = (np.logical_and, np.logical_or, np.logical_xor)
_LOGICAL: Final = (ReduceCode.LAND, ReduceCode.LOR, ReduceCode.LXOR)


def rounds(reduction: Reduction, dtype: np.dtype[Any]) -> bool:
    """Whether partial results lose digits that float32 keeps."""
    return dtype in NARROW_FLOATS and reduction.code in _ROUNDING


def combiner(reduction: Reduction, dtype: np.dtype[Any], size: int = 1) -> Combiner:
    """Combines two flat contiguous arrays; `out` may be one of them. Raises UsageError if undefined.

    Thread-safe. Never warns: overflow gives infinity, integers wrap. If a user's function raises, `out` is unchanged.
    """
    check(reduction, dtype)
    if reduction.function is not None:
        return _user_combiner(reduction.name, reduction.function)
    divisor = size if reduction.code is ReduceCode.AVG else 1
    native_fold = _native_fold()
    if native_fold is None:
        return numpy_combiner(reduction.code, dtype, divisor)
    return _native_combiner(native_fold, reduction.code, dtype, divisor)


def folder(reduction: Reduction, dtype: np.dtype[Any], size: int = 1) -> Folder:
    """Left fold of flat contiguous arrays; `out` may be one of them. Divides an average by `size`. Narrow types are
    rounded once.
    """
    check(reduction, dtype)
    if reduction.function is not None:
        return _user_folder(_user_combiner(reduction.name, reduction.function))
    divisor = size if reduction.code is ReduceCode.AVG else 1
    native_fold = _native_fold()
    if native_fold is None:
        return numpy_folder(reduction.code, dtype, divisor)
    return _native_folder(native_fold, reduction.code, dtype, divisor)


@cache
def _native_fold() -> Callable[..., None] | None:
    """Returns `nexar_native.reduce.fold`, None if this process cannot use the native package."""
    if native_problem():
        return None
    from nexar.native import reduce  # noqa: PLC0415 - imports the package, which not every process needs

    return reduce.fold


@cache
def _native_combiner(
    native_fold: Callable[..., None], code: ReduceCode, dtype: np.dtype[Any], divisor: int
) -> Combiner:
    numbers = int(code), code_of(dtype), divisor
    return lambda out, left, right: native_fold(out, (left, right), *numbers)


@cache
def _native_folder(native_fold: Callable[..., None], code: ReduceCode, dtype: np.dtype[Any], divisor: int) -> Folder:
    numbers = int(code), code_of(dtype), divisor
    return lambda out, inputs: native_fold(out, inputs, *numbers)


def numpy_combiner(code: ReduceCode, dtype: np.dtype[Any], divisor: int = 1) -> Combiner:
    """As `combiner`, of a defined reduction, without the native package."""
    if divisor != 1:
        return _dividing_combiner(dtype, divisor)
    return _combiner(_arithmetic(code, dtype), dtype)


def numpy_folder(code: ReduceCode, dtype: np.dtype[Any], divisor: int = 1) -> Folder:
    """As `folder`, of a defined reduction, without the native package."""
    if divisor != 1:
        return _dividing_folder(dtype, divisor)
    return _folder(_arithmetic(code, dtype), dtype)


def wide_folder(reduction: Reduction, dtype: np.dtype[Any]) -> Folder:
    """Folds narrow types into float32, without rounding or dividing."""
    check(reduction, dtype)
    ufunc = _UFUNCS[reduction.code]
    return lambda out, inputs: _fold_wide_quietly(ufunc, out, inputs)


def round_total(reduction: Reduction, out: Array, total: Array, size: int) -> None:
    """Round the float32 `total` of `size` ranks once, after dividing an average. Overwrites `total`."""
    _round_narrow_quietly(_UFUNCS[reduction.code], out, total, size if reduction.code is ReduceCode.AVG else 1)


def combine(reduction: Reduction, out: Array, left: Array, right: Array) -> None:
    """out = left ⊕ right."""
    combiner(reduction, out.dtype)(out, left, right)


def fold(reduction: Reduction, out: Array, inputs: Sequence[Array]) -> None:
    """out = ((in0 ⊕ in1) ⊕ in2) …"""
    folder(reduction, out.dtype)(out, inputs)


def finish(reduction: Reduction, array: Array, size: int) -> None:
    """Finish a total in place: divide an average; with one rank, turn a logical result into 0 and 1. For narrow types
    use round_total.
    """
    divides = size > 1 and reduction.code is ReduceCode.AVG
    if divides or (size == 1 and reduction.code in _LOGICAL):
        folder(reduction, array.dtype, size)(array, (array,))


@cache
def _combiner(ufunc: Callable[..., Any], dtype: np.dtype[Any]) -> Combiner:
    if dtype in NARROW_FLOATS:
        return lambda out, left, right: _fold_narrow_quietly(ufunc, out, (left, right))
    if kind_of(dtype) in ("float", "complex"):
        return quiet_ufunc(ufunc)
    return lambda out, left, right: ufunc(left, right, out=out)  # integers wrap silently


@cache
def _folder(ufunc: Callable[..., Any], dtype: np.dtype[Any]) -> Folder:
    run = _fold_narrow_quietly if dtype in NARROW_FLOATS else _fold_plain_quietly
    if ufunc not in _LOGIC:
        return lambda out, inputs: run(ufunc, out, inputs)

    def call(out: Array, inputs: Sequence[Array]) -> None:
        if len(inputs) == 1:
            run(np.logical_or, out, (inputs[0], inputs[0]))  # a single array becomes 0 and 1 too
        else:
            run(ufunc, out, inputs)

    return call


@cache
def _dividing_combiner(dtype: np.dtype[Any], size: int) -> Combiner:
    if dtype in NARROW_FLOATS:
        return lambda out, left, right: _fold_narrow_quietly(np.add, out, (left, right), size)
    add, divisor = _combiner(np.add, dtype), dtype.type(size)

    def call(out: Array, left: Array, right: Array) -> None:
        add(out, left, right)
        _divide_quietly(out, out, divisor)

    return call


@cache
def _dividing_folder(dtype: np.dtype[Any], size: int) -> Folder:
    if dtype in NARROW_FLOATS:
        return lambda out, inputs: _fold_narrow_quietly(np.add, out, inputs, size)
    divisor = dtype.type(size)

    def call(out: Array, inputs: Sequence[Array]) -> None:
        _fold_plain_quietly(np.add, out, inputs)
        _divide_quietly(out, out, divisor)

    return call


def _fold_plain(ufunc: Callable[..., Any], out: Array, inputs: Sequence[Array]) -> None:
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


def _fold_blocks(ufunc: Callable[..., Any], out: Array, inputs: Sequence[Array]) -> None:
    step = _BLOCK_BYTES // out.itemsize
    total = _scratch.memory.view(out.dtype)
    for start in range(0, out.size, step):
        block = slice(start, start + step)
        _fold_piece(ufunc, out[block], total[: min(step, out.size - start)], [one[block] for one in inputs])


def _fold_piece(ufunc: Callable[..., Any], out: Array, scratch: Array | None, inputs: Sequence[Array]) -> None:
    # With separate `scratch` only the last step writes to `out`, after everything is read: `out` may be any input.
    total = ufunc(inputs[0], inputs[1], out=scratch)
    for one in inputs[2:-1]:
        ufunc(total, one, out=total)
    ufunc(total, inputs[-1], out=out)


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.memory = np.empty(_BLOCK_BYTES, np.uint8)


_scratch: Final = _Scratch()

_fold_plain_quietly: Final = quiet(_fold_plain)
_fold_narrow_quietly: Final = quiet(fold_narrow)
_fold_wide_quietly: Final = quiet(fold_wide)
_round_narrow_quietly: Final = quiet(round_narrow)
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
    return f"{type(value).__name__}, not an array"


def _user_folder(combine_two: Combiner) -> Folder:
    def call(out: Array, inputs: Sequence[Array]) -> None:
        total = inputs[0].copy()
        for one in inputs[1:]:
            combine_two(total, total, one)
        np.copyto(out, total)

    return call
