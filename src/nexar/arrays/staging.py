"""Staging of device arrays: host memory pool, waiting and error conversion.

Invariant: host memory is reused when no view of it exists and the device has finished with it. Every view keeps the
handed-out array alive; when that dies, the memory returns.
"""

from __future__ import annotations

import logging
import math
import operator
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.device_adapter import DeviceAdapter, Outline, Pending
from nexar.errors import DeviceError, NexarError

_log = logging.getLogger(__name__)

KEPT_BYTES: Final = 1 << 30
"""Kept per adapter: pinned memory is expensive."""
_MIN_BYTES: Final = 4 << 10
_SPIN: Final = 200e-6  # seconds: a small copy takes some ten microseconds
_SLEEP: Final = 50e-6


class StagingStats(NamedTuple):
    """Counters of one adapter's host memory."""

    hits: int  # reuses
    misses: int  # new allocations
    free_bytes: int  # bytes ready for reuse


class _Block:
    """Guarded by the pool's lock."""

    __slots__ = ("lost", "memory", "pending", "size")

    def __init__(self, memory: NDArray[np.uint8], size: int) -> None:
        self.memory = memory
        self.size = size
        self.pending: Pending | None = None  # the device's current copies
        self.lost = False  # a copy failed, so the device may still use it

    def idle(self) -> bool:
        """Whether the device is done. Drops completed copies, which may hold the memory."""
        try:
            if self.pending is not None and self.pending.done():
                self.pending = None
        except Exception as error:  # noqa: BLE001 - its waiter gets the error
            _log.info("host memory of a device is given up: %s", error)
            self.pending, self.lost = None, True
        return self.pending is None


class HostMemory:
    """Host memory pool of one adapter. Thread-safe."""

    def __init__(self, adapter: DeviceAdapter, kept_bytes: int = KEPT_BYTES) -> None:
        self._adapter = adapter
        self._max_free_bytes = kept_bytes
        self._lock = threading.Lock()  # guards the fields below unless stated otherwise
        self._free: list[_Block] = []  # most recently used last
        self._draining: list[_Block] = []  # used by the device only
        self._free_bytes = self._hits = self._misses = 0
        # Appended when an array dies, possibly while this thread holds the lock: deque methods are atomic.
        self._returned: deque[tuple[int, _Block]] = deque()
        self._taken: dict[int, _Block] = {}  # by id of the array handed out; dict methods are atomic

    def take(self, size_bytes: int) -> NDArray[np.uint8]:
        """Returns uninitialised memory, aligned for every dtype, valid while any view exists."""
        size = rounded(size_bytes)
        with self._lock:
            self._collect()
            block = self._find(size)
        if block is None:
            block = _Block(_checked_memory(self._adapter.host_memory(size), size), size)
        # Through a memoryview, so that views of the array keep this very array alive.
        handed = np.frombuffer(block.memory.data, np.uint8)
        self._taken[id(handed)] = block
        weakref.finalize(handed, self._returned.append, (id(handed), block)).atexit = False
        return handed[:size_bytes]

    def mark_in_use(self, array: NDArray[Any], pending: Pending) -> bool:
        """The device uses this memory until `pending` is done. Returns False for foreign memory."""
        block = self._block(array)
        if block is None:
            return False
        with self._lock:
            block.pending = pending
        return True

    def owns(self, array: NDArray[Any]) -> bool:
        return self._block(array) is not None

    def _block(self, array: NDArray[Any]) -> _Block | None:
        while isinstance(array.base, np.ndarray):
            array = array.base
        return self._taken.get(id(array))

    def stats(self) -> StagingStats:
        with self._lock:
            self._collect()
            return StagingStats(self._hits, self._misses, self._free_bytes)

    def _find(self, size: int) -> _Block | None:
        """Requires the lock."""
        for at in range(len(self._free) - 1, -1, -1):
            if self._free[at].size == size:
                self._hits += 1
                self._free_bytes -= size
                return self._free.pop(at)
        self._misses += 1
        return None

    def _collect(self) -> None:
        """Requires the lock."""
        for block in list(self._taken.values()):
            block.idle()
        while self._returned:
            identity, block = self._returned.popleft()
            if self._taken.get(identity) is block:  # a new array may have the id of the dead one
                del self._taken[identity]
            self._draining.append(block)
        draining, self._draining = self._draining, []
        for block in draining:
            if not block.idle():
                self._draining.append(block)
            elif not block.lost:
                self._free.append(block)
                self._free_bytes += block.size
        while self._free_bytes > self._max_free_bytes:
            self._free_bytes -= self._free.pop(0).size


def rounded(size_bytes: int) -> int:
    """Returns one of eight sizes between powers of two: little waste, much reuse."""
    if size_bytes <= _MIN_BYTES:
        return _MIN_BYTES
    step = 1 << max((size_bytes - 1).bit_length() - 4, 6)
    return -(-size_bytes // step) * step


class Staging:
    """An adapter and its host memory."""

    def __init__(self, adapter: DeviceAdapter) -> None:
        self.adapter: Final = adapter
        self.memory: Final = HostMemory(adapter)

    def recognises(self, value: object) -> bool:
        with _report("recognising an array", self.adapter.name):
            return bool(self.adapter.recognises(value))

    def stage(self, value: Any) -> StagedArray:
        """Raises UsageError, DeviceError."""
        with _report("looking at an array", self.adapter.name):
            return StagedArray(self, value, _checked(self.adapter.outline(value)), self.adapter.stream_of(value))

    def allocate(self, count: int, dtype: np.dtype[Any], device: str) -> NDArray[Any]:
        with _report("host_memory", device):
            return self.memory.take(count * dtype.itemsize).view(dtype)


class StagedArray(NamedTuple):
    """A device array in one call, with the caller's stream."""

    staging: Staging
    value: Any
    outline: Outline
    stream: Any

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.outline.dtype

    @property
    def size(self) -> int:
        return math.prod(self.outline.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def overlaps(self, other: StagedArray) -> bool:
        """Whether writing to one may change the other. Raises DeviceError."""
        with _report("comparing two arrays", self.outline.device):
            return self.staging is other.staging and self.staging.adapter.overlap(self.value, other.value)

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        return self.staging.allocate(math.prod(shape), dtype, self.outline.device).reshape(shape)

    def read(self) -> NDArray[Any]:
        """Blocks for this copy only."""
        array = self.allocate(self.outline.shape, self.dtype)
        gather([self], array.reshape(-1)).wait()
        return array

    def write(self, array: NDArray[Any]) -> None:
        """Later work on its stream sees the values."""
        scatter([self], array.reshape(-1))

    def new_array(self, array: NDArray[Any]) -> Any:
        adapter, device = self.staging.adapter, self.outline.device
        with _report("making an array", device):
            value = adapter.empty(self.value, array.shape, array.dtype, self.stream)
        if not self.staging.memory.owns(array):
            copied = self.allocate(array.shape, array.dtype)
            np.copyto(copied, array)
            array = copied
        StagedArray(self.staging, value, Outline(array.dtype, array.shape, device), self.stream).write(array)
        return value


class CopyBatch:
    """Copies in progress to or from one device."""

    def __init__(self, pending: Pending, device: str, operation: str) -> None:
        self._pending = pending
        self._device = device
        self._operation = operation

    def wait(self) -> None:
        """Raises DeviceError if a copy fails. Sleeps, so that Ctrl-C works. No deadline: device work may take long."""
        begun = time.monotonic()
        with _report(self._operation, self._device):
            while not self._pending.done():
                time.sleep(0 if time.monotonic() - begun < _SPIN else _SLEEP)


def gather(staged_arrays: Sequence[StagedArray], into: NDArray[Any]) -> CopyBatch:
    """Begin to copy device arrays into a flat array, which must be kept until done."""
    first = staged_arrays[0]
    with _report("stage_out", first.outline.device):
        pending = _checked_pending(
            first.staging.adapter.stage_out([each.value for each in staged_arrays], into, first.stream)
        )
    first.staging.memory.mark_in_use(into, pending)
    return CopyBatch(pending, first.outline.device, "stage_out")


def scatter(staged_arrays: Sequence[StagedArray], source: NDArray[Any]) -> None:
    """Begin to fill device arrays from a flat array, which may be dropped but not written."""
    first = staged_arrays[0]
    with _report("stage_in", first.outline.device):
        pending = _checked_pending(
            first.staging.adapter.stage_in([each.value for each in staged_arrays], source, first.stream)
        )
    if not first.staging.memory.mark_in_use(source, pending):
        CopyBatch(pending, first.outline.device, "stage_in").wait()


# -- checks of an adapter's results: wrong ones would cause early reuse or overflow of memory ---------------------


def _checked(outline: Any) -> Outline:
    if not isinstance(outline, Outline) or not isinstance(outline.dtype, np.dtype):
        raise TypeError(f"outline() returned {outline!r}; expected an Outline with a NumPy dtype")
    shape = tuple(map(operator.index, outline.shape))
    if min(shape, default=0) < 0:
        raise ValueError(f"outline() returned the shape {shape}; dimensions must not be negative")
    return outline._replace(shape=shape)


def _checked_memory(memory: Any, size: int) -> NDArray[np.uint8]:
    if not isinstance(memory, np.ndarray) or memory.nbytes < size:
        found = f"{memory.nbytes} bytes" if isinstance(memory, np.ndarray) else type(memory).__qualname__
        raise TypeError(f"host_memory() returned {found}; {size} bytes were asked for")
    return memory


def _checked_pending(pending: Any) -> Pending:
    if not hasattr(pending, "done"):
        raise TypeError(f"it returned {pending!r}, which has no done(); return a Pending, or CopyDone()")
    return cast(Pending, pending)


@contextmanager
def _report(operation: str, device: str) -> Iterator[None]:
    """Converts errors of device libraries to DeviceError."""
    try:
        yield
    except NexarError:
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {error}".rstrip(": ")
        raise DeviceError(device=device, operation=operation, cause=cause) from error
