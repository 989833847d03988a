"""What NumPy can see, as arrays that share its memory.

What the caller gave, as an array; and results as what the caller gave.

Memory that a collective needs before it takes its sequence number.

The other ranks wait for a call that this rank never begins. So a failed allocation must not stop the call before it has
its number: a placeholder of the same shape takes the place of the memory, and the call fails as soon as it has begun.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nexar.arrays import torch_tensors
from nexar.arrays.devices import ADAPTERS
from nexar.arrays.dtypes import can_travel, kind_of
from nexar.arrays.staging import StagedArray
from nexar.arrays.views import placeholder
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


class PythonNumber(NamedTuple):
    """A number as an array of no dimension, and the way back."""

    array: NDArray[Any]
    like: Callable[[NDArray[Any]], object]


def same_array(result: NDArray[Any]) -> NDArray[Any]:
    """NumPy for NumPy."""
    return result


def number_of(value: object) -> PythonNumber | None:
    """Of a Python or NumPy number; None for anything else. UsageError for one that has no dtype we can send."""
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
    """Whether NumPy knows its memory, or it is no array at all, so that nobody else need be asked. Never copies."""
    if isinstance(value, _SEEN) or hasattr(value, "__array_interface__") or _buffer_of(value) is not None:
        return True
    return hasattr(value, "__dlpack_device__") and value.__dlpack_device__()[0] in _DLPACK_HOST


def numpy_array_of(value: Any, *, writable: bool) -> NDArray[Any]:
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


class Operand:
    """An argument of a collective."""

    __slots__ = ("_commit", "_like", "_mirror", "_value", "array", "shares")

    def __init__(
        self,
        array: NDArray[Any],
        value: object,
        like: Callable[[NDArray[Any]], object],
        commit: Callable[[], None] | None,
        *,
        shares: bool,
        mirror: StagedArray | None = None,
    ) -> None:
        """`mirror`: of an array on a device."""
        self.array = array
        """C-contiguous, of the caller's shape; in the caller's memory where that is possible."""
        self.shares = shares
        """`array` is the caller's own memory, so that whatever is written there is seen at once."""
        self._value = value
        self._like = like
        self._commit = commit
        self._mirror = mirror

    def commit(self) -> None:
        """Bring `array`, which was written to, into the caller's memory. Does nothing where it lies there already, and
        nothing to an operand that is only read.
        """
        if self._commit is not None:
            self._commit()

    def like(self, result: NDArray[Any]) -> Any:
        """A new array as one of the caller's kind: torch for torch, on the same device, a number for a number, NumPy's
        for all others.

        It may share the memory of `result`, which must not be written to any more.
        """
        return self._like(result)

    def room(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """A new array on the host, whose values do not matter: what is best given to `like` once it is filled."""
        return np.empty(shape, dtype) if self._mirror is None else self._mirror.room(shape, dtype)

    def may_share_memory(self, other: Operand) -> bool:
        """Whether what is written to the one may change the other. True if it is hard to tell."""
        if self._mirror is not None and other._mirror is not None:
            return self._mirror.overlaps(other._mirror)
        return np.may_share_memory(self.array, other.array)

    def result(self) -> Any:
        """What a verb that works in place returns: the caller's own object, or a new number where it gave one."""
        return self.like(self.array) if self._value is None else self._value


def adapt(value: Any, *, writable: bool = False, read: bool = True) -> Operand:
    """The operand for a value of the caller's; `writable`: the operation writes to it. `read=False`: what is there does
    not matter, since all of it will be written.

    NumPy arrays of any layout, numbers, whatever has the buffer protocol, `__array_interface__` or DLPack, torch
    tensors on the CPU and on CUDA devices, and arrays that a registered DeviceAdapter knows. UsageError for anything
    else, for a dtype that cannot travel, and for memory that is read-only although it is to be written. A number counts
    as writable: a new one comes back. DeviceError if the values of a device cannot be had.
    """
    if type(value) is np.ndarray:  # nearly always, so first
        flags = value.flags
        if flags.c_contiguous and can_travel(value.dtype) and (flags.writeable or not writable):
            return Operand(value, value, same_array, None, shares=True)
    mirror = mirror_of(value)
    if mirror is not None:
        return _of_device(mirror, writable, read)
    if torch_tensors.is_tensor(value):
        return _of_tensor(value, writable)
    number = number_of(value)
    if number is not None:
        return Operand(number.array, None, number.like, None, shares=False)
    view = numpy_array_of(value, writable=writable)
    array, commit = _contiguous(view, writable)
    return Operand(array, value, same_array, commit, shares=array is view)


def placeholder_of(value: Any) -> Operand:
    """An operand with the shape and dtype of an array that there is no memory to copy. It must not be read or written.

    MemoryError if not even the shape can be told without a copy.
    """
    mirror = mirror_of(value)
    if mirror is not None:
        return placeholder_operand(mirror.outline.shape, mirror.dtype)
    view = _view_of(value)
    return placeholder_operand(view.shape, view.dtype)


def placeholder_operand(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Operand:
    """Likewise, of an array that there is no memory for."""
    return Operand(placeholder(shape, dtype), None, same_array, None, shares=False)


def mirror_of(value: Any) -> StagedArray | None:
    """An array on a device, nothing of it copied yet; None for what is none. UsageError, DeviceError."""
    on_host = value.device.type == "cpu" if torch_tensors.is_tensor(value) else numpy_accepts(value)
    if on_host:
        return None
    staging = ADAPTERS.find(value)
    if staging is None:
        return None
    mirror = staging.mirror(value)
    kind_of(mirror.dtype)  # refuses what cannot travel
    return mirror


def _view_of(value: Any) -> NDArray[Any]:
    """An array that the host sees, in its own memory and layout."""
    if torch_tensors.is_tensor(value):
        return torch_tensors.array_of(value)
    return numpy_array_of(value, writable=False)


def _of_device(mirror: StagedArray, writable: bool, read: bool) -> Operand:
    array = mirror.read() if read else mirror.room(mirror.outline.shape, mirror.dtype)
    commit = partial(mirror.write, array) if writable else None
    return Operand(array, mirror.value, mirror.made, commit, shares=False, mirror=mirror)


def _of_tensor(tensor: Any, writable: bool) -> Operand:
    view = torch_tensors.array_of(tensor)
    array, commit = _contiguous(view, writable)
    written = partial(_commit_tensor, tensor, commit) if writable else None
    return Operand(array, tensor, torch_tensors.tensor_of, written, shares=array is view)


def _commit_tensor(tensor: Any, commit: Callable[[], None] | None) -> None:
    if commit is not None:
        commit()
    torch_tensors.written(tensor)


def _contiguous(view: NDArray[Any], writable: bool) -> tuple[NDArray[Any], Callable[[], None] | None]:
    """The array to work on, and what brings it back into the view."""
    kind_of(view.dtype)  # refuses what cannot travel
    if writable and not view.flags.writeable:
        raise UsageError(
            "the array is read-only, but the operation writes to it; give a copy, or another array as out="
        )
    if view.flags.c_contiguous:
        return view, None
    # In C order even if it lies in Fortran order: the other ranks may hold theirs differently.
    array = np.ascontiguousarray(view)
    return array, partial(np.copyto, view, array) if writable else None


class Allocations:
    """The allocations of one call, made by the thread that makes the call."""

    __slots__ = ("error",)

    def __init__(self) -> None:
        self.error: MemoryError | None = None
        """The first failure. If there is one, nothing may be read or written that was allocated here."""

    def failed(self, error: MemoryError) -> None:
        """An allocation failed. The first error stands."""
        self.error = self.error or error

    def take(self, make: Callable[[], NDArray[Any]], shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """The new array that `make` returns, or a placeholder of that shape and dtype."""
        try:
            return make()
        except MemoryError as error:
            self.failed(error)
            return placeholder(shape, dtype)

    def empty(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """A new flat array whose values do not matter, or a placeholder."""
        return self.take(lambda: np.empty(count, dtype), (count,), dtype)

    def copy(self, array: NDArray[Any]) -> NDArray[Any]:
        """A copy, or a placeholder."""
        return self.take(array.copy, array.shape, array.dtype)

    def room(self, given: Operand, shape: tuple[int, ...]) -> Operand:
        """A new array on the host for a result of the dtype of `given`; or an operand with a placeholder."""
        dtype = given.array.dtype
        try:
            return adapt(given.room(shape, dtype), writable=True)
        except MemoryError as error:
            self.failed(error)
            return placeholder_operand(shape, dtype)

    def adapt(self, value: Any, *, writable: bool = False, read: bool = True) -> Operand:
        """As operand.adapt, which copies an array that is not contiguous; or an operand with a placeholder."""
        try:
            return adapt(value, writable=writable, read=read)
        except MemoryError as error:
            self.failed(error)
            return placeholder_of(value)
