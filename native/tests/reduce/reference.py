"""The results that are expected, computed with NumPy alone, and the arrays that the tests reduce.

Nothing here is shared with nexar: `tests/unit/arrays/test_native_reduce.py` compares the kernels with its NumPy path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Draw = Callable[[str, int, int], Array]

OPS = {
    "sum": 1,
    "prod": 2,
    "min": 3,
    "max": 4,
    "avg": 5,
    "band": 6,
    "bor": 7,
    "bxor": 8,
    "land": 9,
    "lor": 10,
    "lxor": 11,
}
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
FLOATS = ("float32", "float64")
COMPLEX = ("complex64", "complex128")
DTYPES = {
    "bool": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint8": 6, "uint16": 7, "uint32": 8, "uint64": 9,
    "float16": 10, "float32": 11, "float64": 12, "complex64": 13, "complex128": 14,
    "bfloat16": 15, "float8_e4m3fn": 16, "float8_e5m2": 17,
}  # fmt: skip
LOGIC = ("land", "lor", "lxor")
UFUNCS = {
    "sum": np.add, "avg": np.add, "min": np.minimum, "max": np.maximum, "band": np.bitwise_and, "bor": np.bitwise_or,
    "bxor": np.bitwise_xor, "land": np.logical_and, "lor": np.logical_or, "lxor": np.logical_xor,
}  # fmt: skip


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def defined(op: str, dtype: str) -> bool:
    """Whether the operation exists for the element type."""
    if op in ("band", "bor", "bxor"):
        return dtype == "bool" or dtype in INTEGERS
    if op == "avg":
        return dtype in FLOATS or dtype in NARROW or dtype in COMPLEX
    return op not in ("min", "max") or dtype not in COMPLEX


CASES = [(op, dtype) for dtype in DTYPES for op in OPS if defined(op, dtype)]


def expected(op: str, inputs: Sequence[Array], divisor: int = 1) -> Array:
    """The left fold by NumPy; narrow floats in float32, rounded once."""
    with np.errstate(all="ignore"):
        dtype = inputs[0].dtype
        narrow = dtype.name in NARROW
        total = inputs[0].astype(np.float32) if narrow else inputs[0].copy()
        if len(inputs) == 1 and op in LOGIC:
            total = np.logical_or(total, total).astype(total.dtype)
        for one in inputs[1:]:
            total = _two(op, total, one.astype(total.dtype))
        if divisor != 1:
            total = np.divide(total, total.dtype.type(divisor))
        return total.astype(dtype)


def _two(op: str, left: Array, right: Array) -> Array:
    if op == "prod":
        return _product(left, right)
    return UFUNCS[op](left, right).astype(left.dtype)


def _product(left: Array, right: Array) -> Array:
    if left.dtype.kind != "c":
        return np.multiply(left, right)
    # NumPy contracts a·c - b·d where the processor can.
    out = np.empty_like(left)
    out.real = left.real * right.real - left.imag * right.imag
    out.imag = left.real * right.imag + left.imag * right.real
    return out


def same(found: Array, wanted: Array) -> bool:
    """Equal bits; a NaN is equal to every NaN. Complex numbers part by part."""
    if found.dtype.kind == "c":
        part = np.dtype(f"f{found.itemsize // 2}")
        found, wanted = found.view(part), wanted.view(part)
    bits = np.dtype(f"u{found.itemsize}")
    equal = found.view(bits) == wanted.view(bits)
    if found.dtype.kind in "fV":
        equal |= is_nan(found) & is_nan(wanted)
    return bool(equal.all())


def is_nan(array: Array) -> Array:
    return np.isnan(array if array.dtype.kind == "f" else array.astype(np.float32))


def every_bits(dtype: str, count: int, seed: int) -> Array:
    """Elements of random bits: all numbers, NaN and infinities. Booleans are 0 and 1."""
    generator, kind = np.random.default_rng(seed), dtype_of(dtype)
    drawn = generator.integers(0, 256, count * kind.itemsize, np.uint8)
    return (drawn & 1).view(bool) if dtype == "bool" else drawn.view(kind)


def ordinary(dtype: str, count: int, seed: int) -> Array:
    """Small numbers, a fifth of them zero, half of those negative zeros."""
    generator, kind = np.random.default_rng(seed), dtype_of(dtype)
    if dtype in INTEGERS or dtype == "bool":
        return generator.integers(-5 if dtype.startswith("int") else 0, 6, count).astype(kind)
    parts = 2 if dtype in COMPLEX else 1
    numbers = generator.standard_normal(count * parts)
    numbers[generator.random(len(numbers)) < 0.2] = 0.0
    numbers = np.copysign(numbers, generator.standard_normal(len(numbers)))
    return numbers.astype(f"f{kind.itemsize // 2}").view(kind) if parts == 2 else numbers.astype(kind)


def specials(dtype: str) -> Array:
    """Numbers at the limits of the element type."""
    kind = dtype_of(dtype)
    if dtype == "bool":
        return np.array([False, True])
    if dtype in INTEGERS:
        limits = np.iinfo(kind)
        return np.array([0, 1, 2, 7, limits.max, limits.min, limits.max - 1, limits.max // 2], kind)
    real = np.dtype(f"f{kind.itemsize // 2}") if dtype in COMPLEX else kind
    limits = ml_dtypes.finfo(real)
    one = [
        0.0,
        1.0,
        1 / 3,
        3.0,
        float(limits.max),
        float(limits.tiny),
        float(limits.smallest_subnormal),
        np.inf,
        np.nan,
    ]
    with np.errstate(all="ignore"):
        numbers = np.array([sign * number for number in one for sign in (1, -1)]).astype(real)
    if dtype not in COMPLEX:
        return numbers
    grid = np.stack(np.meshgrid(numbers, numbers), axis=-1).reshape(-1)
    return np.ascontiguousarray(grid).view(kind)


def pairs(dtype: str) -> tuple[Array, Array]:
    """Every special number beside every other."""
    values = specials(dtype)
    left, right = np.meshgrid(np.arange(len(values)), np.arange(len(values)))
    return values[left.reshape(-1)], values[right.reshape(-1)]
