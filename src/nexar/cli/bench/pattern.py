"""Values that every rank can know of every other one, and the count of elements that are not as they must be.

Element j of rank r is a small number that depends on (j + r) alone and repeats: results repeat too, so any array is
compared with six numbers, without computing the operation a second time at full length. Sums of small whole numbers
are exact in every dtype; an average is not, and may be one rounding off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nexar.cli.bench.order import Order

Values = NDArray[Any]

PERIOD: Final = 6
_FOLDS: Final[dict[str, Callable[[Values], Values]]] = {
    "sum": lambda stack: stack.sum(axis=0),
    "prod": lambda stack: stack.prod(axis=0),
    "min": lambda stack: stack.min(axis=0),
    "max": lambda stack: stack.max(axis=0),
    "avg": lambda stack: stack.mean(axis=0),
    "band": np.bitwise_and.reduce,
    "bor": np.bitwise_or.reduce,
    "bxor": np.bitwise_xor.reduce,
    "land": np.logical_and.reduce,
    "lor": np.logical_or.reduce,
    "lxor": np.logical_xor.reduce,
}
OPERATIONS: Final = tuple(_FOLDS)


def steady_value(op: str) -> int:
    """What stays itself however often it is reduced with itself; calls in a row never overflow."""
    return 0 if op in ("sum", "bxor", "lxor") else 1


def fill(array: Values, rank: int, op: str) -> None:
    """The known values of a rank."""
    _rows(array)[...] = _of_rank(rank, 0, op)
    rest = array.size % PERIOD
    array[array.size - rest :] = _of_rank(rank, 0, op)[:rest]


def count_wrong(target: Values, order: Order, rank: int, ranks: int) -> int:
    """Elements of a rank's target that differ from what the operation must give."""
    blocks = _expected(order, rank, ranks)
    return sum(
        _differing(block, expected, exact=order.op != "avg")
        for block, expected in zip(target.reshape(len(blocks), -1), blocks, strict=True)
    )


def _expected(order: Order, rank: int, ranks: int) -> list[Values]:
    """For each block of the target, the numbers it repeats."""
    mine, op = rank * order.count, order.op
    if order.measure in ("all_gather", "gather"):
        return [_of_rank(source, 0, op) for source in range(ranks)]
    if order.measure == "all_to_all":
        return [_of_rank(source, mine, op) for source in range(ranks)]
    if order.measure == "scatter":
        return [_of_rank(order.root, mine, op)]
    if order.measure == "broadcast":
        return [_of_rank(order.root, 0, op)]
    if order.measure.startswith("p2p"):
        return [_of_rank(0, 0, op)]
    start = mine if order.measure == "reduce_scatter" else 0
    return [_FOLDS[op](np.stack([_of_rank(source, start, op) for source in range(ranks)]))]


def _of_rank(rank: int, start: int, op: str) -> Values:
    numbers = np.arange(start, start + PERIOD) + rank
    return numbers % 2 + 1 if op == "prod" else numbers % 3


def _rows(array: Values) -> Values:
    whole = array.size - array.size % PERIOD
    return array[:whole].reshape(-1, PERIOD)


def _differing(block: Values, expected: Values, *, exact: bool) -> int:
    wanted = expected.astype(block.dtype)
    rest = block.size % PERIOD
    pairs = ((_rows(block), wanted), (block[block.size - rest :], wanted[:rest]))
    if exact:
        return sum(int(np.count_nonzero(found != known)) for found, known in pairs)
    # Averages lie between 0 and 2: one rounding of the narrowest types is up to 1/8 there, of all others far less.
    room = 1e-3 if block.dtype.itemsize >= 4 else 0.13
    return sum(
        int(np.count_nonzero(np.abs(found.astype(np.float32) - known.astype(np.float32)) > room))
        for found, known in pairs
    )
