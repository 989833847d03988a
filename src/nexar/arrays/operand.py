"""Operands: the caller's values as NumPy arrays that share memory where possible.

After a failed allocation a placeholder lets the call take its number and then fail: otherwise the other ranks would
wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nexar.arrays import torch_tensors
from nexar.arrays.devices import ADAPTERS
from nexar.arrays.dtypes import is_supported, kind_of
from nexar.arrays.staging import StagedArray
from nexar.arrays.views import placeholder
from nexar.errors import UsageError

_ALLOWED: Final = (
    "NumPy arrays, numbers, buffers (bytearray, array.array, memoryview, …), objects with __array_interface__ or "
    "DLPack, torch tensors on the CPU or on CUDA devices, arrays of registered device adapters"
)
# One dtype per kind: ranks that pass 1 and 2**63 must not disagree.
_PYTHON_NUMBERS: Final[dict[type, type[np.generic]]] = {
    bool: np.bool_,
    int: np.int64,
    float: np.float64,
    complex: np.complex128,
}
_SEEN: Final = (np.ndarray, np.generic, bool, int, float, complex, str, bytes, list, tuple, dict, type(None))
_DLPACK_HOST: Final = (1, 3, 11)  # kDLCPU, and host memory pinned by CUDA and ROCm


class PythonNumber(NamedTuple):
    """A number as a 0-d array, and the conversion back."""

    array: NDArray[Any]
    like: Callable[[NDArray[Any]], object]


def same_array(result: NDArray[Any]) -> NDArray[Any]:
    """Returns its argument."""
    return result


def number_of(value: object) -> PythonNumber | None:
    """Returns None for other values. Raises UsageError for unsupported dtypes."""
    if isinstance(value, np.generic):
        kind_of(value.dtype)
        return PythonNumber(np.array(value), _numpy_number)
    for kind, dtype in _PYTHON_NUMBERS.items():
        if isinstance(value, kind):
            return PythonNumber(_as_array(value, dtype), _python_number)
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


def numpy_accepts(value: object) -> bool:
    """Whether NumPy can use the memory, or the value is not an array. Never copies."""
    if isinstance(value, _SEEN) or hasattr(value, "__array_interface__") or _buffer_of(value) is not None:
        return True
    return hasattr(value, "__dlpack_device__") and value.__dlpack_device__()[0] in _DLPACK_HOST


def numpy_array_of(value: Any, *, writable: bool) -> NDArray[Any]:
    """Returns an array in the memory of `value`; maybe a copy if only read. Raises UsageError."""
    if isinstance(value, np.ma.MaskedArray):
        raise UsageError("masked elements have no meaning in a collective; give array.filled(value), or array.data")
    if isinstance(value, np.ndarray):
        return np.asarray(value)  # a matrix or memmap as a plain array
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
        raise UsageError(f"a buffer of format {buffer.format!r} does not hold numbers; allowed: {_ALLOWED}") from error


def _of_dlpack(value: Any) -> NDArray[Any]:
    try:
        return np.asarray(np.from_dlpack(value))
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(
            f"DLPack cannot convert a {type(value).__name__} ({error}); copy it to a NumPy array on the CPU"
        ) from error


class Operand:
    """An argument of a collective."""

    __slots__ = ("_commit", "_like", "_staged", "_value", "array", "shares")

    def __init__(
        self,
        array: NDArray[Any],
        value: object,
        like: Callable[[NDArray[Any]], object],
        commit: Callable[[], None] | None,
        *,
        shares: bool,
        staged: StagedArray | None = None,
    ) -> None:
        self.array = array
        """C-contiguous; in the caller's memory where possible."""
        self.shares = shares
        """`array` is the caller's memory."""
        self._value = value
        self._like = like
        self._commit = commit
        self._staged = staged

    def commit(self) -> None:
        """Copy `array` to the caller's memory if it is written and separate."""
        if self._commit is not None:
            self._commit()

    def like(self, result: NDArray[Any]) -> Any:
        """Returns a result in the caller's type; it may share memory with `result`."""
        return self._like(result)

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        return np.empty(shape, dtype) if self._staged is None else self._staged.allocate(shape, dtype)

    def may_share_memory(self, other: Operand) -> bool:
        """Returns True if unknown."""
        if self._staged is not None and other._staged is not None:
            return self._staged.overlaps(other._staged)
        return np.may_share_memory(self.array, other.array)

    def result(self) -> Any:
        """Returns the caller's object, or a new number."""
        return self.like(self.array) if self._value is None else self._value


def adapt(value: Any, *, writable: bool = False, read: bool = True) -> Operand:
    """Returns the operand of a value. `writable`: the operation writes to it. `read=False`: its content is not needed.

    Raises UsageError for unsupported types, dtypes and layouts, and for read-only memory if `writable`; DeviceError if
    a device cannot be read.
    """
    if type(value) is np.ndarray:  # the common case
        flags = value.flags
        if flags.c_contiguous and is_supported(value.dtype) and (flags.writeable or not writable):
            return Operand(value, value, same_array, None, shares=True)
    staged = staged_array_of(value)
    if staged is not None:
        return _of_device(staged, writable, read)
    if torch_tensors.is_tensor(value):
        return _of_tensor(value, writable)
    number = number_of(value)
    if number is not None:
        return Operand(number.array, None, number.like, None, shares=False)
    view = numpy_array_of(value, writable=writable)
    array, commit = _contiguous(view, writable)
    return Operand(array, value, same_array, commit, shares=array is view)


def placeholder_of(value: Any) -> Operand:
    """Replaces an array that cannot be copied for lack of memory; it must not be accessed. Raises MemoryError if even
    the shape requires a copy.
    """
    staged = staged_array_of(value)
    if staged is not None:
        return placeholder_operand(staged.outline.shape, staged.dtype)
    view = _view_of(value)
    return placeholder_operand(view.shape, view.dtype)


def placeholder_operand(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Operand:
    """Returns an operand that must not be accessed."""
    return Operand(placeholder(shape, dtype), None, same_array, None, shares=False)


def staged_array_of(value: Any) -> StagedArray | None:
    """Returns None for values on the host. Raises UsageError, DeviceError."""
    on_host = value.device.type == "cpu" if torch_tensors.is_tensor(value) else numpy_accepts(value)
    if on_host:
        return None
    staging = ADAPTERS.find(value)
    if staging is None:
        return None
    staged = staging.stage(value)
    kind_of(staged.dtype)  # raises for unsupported dtypes
    return staged


def _view_of(value: Any) -> NDArray[Any]:
    if torch_tensors.is_tensor(value):
        return torch_tensors.array_of(value)
    return numpy_array_of(value, writable=False)


def _of_device(staged: StagedArray, writable: bool, read: bool) -> Operand:
    array = staged.read() if read else staged.allocate(staged.outline.shape, staged.dtype)
    commit = partial(staged.write, array) if writable else None
    return Operand(array, staged.value, staged.new_array, commit, shares=False, staged=staged)


def _of_tensor(tensor: Any, writable: bool) -> Operand:
    view = torch_tensors.array_of(tensor)
    array, commit = _contiguous(view, writable)
    written = partial(_commit_tensor, tensor, commit) if writable else None
    return Operand(array, tensor, torch_tensors.tensor_of, written, shares=array is view)


def _commit_tensor(tensor: Any, commit: Callable[[], None] | None) -> None:
    if commit is not None:
        commit()
    torch_tensors.mark_modified(tensor)


def _contiguous(view: NDArray[Any], writable: bool) -> tuple[NDArray[Any], Callable[[], None] | None]:
    """Returns the array to work on, and a function that copies it back."""
    kind_of(view.dtype)  # raises for unsupported dtypes
    if writable and not view.flags.writeable:
        raise UsageError(
            "the array is read-only, but the operation writes to it; give a copy, or another array as out="
        )
    if view.flags.c_contiguous:
        return view, None
    # C order even for Fortran order: the other ranks may use another layout.
    array = np.ascontiguousarray(view)
    return array, partial(np.copyto, view, array) if writable else None


class Allocations:
    """The allocations of one call, made by its thread."""

    __slots__ = ("error",)

    def __init__(self) -> None:
        self.error: MemoryError | None = None
        """After a failure, no array allocated here may be accessed."""

    def failed(self, error: MemoryError) -> None:
        """Keeps the first error."""
        self.error = self.error or error

    def take(self, make: Callable[[], NDArray[Any]], shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        try:
            return make()
        except MemoryError as error:
            self.failed(error)
            return placeholder(shape, dtype)

    def empty(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        return self.take(lambda: np.empty(count, dtype), (count,), dtype)

    def copy(self, array: NDArray[Any]) -> NDArray[Any]:
        return self.take(array.copy, array.shape, array.dtype)

    def allocate(self, given: Operand, shape: tuple[int, ...]) -> Operand:
        dtype = given.array.dtype
        try:
            return adapt(given.allocate(shape, dtype), writable=True)
        except MemoryError as error:
            self.failed(error)
            return placeholder_operand(shape, dtype)

    def adapt(self, value: Any, *, writable: bool = False, read: bool = True) -> Operand:
        try:
            return adapt(value, writable=writable, read=read)
        except MemoryError as error:
            self.failed(error)
            return placeholder_of(value)
