"""The supported element types and their wire numbers."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np

from nexar.errors import UsageError

RAW: Final = 0
"""Untyped bytes: matches every dtype."""

# These numbers are the wire format: append, never change.
_TYPES: Final[dict[int, np.dtype[Any]]] = {
    1: np.dtype(np.bool_),
    2: np.dtype(np.int8),
    3: np.dtype(np.int16),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    6: np.dtype(np.uint8),
    7: np.dtype(np.uint16),
    8: np.dtype(np.uint32),
    9: np.dtype(np.uint64),
    10: np.dtype(np.float16),
    11: np.dtype(np.float32),
    12: np.dtype(np.float64),
    13: np.dtype(np.complex64),
    14: np.dtype(np.complex128),
    15: np.dtype(ml_dtypes.bfloat16),
    16: np.dtype(ml_dtypes.float8_e4m3fn),
    17: np.dtype(ml_dtypes.float8_e5m2),
}
DTYPES: Final = tuple(_TYPES.values())
"""Every supported dtype, by wire number."""
_CODES: Final[dict[np.dtype[Any], int]] = {dtype: code for code, dtype in _TYPES.items()}
_KIND_NAMES: Final = {"b": "bool", "i": "integer", "u": "integer", "f": "float", "c": "complex"}


def _kind_name(dtype: np.dtype[Any]) -> str:
    if dtype.kind in _KIND_NAMES:
        return _KIND_NAMES[dtype.kind]
    # The kind of most types of ml_dtypes, also of integers such as int4, is V.
    if dtype.name.startswith(("int", "uint")):
        return "integer"
    if dtype.name.startswith(("float", "bfloat")):
        return "float"
    raise TypeError(f"dtype {dtype} is neither an integer nor a float by its name; add its kind here")


_KINDS: Final[dict[np.dtype[Any], str]] = {dtype: _kind_name(dtype) for dtype in _CODES}


def code_of(dtype: np.dtype[Any]) -> int:
    """Returns the wire number. Raises TypeError if unsupported."""
    code = _CODES.get(dtype)
    if code is None:
        raise TypeError(f"arrays of dtype {dtype} cannot be sent; allowed: {allowed()}")
    return code


def dtype_of(code: int) -> np.dtype[Any] | None:
    """Returns None for RAW and unknown numbers."""
    return _TYPES.get(code)


def kind_of(dtype: np.dtype[Any]) -> str:
    """Returns `bool`, `integer`, `float` or `complex`. Raises UsageError for an unsupported dtype."""
    kind = _KINDS.get(dtype)
    if kind is None:
        raise UsageError(
            f"arrays of dtype {dtype} cannot be sent or reduced; allowed: {allowed()}, in native byte order"
        )
    return kind


is_supported: Final = _CODES.__contains__
"""Whether arrays of a dtype can be sent and reduced."""


def allowed() -> str:
    """Returns the supported names."""
    return ", ".join(str(dtype) for dtype in _CODES)


def describe(code: int, size_bytes: int) -> str:
    """Returns `float32[4]`, or `8 bytes` without a matching type."""
    dtype = _TYPES.get(code)
    if dtype is None or size_bytes % dtype.itemsize:
        return f"{size_bytes} bytes"
    return f"{dtype}[{size_bytes // dtype.itemsize}]"
