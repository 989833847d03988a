"""torch's tensors as arrays: those that are reduced, and those that only move.

A tensor on the CPU becomes an array in its memory. One on a device stays what it is: a communicator takes it so, and
stages it through pinned memory on the stream that is current when the call is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from nexar.arrays import torch_tensors
from nexar.errors import UsageError

Array: TypeAlias = NDArray[Any] | torch.Tensor
"""What the verbs of a communicator take: one of the CPU, or one of a device."""

PIECE_BYTES: Final = 8 << 20
"""Of a device's tensor, that are copied while others travel: large enough that a copy is at full speed."""
_PLAIN: Final = {
    dtype: np.dtype(str(dtype).removeprefix("torch."))
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
                  torch.uint8, torch.bool, torch.complex64, torch.complex128)
}  # fmt: skip
"""Types that NumPy has too: nearly always, so they take a short way."""
_FOREIGN: Final = frozenset({torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2})
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the size of an element: as what elements travel whose type no array has."""


def values(tensor: torch.Tensor) -> Array:
    """To reduce: an array in the tensor's memory, with its strides. UsageError where there is none."""
    dtype = _PLAIN.get(tensor.dtype)
    if dtype is not None and tensor.is_cpu and tensor.layout is torch.strided and not _is_lazy(tensor):
        return torch_tensors.array_in_memory(tensor, dtype)
    _refuse_sparse(tensor)
    return torch_tensors.array_of(tensor) if tensor.is_cpu else tensor.detach()


def content(tensor: torch.Tensor) -> Array:
    """To move: as `values`, and integers of the same size where the elements have a type that no array has."""
    if tensor.dtype in _PLAIN or tensor.dtype in _FOREIGN:
        return values(tensor)
    _refuse_sparse(tensor)
    return values(tensor.detach().view(_INTEGERS[tensor.element_size()]))


def to_fill(tensor: torch.Tensor) -> Array:
    """As `content`, of a tensor that gets what others have. UsageError if several of its elements are one place in
    memory (`expand` makes such): only the last of what comes would stay.
    """
    if not tensor.is_contiguous() and any(
        step == 0 < length - 1 for step, length in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise UsageError(
            f"the tensor of shape {list(tensor.shape)} that is to be filled has elements that share their memory; give "
            "tensor.contiguous(), and look for the result there"
        )
    return content(tensor)


def count(array: Array) -> int:
    """How many elements it has."""
    return array.size if isinstance(array, np.ndarray) else int(array.numel())


def flat(array: Array) -> Array:
    """In a row, in C order; its own memory where that is possible."""
    return array.reshape(-1)


def pieces(array: Array) -> Sequence[Array]:
    """In its memory, one after the other; a single one unless it is a device's, lies in a row, and is long. Every rank
    that brings as many elements gets the same.
    """
    if isinstance(array, np.ndarray) or array.nbytes < 2 * PIECE_BYTES or not array.is_contiguous():
        return (array,)
    return tuple(array.reshape(-1).split(PIECE_BYTES // array.element_size()))


def row(arrays: Sequence[Array]) -> Array:
    """All of them, one after the other, in new memory."""
    parts = [flat(array) for array in arrays]
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else torch.cat(parts)


def pour(parts: Sequence[Any], into: Sequence[Any]) -> None:
    """Copy each part into the array at its place, whatever their shapes. UsageError if one does not fit."""
    for rank, (part, room) in enumerate(zip(parts, into, strict=True)):
        if count(part) != count(room) or part.dtype != room.dtype:
            raise UsageError(
                f"rank {rank} sent {part.dtype}[{count(part)}], and the tensor for it has {room.dtype}[{count(room)}]; "
                "give one of that dtype and as many elements"
            )
        if isinstance(room, torch.Tensor):
            room.copy_(part.reshape(room.shape))
        else:
            np.copyto(room, part.reshape(room.shape))


def divide(array: Array, by: int) -> None:
    """Divide integers in place, rounding toward zero."""
    if isinstance(array, torch.Tensor):
        array.copy_(array.to(torch.int64).div(by, rounding_mode="trunc"))
    elif array.dtype == np.uint64:
        np.floor_divide(array, np.uint64(by), out=array)
    else:  # in 64 bits: `by` may be more than the type can hold
        quotient, rest = np.divmod(array.astype(np.int64), by)
        np.copyto(array, quotient + ((quotient < 0) & (rest != 0)), casting="unsafe")  # a quotient fits


def on_stream(array: Any, finish: Callable[[Any], object]) -> Callable[[Any], object]:
    """The same, to be run by any thread, on the stream that is current now where the array's device has streams: what
    the caller begins there afterwards sees what it did.
    """
    if not isinstance(array, torch.Tensor) or array.device.type != "cuda":
        return finish
    stream = torch.cuda.current_stream(array.device)

    def run(result: Any) -> object:
        with torch.cuda.stream(stream):
            return finish(result)

    return run


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether the elements in memory are not the values, but their conjugates or negatives."""
    return bool(tensor.is_conj() or tensor.is_neg())


def _refuse_sparse(tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise UsageError(
            f"the backend nexar has no collectives for tensors of layout {tensor.layout}; give tensor.to_dense(), or "
            "make the layer dense (sparse=False in an embedding)"
        )


class ReceivedTensors(list[Any]):
    """The result of a receive: the tensors, and who sent them. Made before that is known, so written once."""

    source = -1
