"""Translates torch's calls to plans of communicator calls.

Only this module knows how torch nests its lists of tensors, and its ReduceOps. `nexar.torch.calls` reads torch's option
objects and runs the plans; a barrier and the reduction of one CPU tensor need no plan from here. A step is done after
its `finish` has run on its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import torch
from torch._C._distributed_c10d import ReduceOp

from nexar.arrays.compression.base import Compressor
from nexar.errors import UsageError
from nexar.torch.tensors import (
    PIECE_BYTES,
    Array,
    ReceivedTensors,
    concatenate,
    content,
    copy_parts,
    count,
    divide,
    flat,
    on_stream,
    pieces,
    to_fill,
    values,
)

# Compared with ==, one after the other: a ReduceOp with a factor is neither hashable nor printable.
_NAMES: Final[tuple[tuple[Any, str], ...]] = (
    (ReduceOp.SUM, "sum"),
    (ReduceOp.AVG, "avg"),
    (ReduceOp.MAX, "max"),
    (ReduceOp.MIN, "min"),
    (ReduceOp.PRODUCT, "prod"),
    (ReduceOp.BAND, "band"),
    (ReduceOp.BOR, "bor"),
    (ReduceOp.BXOR, "bxor"),
)


class TorchReduction(NamedTuple):
    """A ReduceOp: multiply by `factor`, if any, then reduce with `name`."""

    name: str
    factor: Any = None


_KNOWN: Final = tuple((op, TorchReduction(name)) for op, name in _NAMES)


def reduction_of(op: Any) -> TorchReduction:
    """UsageError for an unsupported operation."""
    for known, reduction in _KNOWN:
        if op == known:
            return reduction
    if op == ReduceOp.PREMUL_SUM:
        return TorchReduction("sum", op.__getstate__()[1])
    allowed = "SUM, AVG, MIN, MAX, PRODUCT, BAND, BOR, BXOR, PREMUL_SUM"
    raise UsageError(f"the backend nexar does not know this ReduceOp; use {allowed}")


def averages_integers(reduction: TorchReduction, tensor: torch.Tensor) -> bool:
    """False for booleans, which the communicator rejects."""
    kind = tensor.dtype
    return reduction.name == "avg" and not (kind.is_floating_point or kind.is_complex or kind is torch.bool)


Tensors = Sequence[torch.Tensor]


class PlanStep(NamedTuple):
    """One communicator call."""

    method: str
    """Of the communicator, and of its `start`."""
    arguments: tuple[Any, ...] = ()
    settings: dict[str, Any] = {}  # noqa: RUF012  # nothing writes to it
    finish: Callable[[Any], object] | None = None


class TorchPlan(NamedTuple):
    """One torch call, and the tensors that hold its result."""

    steps: Sequence[PlanStep]
    result: Any


# -- in place ------------------------------------------------------------------------------------------------------


def all_reduce(tensors: Tensors, op: Any, size: int) -> TorchPlan:
    """In place."""
    reduction = reduction_of(op)
    steps = [_reduced(_scaled(each, reduction), *_op_and_finish(reduction, each, each, size)) for each in tensors]
    return TorchPlan(steps, tensors)


def all_reduce_coalesced(tensors: Tensors, op: Any, size: int) -> TorchPlan:
    """In place; averaged integers are a separate call."""
    reduction = reduction_of(op)
    integers = [each for each in tensors if averages_integers(reduction, each)]
    others = [each for each in tensors if not averages_integers(reduction, each)]
    steps = []
    for some in filter(None, (integers, others)):
        arrays = [_scaled(each, reduction) for each in some]
        name, _ = _op_and_finish(reduction, some[0], some[0], size)
        finish = on_stream(arrays[0], partial(_divide_all, arrays, size)) if some is integers else None
        steps.append(PlanStep("all_reduce_bucketed", (arrays, name), {}, finish))
    return TorchPlan(steps, tensors)


def average_compressed(tensor: torch.Tensor, compressor: Compressor, residual: torch.Tensor | None) -> TorchPlan:
    """In place; the result is the tensor itself."""
    left = None if residual is None else values(residual)
    step = PlanStep("all_reduce_compressed", (values(tensor), compressor), {"residual": left, "op": "avg"})
    return TorchPlan([step], tensor)


def broadcast(tensors: Tensors, root: int) -> TorchPlan:
    """In place."""
    return TorchPlan([PlanStep("broadcast", (content(each), root)) for each in tensors], tensors)


def reduce(tensors: Tensors, op: Any, root: int, size: int, *, at_root: bool) -> TorchPlan:
    """In place, at the root."""
    reduction = reduction_of(op)
    steps = []
    for each in tensors:
        name, finish = _op_and_finish(reduction, each, each, size)
        steps.append(PlanStep("reduce", (_scaled(each, reduction), name, root), {}, finish if at_root else None))
    return TorchPlan(steps, tensors)


# -- gather --------------------------------------------------------------------------------------------------------


def all_gather(outputs: Sequence[Tensors], inputs: Tensors, size: int) -> TorchPlan:
    """`outputs[i][rank]` receives that rank's `inputs[i]`."""
    for target in outputs:
        _check_length("all_gather", "the output list", target, size)
    steps = [_gathered(target, each) for target, each in zip(outputs, inputs, strict=True)]
    return TorchPlan(steps, outputs)


def all_gather_coalesced(outputs: Sequence[Tensors], inputs: Tensors, size: int) -> TorchPlan:
    """`outputs[rank][i]` receives that rank's `inputs[i]`."""
    _check_length("all_gather_coalesced", "the output list", outputs, size, "one list")
    for target in outputs:
        if len(target) != len(inputs):
            raise UsageError(
                f"all_gather_coalesced: an output list has {len(target)} tensors, and the input list {len(inputs)}; "
                "give as many in each"
            )
    targets = [[outputs[rank][place] for rank in range(size)] for place in range(len(inputs))]
    return TorchPlan([_gathered(target, each) for target, each in zip(targets, inputs, strict=True)], outputs)


def all_gather_single(outputs: Tensors, inputs: Tensors) -> TorchPlan:
    """Each output receives all ranks' inputs."""
    steps = [
        PlanStep("all_gather", (content(each),), {"out": to_fill(target)})
        for target, each in zip(outputs, inputs, strict=True)
    ]
    return TorchPlan(steps, outputs)


def gather(outputs: Sequence[Tensors], inputs: Tensors, root: int, size: int) -> TorchPlan:
    """Only the root has outputs."""
    for each in outputs:
        _check_length("gather", "gather_list", each, size)
    steps = []
    for place, each in enumerate(inputs):
        target = [to_fill(tensor) for tensor in outputs[place]] if outputs else None
        finish = None if target is None else on_stream(target[0], partial(_spread, target))
        steps.append(PlanStep("gather", (content(each), root), {}, finish))
    return TorchPlan(steps, outputs)


def gather_single(output: torch.Tensor, given: torch.Tensor, root: int, *, at_root: bool) -> TorchPlan:
    """Into one tensor at the root."""
    settings = {"out": to_fill(output)} if at_root else {}
    return TorchPlan([PlanStep("gather", (content(given), root), settings)], [output])


# -- scatter -------------------------------------------------------------------------------------------------------


def scatter(outputs: Tensors, inputs: Sequence[Tensors], root: int, size: int) -> TorchPlan:
    """`inputs[i][rank]` goes to that rank; only the root has inputs."""
    for each in inputs:
        _check_length("scatter", "scatter_list", each, size)
    steps = []
    for place, target in enumerate(outputs):
        blocks = _equal_blocks([content(tensor) for tensor in inputs[place]]) if inputs else None
        steps.append(PlanStep("scatter", (blocks, root), {"out": to_fill(target)}))
    return TorchPlan(steps, outputs)


def reduce_scatter(outputs: Tensors, inputs: Sequence[Tensors], op: Any, size: int) -> TorchPlan:
    """`outputs[i]`: all ranks' `inputs[i][this rank]`, reduced."""
    reduction = reduction_of(op)
    steps = []
    for target, parts in zip(outputs, inputs, strict=True):
        _check_length("reduce_scatter", "the input list", parts, size)
        arrays = [_fresh(part, reduction) for part in parts]
        counts = [count(array) for array in arrays]
        name, finish = _op_and_finish(reduction, parts[0], target, size)
        settings: dict[str, Any] = {"op": name, "out": values(target)}
        if len(set(counts)) == 1:
            steps.append(PlanStep("reduce_scatter", (concatenate(arrays),), settings, finish))
        else:
            steps.append(PlanStep("reduce_scatter_v", (concatenate(arrays), counts), settings, finish))
    return TorchPlan(steps, outputs)


def reduce_scatter_single(outputs: Tensors, inputs: Tensors, op: Any, size: int) -> TorchPlan:
    """`outputs[i]`: this rank's part of all ranks' `inputs[i]`, reduced."""
    reduction = reduction_of(op)
    steps = []
    for target, each in zip(outputs, inputs, strict=True):
        array = flat(_fresh(each, reduction))
        name, finish = _op_and_finish(reduction, each, target, size)
        steps.append(PlanStep("reduce_scatter", (array,), {"op": name, "out": values(target)}, finish))
    return TorchPlan(steps, outputs)


# -- all to all ----------------------------------------------------------------------------------------------------


def all_to_all(outputs: Tensors, inputs: Tensors, size: int) -> TorchPlan:
    """`inputs[rank]` goes to that rank."""
    _check_length("all_to_all", "the output list", outputs, size)
    _check_length("all_to_all", "the input list", inputs, size)
    target = [to_fill(each) for each in outputs]
    finish = on_stream(target[0], partial(copy_parts, into=target))
    step = PlanStep("all_to_all_v", ([content(each) for each in inputs],), {}, finish)
    return TorchPlan([step], outputs)


def all_to_all_single(
    output: torch.Tensor, given: torch.Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], size: int
) -> TorchPlan:
    """Splits along the first dimension, equally without sizes."""
    source, target = content(given), to_fill(output)
    if not output_sizes and not input_sizes:
        step = PlanStep("all_to_all", (source,), {"out": target})
        return TorchPlan([step], [output])
    parts = _cut(source, input_sizes, size, "input")
    finish = partial(copy_parts, into=_cut(target, output_sizes, size, "output"))
    step = PlanStep("all_to_all_v", (parts,), {}, on_stream(target, finish))
    return TorchPlan([step], [output])


# -- messages ------------------------------------------------------------------------------------------------------


def send(tensors: Tensors, rank: int, tag: int) -> TorchPlan:
    """One tensor."""
    return TorchPlan([PlanStep("send", (content(_only(tensors)), rank, tag))], tensors)


def recv(tensors: Tensors, rank: int, tag: int) -> TorchPlan:
    """Into one tensor."""
    received = ReceivedTensors(tensors)

    def finish(found: Any) -> None:
        received.source = found[1].rank

    settings = {"source": rank, "tag": tag, "return_source": True}
    return TorchPlan([PlanStep("recv", (to_fill(_only(tensors)),), settings, finish)], received)


# -- helpers -------------------------------------------------------------------------------------------------------


def _check_length(call: str, what: str, tensors: Sequence[Any], size: int, element: str = "one tensor") -> None:
    if len(tensors) != size:
        raise UsageError(f"{call}: {what} has {len(tensors)} entries for {size} ranks; give {element} for each rank")


def _op_and_finish(
    reduction: TorchReduction, given: torch.Tensor, target: torch.Tensor, size: int
) -> tuple[str, Callable[[Any], object] | None]:
    """The communicator rejects integer averages: they become a divided sum, as in NCCL."""
    if not averages_integers(reduction, given):
        return reduction.name, None
    array = values(target)
    return "sum", on_stream(array, partial(_divide_all, [array], size))


def _divide_all(arrays: Sequence[Array], size: int, _: Any) -> None:
    for array in arrays:
        divide(array, size)


def _reduced(array: Array, op: str, finish: Callable[[Any], object] | None) -> PlanStep:
    """Splits a large device array: copies and transfer overlap."""
    parts = pieces(array)
    if len(parts) == 1:
        return PlanStep("all_reduce", (array, op), {}, finish)
    return PlanStep("all_reduce_bucketed", (parts, op), {"bucket_bytes": PIECE_BYTES}, finish)


def _scaled(tensor: torch.Tensor, reduction: TorchReduction) -> Array:
    if reduction.factor is not None:
        with torch.no_grad():
            tensor.mul_(reduction.factor)
    return values(tensor)


def _fresh(tensor: torch.Tensor, reduction: TorchReduction) -> Array:
    return values(tensor if reduction.factor is None else tensor.detach() * reduction.factor)


def _gathered(outputs: Tensors, given: torch.Tensor) -> PlanStep:
    target = [to_fill(tensor) for tensor in outputs]
    if len({count(array) for array in target}) > 1:
        return PlanStep("all_gather_v", (content(given),), {}, on_stream(target[0], partial(copy_parts, into=target)))
    return PlanStep("all_gather", (content(given),), {}, on_stream(target[0], partial(_spread, target)))


def _spread(target: Sequence[Array], result: Array) -> None:
    copy_parts(
        [result[rank : rank + 1] for rank in range(len(target))], target
    )  # iterating would give scalars for 0-d tensors


def _equal_blocks(arrays: Sequence[Array]) -> Array:
    if len({count(array) for array in arrays}) > 1:
        raise UsageError("scatter gives every rank as many elements; pad the tensors of scatter_list to one size")
    return concatenate(arrays).reshape(len(arrays), count(arrays[0]))


def _cut(array: Array, sizes: Sequence[int], size: int, which: str) -> list[Array]:
    length = len(array) if array.ndim else 0
    counts = list(sizes) or [length // size] * size
    if len(counts) != size or sum(counts) != length:
        raise UsageError(
            f"{which}_split_sizes {counts} do not cut {length} rows for {size} ranks; give one number for each rank, "
            f"which add up to {length}"
        )
    ends = [0, *accumulate(counts)]
    return [array[start:stop] for start, stop in pairwise(ends)]


def _only(tensors: Tensors) -> torch.Tensor:
    if len(tensors) != 1:
        raise UsageError(f"a message is one tensor, and this call has {len(tensors)}")
    return tensors[0]
