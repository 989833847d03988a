"""torch's ReduceOp as the names that a communicator knows.

What torch asks for, as verbs of a communicator. Every function here only says what is to be done.

torch calls backends with lists where one tensor would do, with lists of lists, and with options of many kinds; this is
the one place that knows about it. A call becomes a few steps. What must be done with a step's result (filling the
tensors of a list, say) is its `finish`: whoever drives the node runs it before the step counts as done.
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
    content,
    count,
    divide,
    flat,
    on_stream,
    pieces,
    pour,
    row,
    to_fill,
    values,
)

# Compared with ==, one after the other: a ReduceOp that carries a factor has no hash, and no way to be printed.
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
    """What a ReduceOp means: multiply by `factor`, where there is one, and reduce with `name`."""

    name: str
    factor: Any = None


_KNOWN: Final = tuple((op, TorchReduction(name)) for op, name in _NAMES)


def reduction_of(op: Any) -> TorchReduction:
    """The meaning of `opts.reduceOp`. UsageError for one that torch has and we do not."""
    for known, reduction in _KNOWN:
        if op == known:
            return reduction
    if op == ReduceOp.PREMUL_SUM:
        return TorchReduction("sum", op.__getstate__()[1])
    raise UsageError("the backend nexar does not know this ReduceOp; use SUM, AVG, MIN, MAX, PRODUCT, BAND, BOR, BXOR")


def averages_integers(reduction: TorchReduction, tensor: torch.Tensor) -> bool:
    """Whether the elements are integers to be averaged. Booleans are not: the communicator refuses to average them."""
    kind = tensor.dtype
    return reduction.name == "avg" and not (kind.is_floating_point or kind.is_complex or kind is torch.bool)


Tensors = Sequence[torch.Tensor]


class Verb(NamedTuple):
    """One call of a communicator: its verb, and what it is given."""

    verb: str
    arguments: tuple[Any, ...] = ()
    settings: dict[str, Any] = {}  # noqa: RUF012  # of a tuple, and nobody writes to it
    finish: Callable[[Any], object] | None = None


class TorchPlan(NamedTuple):
    """One call of torch's: what to do, and the tensors that hold the result afterwards."""

    name: str
    steps: Sequence[Verb]
    result: Any


# -- in place ------------------------------------------------------------------------------------------------------


def all_reduce(tensors: Tensors, op: Any, size: int) -> TorchPlan:
    """Each tensor in place."""
    reduction = reduction_of(op)
    steps = [_reduced(_scaled(each, reduction), *_performed(reduction, each, each, size)) for each in tensors]
    return TorchPlan("all_reduce", steps, tensors)


def all_reduce_coalesced(tensors: Tensors, op: Any, size: int) -> TorchPlan:
    """All of them together, in place; where they are averaged, integers apart from the others."""
    reduction = reduction_of(op)
    integers = [each for each in tensors if averages_integers(reduction, each)]
    others = [each for each in tensors if not averages_integers(reduction, each)]
    steps = []
    for some in filter(None, (integers, others)):
        arrays = [_scaled(each, reduction) for each in some]
        name, _ = _performed(reduction, some[0], some[0], size)
        finish = on_stream(arrays[0], partial(_divide_all, arrays, size)) if some is integers else None
        steps.append(Verb("all_reduce_bucketed", (arrays, name), {}, finish))
    return TorchPlan("all_reduce_coalesced", steps, tensors)


def average_compressed(tensor: torch.Tensor, compressor: Compressor, residual: torch.Tensor | None) -> TorchPlan:
    """In place; the result is the tensor itself."""
    left = None if residual is None else values(residual)
    step = Verb("all_reduce_compressed", (values(tensor), compressor), {"residual": left, "op": "avg"})
    return TorchPlan("average_compressed", [step], tensor)


def broadcast(tensors: Tensors, root: int) -> TorchPlan:
    """Each tensor in place."""
    return TorchPlan("broadcast", [Verb("broadcast", (content(each), root)) for each in tensors], tensors)


def reduce(tensors: Tensors, op: Any, root: int, size: int, *, at_root: bool) -> TorchPlan:
    """Each tensor in place, at the root."""
    reduction = reduction_of(op)
    steps = []
    for each in tensors:
        name, finish = _performed(reduction, each, each, size)
        steps.append(Verb("reduce", (_scaled(each, reduction), name, root), {}, finish if at_root else None))
    return TorchPlan("reduce", steps, tensors)


# -- gathering -----------------------------------------------------------------------------------------------------


def all_gather(outputs: Sequence[Tensors], inputs: Tensors, size: int) -> TorchPlan:
    """`outputs[i]` is one tensor for each rank, for what they have in `inputs[i]`."""
    for room in outputs:
        _check_length("all_gather", "the output list", room, size)
    steps = [_gathered(room, each) for room, each in zip(outputs, inputs, strict=True)]
    return TorchPlan("all_gather", steps, outputs)


def all_gather_coalesced(outputs: Sequence[Tensors], inputs: Tensors, size: int) -> TorchPlan:
    """The other way round: `outputs[rank]` is that rank's whole list."""
    _check_length("all_gather_coalesced", "the output list", outputs, size, "one list")
    for room in outputs:
        if len(room) != len(inputs):
            raise UsageError(
                f"all_gather_coalesced: an output list has {len(room)} tensors, and the input list {len(inputs)}; give "
                "as many in each"
            )
    rooms = [[outputs[rank][place] for rank in range(size)] for place in range(len(inputs))]
    return TorchPlan(
        "all_gather_coalesced", [_gathered(room, each) for room, each in zip(rooms, inputs, strict=True)], outputs
    )


def all_gather_single(outputs: Tensors, inputs: Tensors) -> TorchPlan:
    """Into one tensor each, that has the parts of all ranks one after the other."""
    steps = [
        Verb("all_gather", (content(each),), {"out": to_fill(room)}) for room, each in zip(outputs, inputs, strict=True)
    ]
    return TorchPlan("all_gather_single", steps, outputs)


def gather(outputs: Sequence[Tensors], inputs: Tensors, root: int, size: int) -> TorchPlan:
    """As all_gather, at the root; the others have no outputs."""
    for each in outputs:
        _check_length("gather", "gather_list", each, size)
    steps = []
    for place, each in enumerate(inputs):
        room = [to_fill(tensor) for tensor in outputs[place]] if outputs else None
        finish = None if room is None else on_stream(room[0], partial(_spread, room))
        steps.append(Verb("gather", (content(each), root), {}, finish))
    return TorchPlan("gather", steps, outputs)


def gather_single(output: torch.Tensor, given: torch.Tensor, root: int, *, at_root: bool) -> TorchPlan:
    """Into one tensor, at the root."""
    settings = {"out": to_fill(output)} if at_root else {}
    return TorchPlan("gather_single", [Verb("gather", (content(given), root), settings)], [output])


# -- scattering ----------------------------------------------------------------------------------------------------


def scatter(outputs: Tensors, inputs: Sequence[Tensors], root: int, size: int) -> TorchPlan:
    """`inputs[i]` is one tensor for each rank, at the root; the others have no inputs."""
    for each in inputs:
        _check_length("scatter", "scatter_list", each, size)
    steps = []
    for place, room in enumerate(outputs):
        blocks = _rows([content(tensor) for tensor in inputs[place]]) if inputs else None
        steps.append(Verb("scatter", (blocks, root), {"out": to_fill(room)}))
    return TorchPlan("scatter", steps, outputs)


def reduce_scatter(outputs: Tensors, inputs: Sequence[Tensors], op: Any, size: int) -> TorchPlan:
    """`inputs[i]` is one tensor for each rank, which gets the reduction of those that are for it."""
    reduction = reduction_of(op)
    steps = []
    for room, parts in zip(outputs, inputs, strict=True):
        _check_length("reduce_scatter", "the input list", parts, size)
        arrays = [_fresh(part, reduction) for part in parts]
        counts = [count(array) for array in arrays]
        name, finish = _performed(reduction, parts[0], room, size)
        settings: dict[str, Any] = {"op": name, "out": values(room)}
        if len(set(counts)) == 1:
            steps.append(Verb("reduce_scatter", (row(arrays),), settings, finish))
        else:
            steps.append(Verb("reduce_scatter_v", (row(arrays), counts), settings, finish))
    return TorchPlan("reduce_scatter", steps, outputs)


def reduce_scatter_single(outputs: Tensors, inputs: Tensors, op: Any, size: int) -> TorchPlan:
    """Of one tensor each, which has the parts of all ranks one after the other."""
    reduction = reduction_of(op)
    steps = []
    for room, each in zip(outputs, inputs, strict=True):
        array = flat(_fresh(each, reduction))
        name, finish = _performed(reduction, each, room, size)
        steps.append(Verb("reduce_scatter", (array,), {"op": name, "out": values(room)}, finish))
    return TorchPlan("reduce_scatter_single", steps, outputs)


# -- all to all ----------------------------------------------------------------------------------------------------


def all_to_all(outputs: Tensors, inputs: Tensors, size: int) -> TorchPlan:
    """`inputs[rank]` goes to that rank; they may have any sizes."""
    _check_length("all_to_all", "the output list", outputs, size)
    _check_length("all_to_all", "the input list", inputs, size)
    room = [to_fill(each) for each in outputs]
    finish = on_stream(room[0], partial(pour, into=room))
    step = Verb("all_to_all_v", ([content(each) for each in inputs],), {}, finish)
    return TorchPlan("all_to_all", [step], outputs)


def all_to_all_single(
    output: torch.Tensor, given: torch.Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], size: int
) -> TorchPlan:
    """Of one tensor, cut along its first dimension: into equal parts where no sizes are given."""
    source, room = content(given), to_fill(output)
    if not output_sizes and not input_sizes:
        step = Verb("all_to_all", (source,), {"out": room})
        return TorchPlan("all_to_all_single", [step], [output])
    parts = _cut(source, input_sizes, size, "input")
    finish = partial(pour, into=_cut(room, output_sizes, size, "output"))
    step = Verb("all_to_all_v", (parts,), {}, on_stream(room, finish))
    return TorchPlan("all_to_all_single", [step], [output])


# -- messages ------------------------------------------------------------------------------------------------------


def send(tensors: Tensors, rank: int, tag: int) -> TorchPlan:
    """One tensor."""
    return TorchPlan("send", [Verb("send", (content(_only(tensors)), rank, tag))], tensors)


def recv(tensors: Tensors, rank: int, tag: int) -> TorchPlan:
    """Into one tensor."""
    received = ReceivedTensors(tensors)

    def finish(found: Any) -> None:
        received.source = found[1].rank

    settings = {"source": rank, "tag": tag, "return_source": True}
    return TorchPlan("recv", [Verb("recv", (to_fill(_only(tensors)),), settings, finish)], received)


# -- inside --------------------------------------------------------------------------------------------------------


def _check_length(call: str, what: str, tensors: Sequence[Any], size: int, element: str = "one tensor") -> None:
    if len(tensors) != size:
        raise UsageError(f"{call}: {what} has {len(tensors)} entries for {size} ranks; give {element} for each rank")


def _performed(
    reduction: TorchReduction, given: torch.Tensor, room: torch.Tensor, size: int
) -> tuple[str, Callable[[Any], object] | None]:
    """The communicator's reduction, and what is done with its result in `room`: integers are averaged as NCCL does it,
    by a division of their sum. The communicator itself refuses that.
    """
    if not averages_integers(reduction, given):
        return reduction.name, None
    array = values(room)
    return "sum", on_stream(array, partial(_divide_all, [array], size))


def _divide_all(arrays: Sequence[Array], size: int, _: Any) -> None:
    for array in arrays:
        divide(array, size)


def _reduced(array: Array, op: str, finish: Callable[[Any], object] | None) -> Verb:
    """A large one of a device in pieces: while one travels, the next is copied from the device, and the last to it."""
    parts = pieces(array)
    if len(parts) == 1:
        return Verb("all_reduce", (array, op), {}, finish)
    return Verb("all_reduce_bucketed", (parts, op), {"bucket_bytes": PIECE_BYTES}, finish)


def _scaled(tensor: torch.Tensor, reduction: TorchReduction) -> Array:
    """In the tensor's memory, multiplied there."""
    if reduction.factor is not None:
        with torch.no_grad():
            tensor.mul_(reduction.factor)
    return values(tensor)


def _fresh(tensor: torch.Tensor, reduction: TorchReduction) -> Array:
    """An input that stays as it is."""
    return values(tensor if reduction.factor is None else tensor.detach() * reduction.factor)


def _gathered(outputs: Tensors, given: torch.Tensor) -> Verb:
    room = [to_fill(tensor) for tensor in outputs]
    if len({count(array) for array in room}) > 1:
        return Verb("all_gather_v", (content(given),), {}, on_stream(room[0], partial(pour, into=room)))
    return Verb("all_gather", (content(given),), {}, on_stream(room[0], partial(_spread, room)))


def _spread(room: Sequence[Array], result: Array) -> None:
    pour([result[rank : rank + 1] for rank in range(len(room))], room)  # iterating would give scalars for 0-d tensors


def _rows(arrays: Sequence[Array]) -> Array:
    if len({count(array) for array in arrays}) > 1:
        raise UsageError("scatter gives every rank as many elements; pad the tensors of scatter_list to one size")
    return row(arrays).reshape(len(arrays), count(arrays[0]))


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
