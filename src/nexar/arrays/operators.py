"""Reduction operators: names, wire numbers, and the dtypes they support."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from nexar.arrays.dtypes import kind_of
from nexar.errors import UsageError

ReduceFunction: TypeAlias = Callable[[NDArray[Any], NDArray[Any]], object]


class ReduceCode(IntEnum):
    """Wire numbers: never reuse one."""

    SUM = 1
    PROD = 2
    MIN = 3
    MAX = 4
    AVG = 5
    BAND = 6
    BOR = 7
    BXOR = 8
    LAND = 9
    LOR = 10
    LXOR = 11
    USER = 12


@dataclass(frozen=True, slots=True)
class Reduction:
    """The meaning of `op=`. Only USER has a `function`."""

    name: str
    code: ReduceCode
    commutative: bool = True
    function: ReduceFunction | None = None


_NAMED: Final = {code.name.lower(): Reduction(code.name.lower(), code) for code in ReduceCode if code.name != "USER"}

_ONE_ARRAY_FUNCTIONS: Final[tuple[tuple[object, str], ...]] = (
    (sum, "sum"), (max, "max"), (min, "min"), (all, "land"), (any, "lor"),
    (np.sum, "sum"), (np.max, "max"), (np.min, "min"), (np.mean, "avg"), (np.prod, "prod"),
)  # fmt: skip
"""Functions of one array that users pass by mistake."""
_ARITHMETIC: Final = frozenset({ReduceCode.SUM, ReduceCode.PROD})
_ORDER: Final = frozenset({ReduceCode.MIN, ReduceCode.MAX})
_BITS: Final = frozenset({ReduceCode.BAND, ReduceCode.BOR, ReduceCode.BXOR})
_LOGIC: Final = frozenset({ReduceCode.LAND, ReduceCode.LOR, ReduceCode.LXOR})
_ALWAYS: Final = _ARITHMETIC | _LOGIC | {ReduceCode.USER}

# Operators per kind of number. Booleans add as in NumPy: sum is "or", prod is "and".
_DEFINED: Final = {
    "bool": _ALWAYS | _ORDER | _BITS,
    "integer": _ALWAYS | _ORDER | _BITS,
    "float": _ALWAYS | _ORDER | {ReduceCode.AVG},
    "complex": _ALWAYS | {ReduceCode.AVG},
}
_REASONS: Final = {
    ReduceCode.AVG: 'the average of whole numbers is a fraction: convert to a float type, or use op="sum" and divide',
    **dict.fromkeys(
        _ORDER, "complex numbers have no order: reduce their real and imaginary parts, or their absolute values"
    ),
    **dict.fromkeys(
        _BITS, "bit operations are for integers and bool: view the array as an integer dtype of the same size"
    ),
}


def reduction_of(op: str | ReduceFunction, *, commutative: bool = True) -> Reduction:
    """Returns the reduction of a name or of an associative function `f(a, b) → array`.

    The function gets flat parts of the arrays, must not modify them, and keeps shape and dtype. Raises UsageError for
    other values.
    """
    found = _NAMED.get(op) if isinstance(op, str) else None
    if found is None:
        return _of_function(op, commutative)
    return found if commutative else Reduction(found.name, found.code, commutative=False)


def _of_function(op: object, commutative: bool) -> Reduction:
    intended = next((name for function, name in _ONE_ARRAY_FUNCTIONS if op is function), None)
    if intended is not None:
        raise UsageError(f"op={op!r} takes one array, but a reduction takes two; use op={intended!r}")
    if not callable(op):
        raise UsageError(f"op={op!r} is not a reduction; allowed: {', '.join(_NAMED)}, or a function f(a, b) → array")
    name = getattr(op, "__name__", None) or type(op).__name__
    return Reduction(str(name), ReduceCode.USER, commutative, op)


def check(reduction: Reduction, dtype: np.dtype[Any]) -> None:
    """Raises UsageError if the reduction is undefined for the dtype."""
    if reduction.code not in _DEFINED[kind_of(dtype)]:
        raise UsageError(f"{reduction.name} of {dtype} is not defined: {_REASONS[reduction.code]}")


def identity(reduction: Reduction, dtype: np.dtype[Any]) -> Any:
    """Returns e with e ⊕ x = x. Raises UsageError if unknown (avg, functions)."""
    check(reduction, dtype)
    match reduction.code:
        case ReduceCode.SUM | ReduceCode.BOR | ReduceCode.BXOR | ReduceCode.LOR | ReduceCode.LXOR:
            return dtype.type(0)
        case ReduceCode.PROD | ReduceCode.LAND:
            return dtype.type(1)
        case ReduceCode.MIN:
            return _limits(dtype)[1]
        case ReduceCode.MAX:
            return _limits(dtype)[0]
        case ReduceCode.BAND:
            return ~dtype.type(0)
        case _:
            raise UsageError(
                f"{reduction.name} has no identity element, which this operation needs; use a named op other than avg"
            )


def _limits(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    kind = kind_of(dtype)
    if kind == "bool":
        return np.False_, np.True_
    if kind == "integer":
        return dtype.type(np.iinfo(dtype).min), dtype.type(np.iinfo(dtype).max)
    if dtype == ml_dtypes.float8_e4m3fn:
        return dtype.type(-448), dtype.type(448)
    return dtype.type(-np.inf), dtype.type(np.inf)
