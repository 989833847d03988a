"""torch tensors on the CPU as arrays that share their memory, and back; and what all tensors of torch have in common.

torch is not imported: who holds a tensor has done that. As in torch.distributed, autograd does not see a collective: it
works on the values of a tensor that requires grad, and the result of a new tensor has no history.
"""

from __future__ import annotations

import sys
from ctypes import c_char
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from nexar.errors import UsageError

# NumPy's types that torch does not know, by their names in torch: they cross as integers of the same size.
_FOREIGN: Final[dict[str, tuple[str, np.dtype[Any]]]] = {
    "bfloat16": ("int16", np.dtype(ml_dtypes.bfloat16)),
    "float8_e4m3fn": ("uint8", np.dtype(ml_dtypes.float8_e4m3fn)),
    "float8_e5m2": ("uint8", np.dtype(ml_dtypes.float8_e5m2)),
}
_NAMES: Final = {dtype: name for name, (_, dtype) in _FOREIGN.items()}
_COMMON: Final = frozenset(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
     "complex64", "complex128")
)  # fmt: skip


def is_loaded() -> bool:
    """Whether this process has imported torch, so that it has a use for tensors."""
    return hasattr(sys.modules.get("torch"), "from_numpy")


def is_tensor(value: object) -> bool:
    """Whether it is a torch tensor (a parameter, a subclass)."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, getattr(torch, "Tensor", ()))  # it may be in the midst of its import


def array_of(tensor: Any) -> NDArray[Any]:
    """An array in the tensor's memory, with its strides. UsageError where there is none."""
    if tensor.device.type != "cpu":
        raise UsageError(
            f"the tensor is on {tensor.device}, which no device adapter here knows; give tensor.cpu(), or install a "
            "package with an adapter for it"
        )
    refuse_what_has_no_memory(tensor)
    return array_in_memory(tensor, dtype_of(tensor))


def array_in_memory(tensor: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array in the memory of a dense tensor on the CPU, with its strides; `dtype` has the size of its elements. The
    array keeps the tensor alive.

    `Tensor.numpy()` and DLPack are not used. The former makes the storage impossible to resize for as long as it lives,
    which FSDP needs to do; what the latter returns is read-only with older versions of NumPy. As with both, an array
    must not be used after its tensor's storage was resized. UsageError for a tensor that has no memory of its own.
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
    memory.tensor = tensor  # the array holds `memory`
    return np.ndarray(shape, dtype, memory, 0, strides)


def refuse_what_has_no_memory(tensor: Any) -> None:
    """UsageError for a tensor whose elements do not lie somewhere, each in its place, on whatever device."""
    if tensor.layout is not module().strided:
        raise UsageError(
            f"the tensor's layout is {tensor.layout}, and only dense ones can be used; give tensor.to_dense()"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise UsageError("the tensor is a lazy conjugate or negative; give tensor.resolve_conj().resolve_neg()")


def dtype_of(tensor: Any) -> np.dtype[Any]:
    """NumPy's name for the tensor's dtype. UsageError if it has none."""
    name = _name(tensor.dtype)
    if name in _FOREIGN:
        return _FOREIGN[name][1]
    if name not in _COMMON:
        raise UsageError(f"a torch tensor of {tensor.dtype} cannot be sent or reduced; convert it")
    return np.dtype(name)


def plain(tensor: Any) -> Any:
    """The same memory, without history, in a type that both torch and NumPy know: integers for those that only one
    does.
    """
    name = _name(tensor.dtype)
    values = tensor.detach()
    return values.view(getattr(module(), _FOREIGN[name][0])) if name in _FOREIGN else values


def tensor_of(array: NDArray[Any]) -> Any:
    """A tensor in the memory of a new array."""
    name = _NAMES.get(array.dtype)
    return plain_tensor_of(array) if name is None else plain_tensor_of(array).view(getattr(module(), name))


def plain_tensor_of(array: NDArray[Any]) -> Any:
    """A tensor in the memory of an array, of the type that `plain` gives."""
    name = _NAMES.get(array.dtype)
    return module().from_numpy(array if name is None else array.view(np.dtype(_FOREIGN[name][0])))


def empty(shape: tuple[int, ...], dtype: np.dtype[Any], device: Any) -> Any:
    """A new tensor for values of this dtype of NumPy's."""
    torch = module()
    return torch.empty(shape, dtype=getattr(torch, _NAMES.get(dtype) or dtype.name), device=device)


def addresses(tensor: Any) -> tuple[int, int]:
    """Of its first byte, and behind its last."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    steps = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (steps + 1) * tensor.element_size()


def written(tensor: Any) -> None:
    """Tell autograd that the values changed, so that a backward pass that needs the old ones says so."""
    module().autograd.graph.increment_version(tensor)


def module() -> Any:
    """torch itself. Who has a tensor has imported it."""
    return sys.modules["torch"]


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
