"""What NumPy can see, as arrays that share its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.dtypes import kind_of
from nexar.errors import UsageError

_ALLOWED: Final = (
    "NumPy arrays, numbers, buffers (bytearray, array.array, memoryview, …), objects with __array_interface__ or "
    "DLPack, torch tensors on the CPU or on CUDA devices, arrays of registered device adapters"
)
# One dtype per kind, whatever the value: ranks that give 1 and 2**63 must not disagree.
_PYTHON_NUMBERS: Final[dict[type, type[np.generic]]] = {
    bool: np.bool_,
    int: np.int64,
    float: np.float64,
    complex: np.complex128,
}
_SEEN: Final = (np.ndarray, np.generic, bool, int, float, complex, str, bytes, list, tuple, dict, type(None))
_DLPACK_HOST: Final = (1, 3, 11)  # kDLCPU, and the host memory that CUDA and ROCm have pinned


class Number(NamedTuple):
    """A number as an array of no dimension, and the way back."""

    array: NDArray[Any]
    like: Callable[[NDArray[Any]], object]


def same(result: NDArray[Any]) -> NDArray[Any]:
    """NumPy for NumPy."""
    return result


def number_of(value: object) -> Number | None:
    """Of a Python or NumPy number; None for anything else. UsageError for one that has no dtype we can send."""
    if isinstance(value, np.generic):
        kind_of(value.dtype)
        return Number(np.array(value), _numpy_number)
    for kind, dtype in _PYTHON_NUMBERS.items():
        if isinstance(value, kind):
            return Number(_as_array(value, dtype), _python_number)
    return None


def _as_array(value: object, dtype: type[np.generic]) -> NDArray[Any]:
    try:
        return np.array(value, dtype)
    except OverflowError:
        raise UsageError(f"{value} does not fit into 64 bits; give a float, or an array of several integers") from None


def _numpy_number(result: NDArray[Any]) -> object:
    return result if result.ndim else result[()]


def _python_number(result: NDArray[Any]) -> object:
    return result if result.ndim else result.item()


def sees(value: object) -> bool:
    """Whether NumPy knows its memory, or it is no array at all, so that nobody else need be asked. Never copies."""
    if isinstance(value, _SEEN) or hasattr(value, "__array_interface__") or _buffer_of(value) is not None:
        return True
    return hasattr(value, "__dlpack_device__") and value.__dlpack_device__()[0] in _DLPACK_HOST


def array_of(value: Any, *, writable: bool) -> NDArray[Any]:
    """An array in the memory of `value`, in any layout. Where that cannot be it may be a copy, if it is only read.

    UsageError for what is no array, and for what cannot be written though it is to be.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise UsageError("masked elements have no meaning in a collective; give array.filled(value), or array.data")
    if isinstance(value, np.ndarray):
        return np.asarray(value)  # a matrix or a memmap as a plain array
    buffer = _buffer_of(value)
    if buffer is not None:
        return _of_buffer(buffer)
    if hasattr(value, "__array_interface__"):
        return np.asarray(value)
    if hasattr(value, "__dlpack__"):
        return _of_dlpack(value)
    if hasattr(value, "__array__") and not writable:
        return np.asarray(value)
    raise UsageError(
        f"expected an array, got {type(value).__name__}; use np.asarray(x), or for other values the methods that end "
        f"in _object, such as all_gather_object(x) (allowed: {_ALLOWED})"
    )


def _buffer_of(value: Any) -> memoryview | None:
    try:
        return memoryview(value)
    except TypeError:
        return None


def _of_buffer(buffer: memoryview) -> NDArray[Any]:
    try:
        return np.asarray(buffer)
    except (TypeError, ValueError) as error:
        raise UsageError(f"a buffer of format {buffer.format!r} holds no numbers; {_ALLOWED} are allowed") from error


def _of_dlpack(value: Any) -> NDArray[Any]:
    try:
        return np.asarray(np.from_dlpack(value))
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(
            f"a {type(value).__name__} cannot be taken by DLPack ({error}); copy it to the CPU, into a NumPy array"
        ) from error
