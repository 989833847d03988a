"""Device arrays in host memory: who keeps that memory, who waits for copies, and what becomes of their errors.

Law: host memory is used again when nobody holds a view of it *and* the device has done what was begun with it. The
first is known because every view keeps alive the one array that was handed out: when that dies, the memory comes back.
So a send, a message that waits or a result may keep it for as long as it likes, and nobody gives anything back by hand.
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
"""Of free memory, for each adapter: pinned memory is dear to make, and what it pins nobody else can use."""
_LEAST_BYTES: Final = 4 << 10
_SPIN: Final = 200e-6  # seconds: a small copy takes some ten microseconds
_SLEEP: Final = 50e-6


class StagingStats(NamedTuple):
    """What the host memory of one adapter has done so far."""

    hits: int  # times that memory was used again
    misses: int  # times that some had to be made
    free_bytes: int  # that wait to be used again


class _Slab:
    """Memory of one size. Under the lock of its pool."""

    __slots__ = ("lost", "memory", "pending", "size")

    def __init__(self, memory: NDArray[np.uint8], size: int) -> None:
        """`size`: what was asked for; there may be more."""
        self.memory = memory
        self.size = size
        self.pending: Pending | None = None  # what the device still does with it
        self.lost = False  # nobody knows what the device still does with it

    def idle(self) -> bool:
        """Whether the device is done with it. What was pending is forgotten then: it may itself hold the memory."""
        try:
            if self.pending is not None and self.pending.done():
                self.pending = None
        except Exception as error:  # noqa: BLE001 - whoever waited for it was told
            _log.info("host memory of a device is given up: %s", error)
            self.pending, self.lost = None, True
        return self.pending is None


class HostMemory:
    """Of one adapter. Any thread."""

    def __init__(self, adapter: DeviceAdapter, kept_bytes: int = KEPT_BYTES) -> None:
        self._adapter = adapter
        self._most = kept_bytes
        self._lock = threading.Lock()  # over what is below, where nothing else is said
        self._free: list[_Slab] = []  # the one used last is the last
        self._draining: list[_Slab] = []  # nobody holds them, but the device
        self._free_bytes = self._hits = self._misses = 0
        # Appended to when an array dies, wherever that is, perhaps while this thread holds the lock: deques need none.
        self._returned: deque[tuple[int, _Slab]] = deque()
        self._taken: dict[int, _Slab] = {}  # by the identity of the array that was handed out; dict methods are atomic

    def take(self, size_bytes: int) -> NDArray[np.uint8]:
        """As many bytes, aligned for every dtype; anything may be in them. Theirs for as long as anybody sees them."""
        size = rounded(size_bytes)
        with self._lock:
            self._collect()
            slab = self._find(size)
        if slab is None:
            slab = _Slab(_as_asked(self._adapter.host_memory(size), size), size)
        # Through a memoryview: views of an array that lies in no other array's memory keep that very array alive.
        handed = np.frombuffer(slab.memory.data, np.uint8)
        self._taken[id(handed)] = slab
        weakref.finalize(handed, self._returned.append, (id(handed), slab)).atexit = False
        return handed[:size_bytes]

    def lend(self, array: NDArray[Any], pending: Pending) -> bool:
        """The device works with this array's memory until `pending` is done. False: the memory is none of ours."""
        slab = self._slab(array)
        if slab is None:
            return False
        with self._lock:
            slab.pending = pending
        return True

    def owns(self, array: NDArray[Any]) -> bool:
        """Whether it lies in memory that was taken here."""
        return self._slab(array) is not None

    def _slab(self, array: NDArray[Any]) -> _Slab | None:
        while isinstance(array.base, np.ndarray):
            array = array.base
        return self._taken.get(id(array))

    def stats(self) -> StagingStats:
        """Counters, all of one moment."""
        with self._lock:
            self._collect()
            return StagingStats(self._hits, self._misses, self._free_bytes)

    def _find(self, size: int) -> _Slab | None:
        """Under the lock."""
        for at in range(len(self._free) - 1, -1, -1):
            if self._free[at].size == size:
                self._hits += 1
                self._free_bytes -= size
                return self._free.pop(at)
        self._misses += 1
        return None

    def _collect(self) -> None:
        """Under the lock."""
        for slab in list(self._taken.values()):
            slab.idle()
        while self._returned:
            identity, slab = self._returned.popleft()
            if self._taken.get(identity) is slab:  # a new array may have the identity of the dead one by now
                del self._taken[identity]
            self._draining.append(slab)
        draining, self._draining = self._draining, []
        for slab in draining:
            if not slab.idle():
                self._draining.append(slab)
            elif not slab.lost:
                self._free.append(slab)
                self._free_bytes += slab.size
        while self._free_bytes > self._most:
            self._free_bytes -= self._free.pop(0).size


def rounded(size_bytes: int) -> int:
    """The size of memory for so many bytes: eight sizes from one power of two to the next, so little is wasted and much
    is used again.
    """
    if size_bytes <= _LEAST_BYTES:
        return _LEAST_BYTES
    step = 1 << max((size_bytes - 1).bit_length() - 4, 6)
    return -(-size_bytes // step) * step


class Staging:
    """An adapter, and the host memory of its arrays. One for each adapter of the process."""

    def __init__(self, adapter: DeviceAdapter) -> None:
        self.adapter: Final = adapter
        self.memory: Final = HostMemory(adapter)

    def recognises(self, value: object) -> bool:
        """Whether it is an array of this adapter's. DeviceError."""
        with _report("recognising an array", self.adapter.name):
            return bool(self.adapter.recognises(value))

    def mirror(self, value: Any) -> StagedArray:
        """The array as one that can be staged. UsageError, DeviceError."""
        with _report("looking at an array", self.adapter.name):
            return StagedArray(self, value, _checked(self.adapter.outline(value)), self.adapter.stream_of(value))

    def room(self, count: int, dtype: np.dtype[Any], device: str) -> NDArray[Any]:
        """Flat host memory."""
        with _report("host_memory", device):
            return self.memory.take(count * dtype.itemsize).view(dtype)


class StagedArray(NamedTuple):
    """A device array as one call sees it: on the stream that the caller used when it made the call."""

    staging: Staging
    value: Any
    outline: Outline
    stream: Any

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of its elements."""
        return self.outline.dtype

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.outline.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes they take."""
        return self.size * self.dtype.itemsize

    def overlaps(self, other: StagedArray) -> bool:
        """Whether what is written to the one may change the other. DeviceError."""
        with _report("comparing two arrays", self.outline.device):
            return self.staging is other.staging and self.staging.adapter.overlap(self.value, other.value)

    def room(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Host memory that is staged well."""
        return self.staging.room(math.prod(shape), dtype, self.outline.device).reshape(shape)

    def read(self) -> NDArray[Any]:
        """The values, on the host. Waits for them, and for nothing else on the device."""
        array = self.room(self.outline.shape, self.dtype)
        gather([self], array.reshape(-1)).wait()
        return array

    def write(self, array: NDArray[Any]) -> None:
        """Begin to fill the device array: later work on its stream finds the values there."""
        scatter([self], array.reshape(-1))

    def made(self, array: NDArray[Any]) -> Any:
        """A new device array with these values, beside this one."""
        adapter, device = self.staging.adapter, self.outline.device
        with _report("making an array", device):
            value = adapter.empty(self.value, array.shape, array.dtype, self.stream)
        if not self.staging.memory.owns(array):
            room = self.room(array.shape, array.dtype)
            np.copyto(room, array)
            array = room
        StagedArray(self.staging, value, Outline(array.dtype, array.shape, device), self.stream).write(array)
        return value


class CopyBatch:
    """Copies to or from one device, begun."""

    def __init__(self, pending: Pending, device: str, operation: str) -> None:
        self._pending = pending
        self._device = device
        self._operation = operation

    def wait(self) -> None:
        """Until they are done: DeviceError if they fail. Sleeps, so that others run, and Ctrl-C gets through.

        Without a deadline: they come after what the caller gave the device before, and that takes its time, as a
        caller's own work on the host does. Who waits for this rank meanwhile has a deadline.
        """
        begun = time.monotonic()
        with _report(self._operation, self._device):
            while not self._pending.done():
                time.sleep(0 if time.monotonic() - begun < _SPIN else _SLEEP)


def gather(mirrors: Sequence[StagedArray], into: NDArray[Any]) -> CopyBatch:
    """Begin to copy device arrays of one dtype and one adapter into a flat array. Keep it until the copies are done."""
    first = mirrors[0]
    with _report("stage_out", first.outline.device):
        pending = _begun(first.staging.adapter.stage_out([each.value for each in mirrors], into, first.stream))
    first.staging.memory.lend(into, pending)
    return CopyBatch(pending, first.outline.device, "stage_out")


def scatter(mirrors: Sequence[StagedArray], source: NDArray[Any]) -> None:
    """Begin to fill device arrays from a flat array, which may be dropped at once but must not be written to."""
    first = mirrors[0]
    with _report("stage_in", first.outline.device):
        pending = _begun(first.staging.adapter.stage_in([each.value for each in mirrors], source, first.stream))
    if not first.staging.memory.lend(source, pending):
        CopyBatch(pending, first.outline.device, "stage_in").wait()


# -- what an adapter gives, looked at: where it is wrong, memory would be used too early, or be too short -----------


def _checked(outline: Any) -> Outline:
    if not isinstance(outline, Outline) or not isinstance(outline.dtype, np.dtype):
        raise TypeError(f"outline() gave {outline!r}, which is no Outline with a NumPy dtype")
    shape = tuple(map(operator.index, outline.shape))
    if min(shape, default=0) < 0:
        raise ValueError(f"outline() gave the shape {shape}")
    return outline._replace(shape=shape)


def _as_asked(memory: Any, size: int) -> NDArray[np.uint8]:
    if not isinstance(memory, np.ndarray) or memory.nbytes < size:
        found = f"{memory.nbytes} bytes" if isinstance(memory, np.ndarray) else type(memory).__qualname__
        raise TypeError(f"host_memory() gave {found}, where {size} bytes were asked for")
    return memory


def _begun(pending: Any) -> Pending:
    if not hasattr(pending, "done"):
        raise TypeError(
            f"it gave {pending!r}, which cannot tell when the copies are done; give a Pending, or Finished()"
        )
    return cast(Pending, pending)


@contextmanager
def _report(operation: str, device: str) -> Iterator[None]:
    """Whatever a device's library raises is a DeviceError."""
    try:
        yield
    except NexarError:
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {error}".rstrip(": ")
        raise DeviceError(device=device, operation=operation, cause=cause) from error
