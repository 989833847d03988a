"""The interface of device adapters, for arrays that NumPy cannot access.

Staging   Arrays are copied to host memory, processed and copied back. An adapter begins copies and never waits.
Streams   `stream_of` is called once per call, in its thread; all work of the call gets its result.
Errors    Any error becomes DeviceError, except UsageError, for arrays that can never be staged.
Threads   Every method must be thread-safe.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Outline(NamedTuple):
    """Properties of a device array."""

    dtype: np.dtype[Any]
    """Unsupported dtypes are rejected."""
    shape: tuple[int, ...]
    device: str
    """Name in errors: `cuda:0`."""


class Pending(Protocol):
    """Copies in progress."""

    def done(self) -> bool:
        """Never waits. Raises if the copies failed."""


class CopyDone:
    """Copies that were synchronous."""

    def done(self) -> bool:
        return True


class DeviceAdapter(ABC):
    """Adapter for one kind of arrays."""

    name: str
    """Name in errors and statistics."""

    @abstractmethod
    def recognises(self, value: object) -> bool:
        """Whether the adapter handles this array. Must be fast and import nothing."""

    @abstractmethod
    def outline(self, value: Any) -> Outline:
        """Raises UsageError with a remedy if the array cannot be staged."""

    def stream_of(self, value: Any) -> Any:
        """Returns the caller's current stream. Default: no streams."""
        return None

    @abstractmethod
    def stage_out(self, values: Sequence[Any], into: NDArray[Any], stream: Any) -> Pending:
        """Begin to copy the arrays consecutively, in C order, into a flat host array."""

    @abstractmethod
    def stage_in(self, values: Sequence[Any], source: NDArray[Any], stream: Any) -> Pending:
        """Begin to fill the arrays from a flat host array, which stays unchanged until done."""

    @abstractmethod
    def empty(self, like: Any, shape: tuple[int, ...], dtype: np.dtype[Any], stream: Any) -> Any:
        """Returns a new uninitialised array on the device of `like`."""

    def overlap(self, one: Any, other: Any) -> bool:
        """Whether writing to one may change the other. Override it if arrays can be views."""
        return one is other

    def host_memory(self, size_bytes: int) -> NDArray[np.uint8]:
        """Returns host memory, pinned if possible. It is reused."""
        return np.empty(size_bytes, np.uint8)

    def reduce(self, op: str, into: Any, other: Any, stream: Any) -> bool:
        """Begin into = into ⊕ other on the stream. Returns False if unsupported. Not used yet."""
        return False
