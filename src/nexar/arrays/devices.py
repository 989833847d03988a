"""CUDA tensors of torch: staged through pinned memory, on the stream that the caller uses.

No call of this file waits for the device, and none concerns another stream than the caller's: each copy is followed by
an event, and the event is asked whether it has happened.

Which device adapters there are: ours, those that somebody registered, and those of installed packages.

A package adds one with an entry point of the group `nexar.device_adapters`: the name is the adapter's, the object a
callable without arguments that returns a `DeviceAdapter`. Packages are looked through, and theirs loaded, when an array
comes that nobody knows yet; a package that cannot be loaded is told of then, by its name, and asked no more.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nexar.arrays import torch_tensors
from nexar.arrays.device_adapter import CopyDone, DeviceAdapter, Outline, Pending
from nexar.arrays.staging import Staging, StagingStats
from nexar.errors import UsageError
from nexar.types import describe_package

# Of these only the ones that give, on the device, exactly what the host gives.
_IN_PLACE: Final = {
    "sum": "add",
    "prod": "mul",
    "min": "minimum",
    "max": "maximum",
    "band": "bitwise_and",
    "bor": "bitwise_or",
    "bxor": "bitwise_xor",
}

_STORED: Final = ("torch.uint16", "torch.uint32", "torch.uint64")


class CudaAdapter(DeviceAdapter):
    """See DeviceAdapter. A stream is a torch.cuda.Stream: the current one of the tensor's device as a call is made."""

    name = "cuda"

    def recognises(self, value: object) -> bool:
        """ROCm calls itself CUDA too."""
        return torch_tensors.is_tensor(value) and value.device.type == "cuda"  # type: ignore[attr-defined]

    def outline(self, value: Any) -> Outline:
        """See DeviceAdapter.outline."""
        torch_tensors.refuse_what_has_no_memory(value)
        dtype = torch_tensors.dtype_of(value)
        return Outline(dtype, tuple(value.shape), str(value.device))

    def stream_of(self, value: Any) -> Any:
        """UsageError while the stream is recorded as a graph: what is sent would be sent once, and never again."""
        runtime = self._runtime()
        if runtime.is_current_stream_capturing():
            raise UsageError("a CUDA graph is being captured, which cannot hold messages; call it outside of the graph")
        return runtime.current_stream(value.device)

    def stage_out(self, values: Sequence[Any], into: NDArray[Any], stream: Any) -> Pending:
        """Several tensors are put together on the device first: one copy costs less than many."""
        if not into.size:
            return CopyDone()
        with self._on(stream):
            held = [torch_tensors.plain(value) for value in values]
            whole = held[0] if len(held) == 1 else torch_tensors.module().cat([each.reshape(-1) for each in held])
            torch_tensors.plain_tensor_of(into).view(whole.shape).copy_(whole, non_blocking=True)
            return self._after(values, stream)

    def stage_in(self, values: Sequence[Any], source: NDArray[Any], stream: Any) -> Pending:
        """One copy to the device, and from there into the tensors."""
        if not source.size:
            return CopyDone()
        with self._on(stream):
            host = torch_tensors.plain_tensor_of(source)
            rooms = [torch_tensors.plain(value) for value in values]
            if len(rooms) == 1:
                rooms[0].copy_(host.view(rooms[0].shape), non_blocking=True)
            else:
                _spread(host.to(rooms[0].device, non_blocking=True), rooms)
            return self._after(values, stream)

    def empty(self, like: Any, shape: tuple[int, ...], dtype: np.dtype[Any], stream: Any) -> Any:
        """See DeviceAdapter.empty."""
        with self._on(stream):
            return torch_tensors.empty(shape, dtype, like.device)

    def overlap(self, one: Any, other: Any) -> bool:
        """By the addresses between the first element and the last: two columns of a matrix count as one."""
        (first, first_end), (second, second_end) = torch_tensors.addresses(one), torch_tensors.addresses(other)
        return bool(one.device == other.device and first < second_end and second < first_end)

    def host_memory(self, size_bytes: int) -> NDArray[np.uint8]:
        """Pinned, so that the device copies by itself."""
        torch = torch_tensors.module()
        memory: NDArray[np.uint8] = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        return memory

    def reduce(self, op: str, into: Any, other: Any, stream: Any) -> bool:
        """The reductions that have one instruction."""
        name = _IN_PLACE.get(op)
        if name is None or into.dtype != other.dtype or not _computes(op, into.dtype):
            return False
        with self._on(stream):
            getattr(torch_tensors.module(), name)(into.detach(), other.detach(), out=into.detach())
            self._after((into, other), stream)
        return True

    # -- inside ----------------------------------------------------------------------------------------

    def _runtime(self) -> Any:
        return torch_tensors.module().cuda

    def _on(self, stream: Any) -> Any:
        """The stream's device is current inside, too."""
        return self._runtime().stream(stream)

    def _after(self, values: Sequence[Any], stream: Any) -> Pending:
        """What happens when all that was begun so far on the stream is done. The allocator of torch learns that the
        tensors are used there: one that its owner drops meanwhile is not handed to anybody else too early.
        """
        for value in values:
            value.record_stream(stream)
        event = self._runtime().Event()
        event.record(stream)
        return _Event(event)


def _computes(op: str, dtype: Any) -> bool:
    """Whether torch has it: it knows the wide unsigned and the narrow floating types as memory only, bits of integers
    only, and no order of complex numbers.
    """
    if str(dtype) in _STORED or (dtype.itemsize == 1 and dtype.is_floating_point):
        return False
    if op in ("band", "bor", "bxor"):
        return not (dtype.is_floating_point or dtype.is_complex)
    return not (dtype.is_complex and op in ("min", "max"))


def _spread(whole: Any, rooms: Sequence[Any]) -> None:
    ends = accumulate((room.numel() for room in rooms), initial=0)
    for room, (start, stop) in zip(rooms, pairwise(ends), strict=True):
        room.copy_(whole[start:stop].view(room.shape))


class _Event:
    """See Pending."""

    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())


GROUP: Final = "nexar.device_adapters"


class DeviceRegistry:
    """The adapters of a process. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # while the next line is replaced, whole, so that readers need none
        self._known: tuple[Staging, ...] = (Staging(CudaAdapter()),)
        # While packages are loaded, and over what is below. Another one than for adding: a package that another thread
        # imports at this moment may add its adapter itself, and the thread that loads it waits for that import.
        self._looking = threading.RLock()
        self._broken: list[str] = []
        self._looked = False

    def add(self, adapter: DeviceAdapter) -> None:
        """Know this one too; those known before are asked first. UsageError for what is no adapter, or has no name."""
        if not isinstance(adapter, DeviceAdapter):
            raise UsageError(f"{adapter!r} is no nexar.arrays.device_adapter.DeviceAdapter; give an instance of one")
        if not isinstance(getattr(adapter, "name", None), str):
            raise UsageError(f"{adapter!r} has no name; give its class one, which errors and statistics then say")
        with self._lock:
            self._known = (*self._known, Staging(adapter))

    def find(self, value: object) -> Staging | None:
        """Who knows this array; None: nobody. The first array that nobody knows makes packages load.

        UsageError if nobody knows it and a package could not be loaded, which might have; DeviceError, with the name of
        the adapter, if one raises when it is asked.
        """
        found = self._knows(value)
        if found is not None:
            return found
        with self._looking:
            if not self._looked:
                self._looked = True
                self._look()
            broken = "; ".join(self._broken)
        found = self._knows(value)
        if found is None and broken:
            raise UsageError(f"nobody here knows arrays of type {type(value).__qualname__}, and {broken}")
        return found

    def stats(self) -> dict[str, StagingStats]:
        """By adapter; only those that were used."""
        counted = {each.adapter.name: each.memory.stats() for each in self._known}
        return {name: stats for name, stats in counted.items() if stats.hits or stats.misses}

    def _knows(self, value: object) -> Staging | None:
        return next((each for each in self._known if each.recognises(value)), None)

    def _look(self) -> None:
        """Looking through all that is installed takes long: only who has a strange array does."""
        from importlib.metadata import entry_points  # noqa: PLC0415

        for point in entry_points(group=GROUP):
            try:
                self.add(point.load()())
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the code of a package raises
                self._broken.append(
                    f"the device adapter {point.name!r} of {describe_package(point)} could not be loaded "
                    f"({type(error).__name__}: {error}); repair or uninstall that package"
                )


ADAPTERS: Final = DeviceRegistry()
"""Of this process."""
