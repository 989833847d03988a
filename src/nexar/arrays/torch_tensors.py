"""Conversion between torch tensors on the CPU and arrays that share their memory.

torch is not imported here: a caller with a tensor has imported it. Autograd does not see collectives.
"""

from __future__ import annotations

import sys
from ctypes import c_char
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from nexar.errors import UsageError

EXCHANGED_AS_INTEGERS: Final[dict[str, tuple[str, np.dtype[Any]]]] = {
    "bfloat16": ("int16", np.dtype(ml_dtypes.bfloat16)),
    "float8_e4m3fn": ("uint8", np.dtype(ml_dtypes.float8_e4m3fn)),
    "float8_e5m2": ("uint8", np.dtype(ml_dtypes.float8_e5m2)),
}
"""The supported types that NumPy lacks, by their torch names: torch exchanges them as integers of the same size."""
_NAMES: Final = {dtype: name for name, (_, dtype) in EXCHANGED_AS_INTEGERS.items()}
_COMMON: Final = frozenset(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
     "complex64", "complex128")
)  # fmt: skip


def is_loaded() -> bool:
    """Whether torch is imported."""
    return hasattr(sys.modules.get("torch"), "from_numpy")


def is_tensor(value: object) -> bool:
    """True also for parameters and subclasses."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, getattr(torch, "Tensor", ()))  # torch may be partially imported


def array_of(tensor: Any) -> NDArray[Any]:
    """Returns an array with the tensor's strides. Raises UsageError."""
    if tensor.device.type != "cpu":
        raise UsageError(
            f"the tensor is on {tensor.device}, which no device adapter here knows; give tensor.cpu(), or install a "
            "package with an adapter for it"
        )
    require_dense_memory(tensor)
    return array_in_memory(tensor, dtype_of(tensor))


def array_in_memory(tensor: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns an array with the tensor's strides that keeps the tensor alive. `Tensor.numpy()` would forbid resizing
    the storage, as FSDP does; DLPack arrays are read-only in older NumPy. Invalid after a resize.
    """
    shape, strides, length = tensor.shape, None, tensor.nbytes
    start: int = tensor.data_ptr()
    if not length:
        return np.empty(shape, dtype)
    if not start:
        raise UsageError(f"{type(tensor).__name__} has no memory of its own; give the tensor that holds its values")
    if not tensor.is_contiguous():
        strides = [step * dtype.itemsize for step in tensor.stride()]
        length = addresses(tensor)[1] - start
    memory = (c_char * length).from_address(start)
    memory.tensor = tensor  # kept alive by the array through `memory`
    return np.ndarray(shape, dtype, memory, 0, strides)


def require_dense_memory(tensor: Any) -> None:
    """Raises UsageError if the elements are not materialised."""
    if tensor.layout is not module().strided:
        raise UsageError(
            f"the tensor's layout is {tensor.layout}, and only dense ones can be used; give tensor.to_dense()"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise UsageError("the tensor is a lazy conjugate or negative; give tensor.resolve_conj().resolve_neg()")


def dtype_of(tensor: Any) -> np.dtype[Any]:
    """Returns the NumPy dtype. Raises UsageError if NumPy and ml_dtypes lack it."""
    name = _name(tensor.dtype)
    if name in EXCHANGED_AS_INTEGERS:
        return EXCHANGED_AS_INTEGERS[name][1]
    if name not in _COMMON:
        raise UsageError(f"a torch tensor of {tensor.dtype} cannot be sent or reduced; convert it")
    return np.dtype(name)


def numpy_compatible(tensor: Any) -> Any:
    """Returns the same memory, detached; as integers if NumPy lacks the type."""
    name = _name(tensor.dtype)
    values = tensor.detach()
    return values.view(getattr(module(), EXCHANGED_AS_INTEGERS[name][0])) if name in EXCHANGED_AS_INTEGERS else values


def tensor_of(array: NDArray[Any]) -> Any:
    """Returns a tensor in the memory of a new array."""
    name = _NAMES.get(array.dtype)
    return plain_tensor_of(array) if name is None else plain_tensor_of(array).view(getattr(module(), name))


def plain_tensor_of(array: NDArray[Any]) -> Any:
    """Like `tensor_of`, in the type of `numpy_compatible`."""
    name = _NAMES.get(array.dtype)
    return module().from_numpy(array if name is None else array.view(np.dtype(EXCHANGED_AS_INTEGERS[name][0])))


def empty(shape: tuple[int, ...], dtype: np.dtype[Any], device: Any) -> Any:
    """Returns a new tensor of a NumPy dtype."""
    torch = module()
    return torch.empty(shape, dtype=getattr(torch, _NAMES.get(dtype) or dtype.name), device=device)


def addresses(tensor: Any) -> tuple[int, int]:
    """Returns the first address and the one after the last."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    steps = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (steps + 1) * tensor.element_size()


def mark_modified(tensor: Any) -> None:
    """Tell autograd that the values changed."""
    module().autograd.graph.increment_version(tensor)


def module() -> Any:
    """Returns the imported torch."""
    return sys.modules["torch"]


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
