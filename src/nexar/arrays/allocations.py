"""Memory that a collective needs before it takes its sequence number.

The other ranks wait for a call that this rank never begins. So a failed allocation must not stop the call before it has
its number: a placeholder of the same shape takes the place of the memory, and the call fails as soon as it has begun.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.operand import Operand, adapt, placeholder_of, placeholder_operand
from nexar.arrays.view import placeholder


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
