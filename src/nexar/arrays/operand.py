"""What the caller gave, as an array; and results as what the caller gave."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nexar.arrays import numpy_adapter, torch_adapter
from nexar.arrays.dtypes import can_travel, kind_of
from nexar.arrays.registration import ADAPTERS
from nexar.arrays.staging import Mirror
from nexar.arrays.view import placeholder
from nexar.errors import UsageError


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
        mirror: Mirror | None = None,
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
            return Operand(value, value, numpy_adapter.same, None, shares=True)
    mirror = mirror_of(value)
    if mirror is not None:
        return _of_device(mirror, writable, read)
    if torch_adapter.is_tensor(value):
        return _of_tensor(value, writable)
    number = numpy_adapter.number_of(value)
    if number is not None:
        return Operand(number.array, None, number.like, None, shares=False)
    view = numpy_adapter.array_of(value, writable=writable)
    array, commit = _contiguous(view, writable)
    return Operand(array, value, numpy_adapter.same, commit, shares=array is view)


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
    return Operand(placeholder(shape, dtype), None, numpy_adapter.same, None, shares=False)


def mirror_of(value: Any) -> Mirror | None:
    """An array on a device, nothing of it copied yet; None for what is none. UsageError, DeviceError."""
    on_host = value.device.type == "cpu" if torch_adapter.is_tensor(value) else numpy_adapter.sees(value)
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
    if torch_adapter.is_tensor(value):
        return torch_adapter.array_of(value)
    return numpy_adapter.array_of(value, writable=False)


def _of_device(mirror: Mirror, writable: bool, read: bool) -> Operand:
    array = mirror.read() if read else mirror.room(mirror.outline.shape, mirror.dtype)
    commit = partial(mirror.write, array) if writable else None
    return Operand(array, mirror.value, mirror.made, commit, shares=False, mirror=mirror)


def _of_tensor(tensor: Any, writable: bool) -> Operand:
    view = torch_adapter.array_of(tensor)
    array, commit = _contiguous(view, writable)
    written = partial(_commit_tensor, tensor, commit) if writable else None
    return Operand(array, tensor, torch_adapter.tensor_of, written, shares=array is view)


def _commit_tensor(tensor: Any, commit: Callable[[], None] | None) -> None:
    if commit is not None:
        commit()
    torch_adapter.written(tensor)


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
