"""torch tensors on the CPU as arrays that share their memory, and back.

torch is not imported: who holds a tensor has done that. As in torch.distributed, autograd does not see a collective: it
works on the values of a tensor that requires grad, and the result of a new tensor has no history.
"""

from __future__ import annotations

import sys
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


def is_tensor(value: object) -> bool:
    """Whether it is a torch tensor (a parameter, a subclass)."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, getattr(torch, "Tensor", ()))  # it may be in the midst of its import


def array_of(tensor: Any) -> NDArray[Any]:
    """An array in the tensor's memory, with its strides. UsageError where there is none."""
    _refuse_what_has_no_memory(tensor)
    values = tensor.detach()
    name = str(values.dtype).removeprefix("torch.")
    if name in _FOREIGN:
        integer, dtype = _FOREIGN[name]
        bits: NDArray[Any] = values.view(getattr(_torch(), integer)).numpy()
        return bits.view(dtype)
    try:
        array: NDArray[Any] = values.numpy()
    except (TypeError, RuntimeError) as error:
        raise UsageError(f"a torch tensor of {values.dtype} cannot be sent or reduced ({error}); convert it") from error
    return array


def _refuse_what_has_no_memory(tensor: Any) -> None:
    if tensor.device.type != "cpu":
        raise UsageError(
            f"the tensor is on {tensor.device}, and only tensors on the CPU can be used; give tensor.cpu()"
        )
    if tensor.layout is not _torch().strided:
        raise UsageError(
            f"the tensor's layout is {tensor.layout}, and only dense ones can be used; give tensor.to_dense()"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise UsageError("the tensor is a lazy conjugate or negative; give tensor.resolve_conj().resolve_neg()")


def tensor_of(array: NDArray[Any]) -> Any:
    """A tensor in the memory of a new array."""
    torch = _torch()
    name = _NAMES.get(array.dtype)
    if name is None:
        return torch.from_numpy(array)
    bits = array.view(np.dtype(_FOREIGN[name][0]))
    return torch.from_numpy(bits).view(getattr(torch, name))


def written(tensor: Any) -> None:
    """Tell autograd that the values changed, so that a backward pass that needs the old ones says so."""
    _torch().autograd.graph.increment_version(tensor)


def _torch() -> Any:
    return sys.modules["torch"]
