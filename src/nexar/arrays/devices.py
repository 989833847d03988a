"""The CUDA adapter, and the registry of device adapters.

A package adds an adapter through an entry point of the group `nexar.device_adapters`: a callable that returns a
`DeviceAdapter`. Packages are loaded with the first unknown array.
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

# Only reductions with exactly the same result on device and host.
_IN_PLACE: Final = {
    "sum": "add",
    "prod": "mul",
    "min": "minimum",
    "max": "maximum",
    "band": "bitwise_and",
    "bor": "bitwise_or",
    "bxor": "bitwise_xor",
}

# torch stores and copies these, and has no arithmetic for them on a device.
_STORAGE_ONLY_DTYPES: Final = ("torch.uint16", "torch.uint32", "torch.uint64")


class CudaAdapter(DeviceAdapter):
    """For CUDA and ROCm tensors of torch, through pinned memory on the caller's stream."""

    name = "cuda"

    def recognises(self, value: object) -> bool:
        return torch_tensors.is_tensor(value) and value.device.type == "cuda"  # type: ignore[attr-defined]

    def outline(self, value: Any) -> Outline:
        torch_tensors.require_dense_memory(value)
        dtype = torch_tensors.dtype_of(value)
        return Outline(dtype, tuple(value.shape), str(value.device))

    def stream_of(self, value: Any) -> Any:
        """Raises UsageError during graph capture: a replay would not repeat messages."""
        runtime = self._runtime()
        if runtime.is_current_stream_capturing():
            raise UsageError(
                "a CUDA graph is being captured, and graphs cannot contain messages; call it outside of the graph"
            )
        return runtime.current_stream(value.device)

    def stage_out(self, values: Sequence[Any], into: NDArray[Any], stream: Any) -> Pending:
        """Concatenates on the device: one copy costs less than many."""
        if not into.size:
            return CopyDone()
        with self._on(stream):
            plain = [torch_tensors.numpy_compatible(value) for value in values]
            whole = plain[0] if len(plain) == 1 else torch_tensors.module().cat([each.reshape(-1) for each in plain])
            torch_tensors.plain_tensor_of(into).view(whole.shape).copy_(whole, non_blocking=True)
            return self._after(values, stream)

    def stage_in(self, values: Sequence[Any], source: NDArray[Any], stream: Any) -> Pending:
        if not source.size:
            return CopyDone()
        with self._on(stream):
            host = torch_tensors.plain_tensor_of(source)
            targets = [torch_tensors.numpy_compatible(value) for value in values]
            if len(targets) == 1:
                targets[0].copy_(host.view(targets[0].shape), non_blocking=True)
            else:
                _fill(host.to(targets[0].device, non_blocking=True), targets)
            return self._after(values, stream)

    def empty(self, like: Any, shape: tuple[int, ...], dtype: np.dtype[Any], stream: Any) -> Any:
        with self._on(stream):
            return torch_tensors.empty(shape, dtype, like.device)

    def overlap(self, one: Any, other: Any) -> bool:
        """Two columns of a matrix count as overlapping."""
        (first, first_end), (second, second_end) = torch_tensors.addresses(one), torch_tensors.addresses(other)
        return bool(one.device == other.device and first < second_end and second < first_end)

    def host_memory(self, size_bytes: int) -> NDArray[np.uint8]:
        torch = torch_tensors.module()
        memory: NDArray[np.uint8] = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        return memory

    def reduce(self, op: str, into: Any, other: Any, stream: Any) -> bool:
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
        return self._runtime().stream(stream)

    def _after(self, values: Sequence[Any], stream: Any) -> Pending:
        """Returns the end of all work so far. record_stream keeps torch from reusing a dropped tensor's memory."""
        for value in values:
            value.record_stream(stream)
        event = self._runtime().Event()
        event.record(stream)
        return _Event(event)


def _computes(op: str, dtype: Any) -> bool:
    """torch only stores wide unsigned and 8-bit float types."""
    if str(dtype) in _STORAGE_ONLY_DTYPES or (dtype.itemsize == 1 and dtype.is_floating_point):
        return False
    if op in ("band", "bor", "bxor"):
        return not (dtype.is_floating_point or dtype.is_complex)
    return not (dtype.is_complex and op in ("min", "max"))


def _fill(whole: Any, targets: Sequence[Any]) -> None:
    ends = accumulate((target.numel() for target in targets), initial=0)
    for target, (start, stop) in zip(targets, pairwise(ends), strict=True):
        target.copy_(whole[start:stop].view(target.shape))


class _Event:
    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())


GROUP: Final = "nexar.device_adapters"


class DeviceRegistry:
    """The adapters of a process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held to replace `_known` as a whole, so that readers need no lock
        self._known: tuple[Staging, ...] = (Staging(CudaAdapter()),)
        # Guards loading and the attributes below. It is not `_lock`: a package that another thread is importing may add
        # its adapter itself, while the loading thread waits for that import.
        self._load_lock = threading.RLock()
        self._load_errors: list[str] = []
        self._packages_loaded = False

    def add(self, adapter: DeviceAdapter) -> None:
        """Earlier adapters take precedence. Raises UsageError for an invalid one."""
        if not isinstance(adapter, DeviceAdapter):
            raise UsageError(
                f"{adapter!r} is not a nexar.arrays.device_adapter.DeviceAdapter; pass an instance of a subclass"
            )
        if not isinstance(getattr(adapter, "name", None), str):
            raise UsageError(f"{adapter!r} has no name; set `name` on its class, for errors and statistics")
        with self._lock:
            self._known = (*self._known, Staging(adapter))

    def find(self, value: object) -> Staging | None:
        """Returns None for an unknown array. Raises UsageError if a package that might know it failed to load,
        DeviceError if an adapter raises.
        """
        found = self._find_known(value)
        if found is not None:
            return found
        with self._load_lock:
            if not self._packages_loaded:
                self._packages_loaded = True
                self._load_packages()
            load_errors = "; ".join(self._load_errors)
        found = self._find_known(value)
        if found is None and load_errors:
            raise UsageError(f"no device adapter accepts arrays of type {type(value).__qualname__}; {load_errors}")
        return found

    def stats(self) -> dict[str, StagingStats]:
        counted = {each.adapter.name: each.memory.stats() for each in self._known}
        return {name: stats for name, stats in counted.items() if stats.hits or stats.misses}

    def _find_known(self, value: object) -> Staging | None:
        return next((each for each in self._known if each.recognises(value)), None)

    def _load_packages(self) -> None:
        from importlib.metadata import entry_points  # noqa: PLC0415

        for point in entry_points(group=GROUP):
            try:
                self.add(point.load()())
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a package may raise anything
                self._load_errors.append(
                    f"the device adapter {point.name!r} of {describe_package(point)} could not be loaded "
                    f"({type(error).__name__}: {error}); repair or uninstall that package"
                )


ADAPTERS: Final = DeviceRegistry()
"""The registry of this process."""
