"""torch tensors as arrays.

A CPU tensor becomes an array in its memory. A device tensor stays a tensor; the communicator stages it on the current
stream.
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
"""Accepted by communicator methods."""

PIECE_BYTES: Final = 8 << 20
"""Piece size of a device tensor, to overlap copy and transfer: enough for full copy speed."""
_PLAIN: Final = {
    dtype: np.dtype(str(dtype).removeprefix("torch."))
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
                  torch.uint8, torch.bool, torch.complex64, torch.complex128)
}  # fmt: skip
"""Types that NumPy has too, the common case."""
_EXCHANGED_AS_INTEGERS: Final = frozenset(getattr(torch, name) for name in torch_tensors.EXCHANGED_AS_INTEGERS)
"""Types that only torch and ml_dtypes have."""
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types, by element size, for elements that no array type represents."""


class ReceivedTensors(list[Any]):
    """Received tensors and their source, written once."""

    source = -1


def values(tensor: torch.Tensor) -> Array:
    """Return an array in the tensor's memory, to reduce. UsageError for a sparse tensor."""
    dtype = _PLAIN.get(tensor.dtype)
    if dtype is not None and tensor.is_cpu and tensor.layout is torch.strided and not _is_lazy(tensor):
        return torch_tensors.array_in_memory(tensor, dtype)
    _refuse_sparse(tensor)
    return torch_tensors.array_of(tensor) if tensor.is_cpu else tensor.detach()


def content(tensor: torch.Tensor) -> Array:
    """As `values`, to move. Types that arrays lack become integers."""
    if tensor.dtype in _PLAIN or tensor.dtype in _EXCHANGED_AS_INTEGERS:
        return values(tensor)
    _refuse_sparse(tensor)
    return values(tensor.detach().view(_INTEGERS[tensor.element_size()]))


def to_fill(tensor: torch.Tensor) -> Array:
    """As `content`, for output. UsageError if elements share memory (as after `expand`)."""
    if not tensor.is_contiguous() and any(
        step == 0 < length - 1 for step, length in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise UsageError(
            f"the tensor of shape {list(tensor.shape)} that is to be filled has elements that share their memory; give "
            "tensor.contiguous(), and look for the result there"
        )
    return content(tensor)


def count(array: Array) -> int:
    """The number of elements."""
    return array.size if isinstance(array, np.ndarray) else int(array.numel())


def flat(array: Array) -> Array:
    """One-dimensional in C order; a view if possible."""
    return array.reshape(-1)


def pieces(array: Array) -> Sequence[Array]:
    """Split a long contiguous device tensor into views. Equal on ranks with as many elements."""
    if isinstance(array, np.ndarray) or array.nbytes < 2 * PIECE_BYTES or not array.is_contiguous():
        return (array,)
    return tuple(array.reshape(-1).split(PIECE_BYTES // array.element_size()))


def concatenate(arrays: Sequence[Array]) -> Array:
    """Concatenate into new memory."""
    parts = [flat(array) for array in arrays]
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else torch.cat(parts)


def copy_parts(parts: Sequence[Any], into: Sequence[Any]) -> None:
    """Copies each part into its array. UsageError if one does not fit."""
    for rank, (part, target) in enumerate(zip(parts, into, strict=True)):
        if count(part) != count(target) or part.dtype != target.dtype:
            raise UsageError(
                f"rank {rank} sent {part.dtype}[{count(part)}], and the tensor for it has "
                f"{target.dtype}[{count(target)}]; give one of that dtype and as many elements"
            )
        if isinstance(target, torch.Tensor):
            target.copy_(part.reshape(target.shape))
        else:
            np.copyto(target, part.reshape(target.shape))


def divide(array: Array, by: int) -> None:
    """Divides integers in place, rounding toward zero."""
    if isinstance(array, torch.Tensor):
        array.copy_(array.to(torch.int64).div(by, rounding_mode="trunc"))
    elif array.dtype == np.uint64:
        np.floor_divide(array, np.uint64(by), out=array)
    else:  # in 64 bits: `by` may exceed the type's range
        quotient, rest = np.divmod(array.astype(np.int64), by)
        np.copyto(array, quotient + ((quotient < 0) & (rest != 0)), casting="unsafe")  # a quotient fits


def on_stream(array: Any, finish: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return `finish`, bound to the current stream in any thread."""
    if not isinstance(array, torch.Tensor) or array.device.type != "cuda":
        return finish
    stream = torch.cuda.current_stream(array.device)

    def run(result: Any) -> object:
        with torch.cuda.stream(stream):
            return finish(result)

    return run


def _is_lazy(tensor: torch.Tensor) -> bool:
    """The memory holds conjugates or negatives of the values."""
    return bool(tensor.is_conj() or tensor.is_neg())


def _refuse_sparse(tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise UsageError(
            f"the backend nexar has no collectives for tensors of layout {tensor.layout}; give tensor.to_dense(), or "
            "make the layer dense (sparse=False in an embedding)"
        )
