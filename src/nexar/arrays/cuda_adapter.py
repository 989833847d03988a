"""CUDA tensors of torch: staged through pinned memory, on the stream that the caller uses.

No call of this file waits for the device, and none concerns another stream than the caller's: each copy is followed by
an event, and the event is asked whether it has happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nexar.arrays import torch_adapter
from nexar.arrays.device_adapter import DeviceAdapter, Finished, Outline, Pending
from nexar.errors import UsageError

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
        return torch_adapter.is_tensor(value) and value.device.type == "cuda"  # type: ignore[attr-defined]

    def outline(self, value: Any) -> Outline:
        """See DeviceAdapter.outline."""
        torch_adapter.refuse_what_has_no_memory(value)
        dtype = torch_adapter.dtype_of(value)
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
            return Finished()
        with self._on(stream):
            held = [torch_adapter.plain(value) for value in values]
            whole = held[0] if len(held) == 1 else torch_adapter.module().cat([each.reshape(-1) for each in held])
            torch_adapter.plain_tensor_of(into).view(whole.shape).copy_(whole, non_blocking=True)
            return self._after(values, stream)

    def stage_in(self, values: Sequence[Any], source: NDArray[Any], stream: Any) -> Pending:
        """One copy to the device, and from there into the tensors."""
        if not source.size:
            return Finished()
        with self._on(stream):
            host = torch_adapter.plain_tensor_of(source)
            rooms = [torch_adapter.plain(value) for value in values]
            if len(rooms) == 1:
                rooms[0].copy_(host.view(rooms[0].shape), non_blocking=True)
            else:
                _spread(host.to(rooms[0].device, non_blocking=True), rooms)
            return self._after(values, stream)

    def empty(self, like: Any, shape: tuple[int, ...], dtype: np.dtype[Any], stream: Any) -> Any:
        """See DeviceAdapter.empty."""
        with self._on(stream):
            return torch_adapter.empty(shape, dtype, like.device)

    def overlap(self, one: Any, other: Any) -> bool:
        """By the addresses between the first element and the last: two columns of a matrix count as one."""
        (first, first_end), (second, second_end) = torch_adapter.addresses(one), torch_adapter.addresses(other)
        return bool(one.device == other.device and first < second_end and second < first_end)

    def host_memory(self, size_bytes: int) -> NDArray[np.uint8]:
        """Pinned, so that the device copies by itself."""
        torch = torch_adapter.module()
        memory: NDArray[np.uint8] = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        return memory

    def reduce(self, op: str, into: Any, other: Any, stream: Any) -> bool:
        """The reductions that have one instruction."""
        name = _IN_PLACE.get(op)
        if name is None or into.dtype != other.dtype or not _computes(op, into.dtype):
            return False
        with self._on(stream):
            getattr(torch_adapter.module(), name)(into.detach(), other.detach(), out=into.detach())
            self._after((into, other), stream)
        return True

    # -- inside ----------------------------------------------------------------------------------------

    def _runtime(self) -> Any:
        return torch_adapter.module().cuda

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
