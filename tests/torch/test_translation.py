"""What torch asks for, as verbs, where that depends on what it brings."""

import pytest
import torch
import torch.distributed as dist

from nexar.errors import UsageError
from nexar.torch import translation
from nexar.torch.tensors import PIECE_BYTES

ELEMENTS = PIECE_BYTES // 4


def steps(tensor: torch.Tensor) -> list[translation.PlanStep]:
    return list(translation.all_reduce([tensor], dist.ReduceOp.SUM, 2).steps)


def test_a_long_tensor_of_a_device_is_reduced_in_pieces_that_are_copied_while_others_travel() -> None:
    (step,) = steps(torch.empty(2, ELEMENTS + 5, device="meta"))
    parts, op = step.arguments
    assert (step.method, op, step.settings) == ("all_reduce_bucketed", "sum", {"bucket_bytes": PIECE_BYTES})
    assert [part.numel() for part in parts] == [ELEMENTS, ELEMENTS, 10]
    assert [part.storage_offset() for part in parts] == [0, ELEMENTS, 2 * ELEMENTS]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(2 * ELEMENTS),
        torch.empty(2 * ELEMENTS - 1, device="meta"),
        torch.empty(4, ELEMENTS, device="meta").t(),
    ],
    ids=["of the host", "short", "not in a row"],
)
def test_others_are_reduced_as_they_are(tensor: torch.Tensor) -> None:
    (step,) = steps(tensor)
    assert step.method == "all_reduce"
    assert step.settings == {}


def test_the_error_for_an_unknown_op_names_all_that_torch_has() -> None:
    with pytest.raises(UsageError) as refused:
        translation.reduction_of(object())
    text = str(refused.value)
    assert {name for name in dir(dist.ReduceOp) if name.isupper()} == set(text.partition("use ")[2].split(", "))
