"""torch's tensors as arrays: those that are reduced, and those that only move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from nexar.arrays import torch_adapter
from nexar.errors import UsageError

_PLAIN: Final = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
     torch.bool, torch.complex64, torch.complex128}
)  # fmt: skip
"""Types that NumPy has too: nearly always, so they take a short way."""
_FOREIGN: Final = frozenset({torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2})


def values(tensor: torch.Tensor) -> NDArray[Any]:
    """To reduce: an array in the tensor's memory, with its strides. UsageError where there is none."""
    if tensor.dtype in _PLAIN and tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_conj():
        plain: NDArray[Any] = tensor.detach().numpy()
        return plain
    _refuse_sparse(tensor)
    return torch_adapter.array_of(tensor)


def content(tensor: torch.Tensor) -> NDArray[Any]:
    """To move: as `values`, and bytes where the numbers have a type that no array has."""
    if tensor.dtype in _PLAIN or tensor.dtype in _FOREIGN:
        return values(tensor)
    _refuse_sparse(tensor)
    if not tensor.is_contiguous():
        raise UsageError(f"a tensor of {tensor.dtype} can be moved only if it is contiguous; give tensor.contiguous()")
    return values(tensor.detach().view(torch.uint8))


def row(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """All of them, one after the other, in new memory."""
    return np.concatenate([array.reshape(-1) for array in arrays])


def pour(parts: Sequence[NDArray[Any]], into: Sequence[NDArray[Any]]) -> None:
    """Copy each part into the array at its place, whatever their shapes. UsageError if one does not fit."""
    for rank, (part, room) in enumerate(zip(parts, into, strict=True)):
        if part.size != room.size or part.dtype != room.dtype:
            raise UsageError(
                f"rank {rank} sent {part.dtype}[{part.size}], and the tensor for it has {room.dtype}[{room.size}]; "
                "give one of that dtype and as many elements"
            )
        np.copyto(room, part.reshape(room.shape))


def _refuse_sparse(tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise UsageError(
            f"the backend nexar has no collectives for tensors of layout {tensor.layout}; give tensor.to_dense(), or "
            "make the layer dense (sparse=False in an embedding)"
        )
