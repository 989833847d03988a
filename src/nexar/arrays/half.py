"""Reducing the types narrower than f32: widen, compute in f32, round once to nearest even. In cache-sized blocks.

`fold_half` does all of it in one go. Where partial results pass from rank to rank, `fold_wide` keeps them in f32 and
`round_half` rounds the total at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

BLOCK: Final = 64 << 10  # elements: a pass goes over two f32 rows, 512 KiB, which a second-level cache holds
_FEW: Final = 1536  # up to here fewer calls matter more than quicker ones
_VERY_FEW: Final = 256  # … and here more than anything

# NumPy's own conversions of f16 and ml_dtypes' of f8 go element by element; integer arithmetic on whole rows does not.
#
# The bits of a narrow float, moved so that its exponent ends where that of an f32 ends, are an f32 of the same value
# but for a power of two (2⁻¹¹² for f16): subnormal numbers become subnormal numbers, zeros zeros. Sums, minima and
# maxima do not mind a common power of two, so they are computed as they lie, exactly as f32 would: subnormal f32 are
# multiples of 2⁻¹⁴⁹, so nothing is lost at the lower end. And rounding is adding half of the last place that stays, in
# integers, for subnormals too, because the layouts agree; a carry moves into the exponent, as it should.
#
# Only infinities and NaN are not where they belong. A block that has one, or whose result is as large as one, is
# computed by conversions instead. bf16 is the upper half of an f32: nothing is scaled, infinities are right, and a NaN
# that comes of widened ones has zeros in the lower half, so that rounding leaves it alone.


class _Layout(NamedTuple):
    signed: np.dtype[Any]
    unsigned: np.dtype[Any]
    shift: int  # from the last place of the narrow type to that of f32
    beyond: int | None  # the smallest magnitude, as bits, that is not a finite number; None: they need no care


_LAYOUTS: Final[dict[np.dtype[Any], _Layout]] = {
    np.dtype(np.float16): _Layout(np.dtype(np.int16), np.dtype(np.uint16), 13, 0x7C00),
    np.dtype(ml_dtypes.bfloat16): _Layout(np.dtype(np.int16), np.dtype(np.uint16), 16, None),
    np.dtype(ml_dtypes.float8_e4m3fn): _Layout(np.dtype(np.int8), np.dtype(np.uint8), 20, 0x7F),
    np.dtype(ml_dtypes.float8_e5m2): _Layout(np.dtype(np.int8), np.dtype(np.uint8), 21, 0x7C),
}

HALF_TYPES: Final = frozenset(_LAYOUTS)

_SAME_IN_HALF: Final = (np.add, np.multiply)  # the types' own are through f32 too; min and max of -0 and 0 differ
_HOMOGENEOUS: Final = (np.add, np.minimum, np.maximum)  # f(s·a, s·b) = s·f(a, b)


class _Scratch(threading.local):
    """Three rows, one set per thread, kept: fresh memory would cost more than the arithmetic."""

    def __init__(self) -> None:
        pair = np.empty(2 * BLOCK, np.float32)
        self.total, self.operand = pair[:BLOCK], pair[BLOCK:]
        self.index = pair.view(np.intp)[:BLOCK]  # in the memory of the pair: who looks up does not widen
        self.spare = np.empty(BLOCK, np.int32)


_scratch: Final = _Scratch()


def fold_half(arithmetic: np.ufunc, out: Array, inputs: Sequence[Array], divisor: int = 1) -> None:
    """out = (((in0 ⊕ in1) ⊕ in2) …) / divisor, in f32 and rounded once. `out` may be any of the inputs."""
    if out.size <= _VERY_FEW and len(inputs) == 2 and divisor == 1 and arithmetic in _SAME_IN_HALF:
        arithmetic(inputs[0], inputs[1], out=out)
        return
    fold = _way(arithmetic, out, len(inputs), divisor)
    for start in range(0, out.size, BLOCK):
        block = slice(start, start + BLOCK)
        pieces = [one[block] for one in inputs]
        if not fold(arithmetic, out[block], pieces, divisor):
            _fold_by_conversion(arithmetic, out[block], pieces, divisor)


def fold_wide(arithmetic: np.ufunc, out: Array, inputs: Sequence[Array]) -> None:
    """out = ((in0 ⊕ in1) ⊕ in2) …, not rounded: `out` is an f32 array that shares no memory with the inputs."""
    widen = _widening(inputs[0].dtype, out.size)
    for start in range(0, out.size, BLOCK):
        block = slice(start, start + BLOCK)
        total = out[block]
        widen(inputs[0][block], total)
        for one in inputs[1:]:
            operand = _scratch.operand[: total.size]
            widen(one[block], operand)
            arithmetic(total, operand, out=total)


def round_half(arithmetic: np.ufunc, out: Array, total: Array, divisor: int = 1) -> None:
    """out = total / divisor, rounded once. `total` is f32, the result of `arithmetic` on numbers of out's type, and is
    overwritten.
    """
    bits = _bits_of(out.dtype)
    by_bits = out.size > _FEW and bits.can(arithmetic, 2 * divisor)  # twice: the quotient and its scaling both round
    for start in range(0, out.size, BLOCK):
        block = slice(start, start + BLOCK)
        piece = total[block]
        if divisor != 1:
            np.divide(piece, np.float32(divisor), piece)
        if not (by_bits and bits.round(piece, out[block])):
            np.copyto(out[block], piece, casting="unsafe")


def _widening(dtype: np.dtype[Any], count: int) -> Callable[[Array, Array], None]:
    if count <= _FEW or dtype == ml_dtypes.bfloat16:  # whose conversion to f32 is quick
        return _convert
    return _bits_of(dtype).to_float


def _convert(source: Array, into: Array) -> None:
    np.copyto(into, source)


def _way(arithmetic: np.ufunc, out: Array, inputs: int, divisor: int) -> Callable[..., bool]:
    if out.size <= _FEW:
        return _fold_by_conversion
    if out.itemsize == 1 and inputs == 2 and divisor == 1:
        return _fold_by_table
    bits = _bits_of(out.dtype)
    return bits.fold if bits.can(arithmetic, divisor) else _fold_by_conversion


def _fold_by_conversion(arithmetic: np.ufunc, out: Array, inputs: Sequence[Array], divisor: int) -> bool:
    total, operand = _scratch.total[: out.size], _scratch.operand[: out.size]
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
    table = _table(arithmetic, out.dtype)  # first: making it uses the scratch memory too
    count, index = out.size, _scratch.index[: out.size]
    both = _scratch.spare.view(np.uint16)
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
    """Widening and rounding of one type by integer arithmetic on blocks."""

    def __init__(self, layout: _Layout) -> None:
        self._layout = layout
        self.scaled = layout.beyond is not None
        width = 8 * layout.signed.itemsize
        # Constants as arrays of no dimension: to convert a Python number costs as much as the call itself.
        self._shift = np.array(layout.shift, np.int32)
        self._mask = np.array((0x7FFFFFFF >> (31 - layout.shift - (width - 1))) - (1 << 31), np.int32)
        self._one = np.array(1, np.int32)
        self._below_half = np.array((1 << (layout.shift - 1)) - 1, np.int32)
        self._sign_shift = np.array(32 - width, np.int32)
        self._sign = np.array(1 << (width - 1), np.int32)
        self._beyond = layout.beyond or 0
        # The exponent of 1 is 127 in f32, and half of its range in the narrow type.
        exponent = 127 - ((1 << (width - 2 - (23 - layout.shift))) - 1)
        self._scale, self._unscale = np.array(2.0**-exponent, np.float32), np.array(2.0**exponent, np.float32)
        self._doubled = 1 << (23 - layout.shift)  # what twice a magnitude has more, as bits

    def can(self, arithmetic: np.ufunc, divisor: int) -> bool:
        """Whether the result of scaled numbers is the scaled result, to the last place.

        A quotient of n is at least 1/2n of a last place away from the middle between two, unless it is there; f32 has
        2⁻ˢ of a last place, so for n < 2ˢ rounding to f32 first changes nothing.
        """
        return not self.scaled or (arithmetic in _HOMOGENEOUS and divisor < 1 << self._layout.shift)

    def fold(self, arithmetic: np.ufunc, out: Array, inputs: Sequence[Array], divisor: int) -> bool:
        """False, and `out` untouched, if there are or come to be infinities and NaN that need care."""
        count = out.size
        total, operand = _scratch.total[:count], _scratch.operand[:count]
        largest = max(map(self._largest, inputs)) if self.scaled else -1
        if largest >= self._beyond:
            return False
        self._widen(inputs[0], total)
        for one in inputs[1:]:
            self._widen(one, operand)
            arithmetic(total, operand, out=total)
        if divisor != 1:
            np.divide(total, np.float32(divisor), total)
        # n numbers sum up to at most n times the largest, and that is at most 2ᵏ times it.
        bound = largest + self._doubled * (len(inputs) - 1).bit_length()
        return self._round(total.view(np.int32), out.view(self._layout.signed), careful=bound >= self._beyond)

    def to_float(self, source: Array, into: Array) -> None:
        """The same numbers as f32."""
        if self._largest(source) >= self._beyond:
            np.copyto(into, source)
            return
        self._widen(source, into)
        np.multiply(into, self._unscale, into)  # exact: a power of two, and what was subnormal becomes normal

    def round(self, total: Array, out: Array) -> bool:
        """`out` = `total`, an f32 row; False, and both untouched, if there are infinities, NaN, or numbers too large.

        Where the result is subnormal, scaling rounds first, to 2⁻ˢ of a last place. `can` says when that is harmless.
        """
        if not self.scaled:
            return self._round(total.view(np.int32), out.view(self._layout.signed), careful=False)
        wide = _scratch.operand[: out.size]
        np.multiply(total, self._scale, wide)
        return self._round(wide.view(np.int32), out.view(self._layout.signed), careful=True)

    def _largest(self, source: Array) -> int:
        """The largest magnitude, as bits."""
        return _largest(source.view(self._layout.signed), source.view(self._layout.unsigned), int(self._sign))

    def _widen(self, source: Array, into: Array) -> None:
        wide = into.view(np.int32)
        np.copyto(wide, source.view(self._layout.signed))
        np.left_shift(wide, self._shift, wide)
        if self.scaled:
            np.bitwise_and(wide, self._mask, wide)  # the sign once, not also in the exponent's upper bits

    def _round(self, wide: Array, out: Array, *, careful: bool) -> bool:
        spare = _scratch.spare[: out.size]
        np.right_shift(wide, self._shift, spare)
        np.bitwise_and(spare, self._one, spare)
        np.add(wide, spare, wide)
        np.add(wide, self._below_half, wide)
        if (
            self.scaled
            and careful
            and _largest(wide, wide.view(np.uint32), 1 << 31) >= self._beyond << self._layout.shift
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
    """The largest magnitude of signed numbers: positive ones lead the signed integers, negative ones the unsigned."""
    return max(int(np.maximum.reduce(signed)), int(np.maximum.reduce(unsigned)) - sign)
