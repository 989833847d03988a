from typing import Any

import numpy as np
import pytest

from nexar.arrays.dtypes import DTYPES
from nexar.arrays.operand import adapt
from nexar.arrays.torch_tensors import array_of, is_tensor
from nexar.errors import UsageError

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

BY_NAME = {str(dtype): dtype for dtype in DTYPES}  # torch uses the same names


@pytest.mark.parametrize("name", BY_NAME)
def test_every_dtype_shares_the_memory_of_the_tensor(name: str) -> None:
    tensor = torch.zeros(2, 3, dtype=torch.float32).to(getattr(torch, name))
    operand = adapt(tensor, writable=True)
    assert operand.array.dtype == BY_NAME[name]
    assert operand.array.shape == (2, 3)
    operand.array[:] = np.ones((), BY_NAME[name])
    operand.commit()
    assert operand.result() is tensor
    assert tensor.to(torch.complex64 if tensor.is_complex() else torch.float32).eq(1).all()


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("shape", [(), (0,), (4,), (2, 3)])
def test_a_new_array_comes_back_as_a_tensor_of_its_dtype(name: str, shape: tuple[int, ...]) -> None:
    tensor = adapt(torch.zeros(1).to(getattr(torch, name))).like(np.ones(shape, BY_NAME[name]))
    assert isinstance(tensor, torch.Tensor)
    assert tensor.dtype == getattr(torch, name)
    assert tuple(tensor.shape) == shape


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e5m2"])
def test_strided_tensors_are_written_back(name: str) -> None:
    whole = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7], [8, 10, 12, 14]], dtype=torch.float32).to(getattr(torch, name))
    operand = adapt(whole.t()[1], writable=True)
    assert operand.array.astype(np.float32).tolist() == [1, 5, 10]
    operand.array[:] = np.zeros((), operand.array.dtype)
    operand.commit()
    assert whole.to(torch.float32)[:, 1].eq(0).all()
    assert whole.to(torch.float32)[:, 2].tolist() == [2, 6, 12]


def test_a_tensor_that_requires_grad_is_used_by_its_values() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    assert is_tensor(parameter)
    operand = adapt(parameter, writable=True)
    operand.array *= 2
    operand.commit()
    assert parameter.tolist() == [2, 2, 2]
    assert parameter.requires_grad
    assert not operand.like(np.ones(3, np.float32)).requires_grad


def test_autograd_notices_that_a_value_it_needs_was_overwritten() -> None:
    leaf = torch.ones(3, requires_grad=True)
    middle = leaf * 2
    end = (middle * middle).sum()
    operand = adapt(middle, writable=True)
    operand.array *= 2
    operand.commit()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        end.backward()


def test_a_tensor_elsewhere_is_refused_with_the_remedy() -> None:
    with pytest.raises(UsageError, match=r"the tensor is on meta, .*; give tensor.cpu\(\)"):
        adapt(torch.zeros(3, device="meta"))


def test_a_sparse_tensor_is_refused_with_the_remedy() -> None:
    with pytest.raises(UsageError, match=r"give tensor.to_dense\(\)"):
        adapt(torch.eye(3).to_sparse())


def test_a_lazy_conjugate_is_refused_with_the_remedy() -> None:
    with pytest.raises(UsageError, match=r"give tensor.resolve_conj\(\)"):
        adapt(torch.ones(3, dtype=torch.complex64).conj())


def test_a_dtype_that_cannot_travel_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be sent or reduced"):
        adapt(torch.zeros(3).to(torch.float8_e4m3fnuz))


def test_it_reports_whether_what_is_written_is_seen_at_once() -> None:
    assert adapt(torch.arange(8.0), writable=True).shares
    assert not adapt(torch.arange(8.0)[::2], writable=True).shares


def test_a_tensor_can_be_resized_once_its_array_is_no_longer_used():
    for tensor in (torch.ones(4), torch.ones(4, dtype=torch.bfloat16)):
        array = array_of(tensor)
        array[0] = 2
        assert tensor[0] == 2
        del array
        tensor.untyped_storage().resize_(0)


def test_an_array_keeps_its_tensor_alive():
    array = array_of(torch.full((1000,), 7.0))
    others = [torch.zeros(1000) for _ in range(10)]
    assert array.tolist() == [7.0] * 1000
    assert len(others) == 10
