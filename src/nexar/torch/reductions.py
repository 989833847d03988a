"""torch's ReduceOp as the names that a communicator knows."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch._C._distributed_c10d import ReduceOp

from nexar.errors import UsageError

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


class Reduction(NamedTuple):
    """What a ReduceOp means: multiply by `factor`, where there is one, and reduce with `name`."""

    name: str
    factor: Any = None


_KNOWN: Final = tuple((op, Reduction(name)) for op, name in _NAMES)


def reduction_of(op: Any) -> Reduction:
    """The meaning of `opts.reduceOp`. UsageError for one that torch has and we do not."""
    for known, reduction in _KNOWN:
        if op == known:
            return reduction
    if op == ReduceOp.PREMUL_SUM:
        return Reduction("sum", op.__getstate__()[1])
    raise UsageError("the backend nexar does not know this ReduceOp; use SUM, AVG, MIN, MAX, PRODUCT, BAND, BOR, BXOR")


def averages_integers(reduction: Reduction, tensor: torch.Tensor) -> bool:
    """Whether the elements are integers to be averaged. Booleans are not: the communicator refuses to average them."""
    kind = tensor.dtype
    return reduction.name == "avg" and not (kind.is_floating_point or kind.is_complex or kind is torch.bool)
