"""Measures one block of calls on one rank, and checks results. Runs in the ranks of every system.

Element j of rank r is a small number that depends on (j + r) alone and repeats, so checking compares an array with six
numbers. Their sums are exact in every dtype; an average may be one rounding off.

A rank without an order sleeps in a read, because spinning would take a core from the measuring system.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from nexar.cli.bench.protocol import MEASURES, BenchOrder, BenchReply, RankHello, parse_order

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
    """Return a fixed point of the reduction, so that repeated calls never overflow."""
    return 0 if op in ("sum", "bxor", "lxor") else 1


def fill(array: Values, rank: int, op: str) -> None:
    """Write this rank's known values."""
    _rows(array)[...] = _of_rank(rank, 0, op)
    rest = array.size % PERIOD
    array[array.size - rest :] = _of_rank(rank, 0, op)[:rest]


def count_wrong(target: Values, order: BenchOrder, rank: int, ranks: int) -> int:
    """Count elements that differ from the expected result."""
    blocks = _expected(order, rank, ranks)
    return sum(
        _differing(block, expected, exact=order.op != "avg")
        for block, expected in zip(target.reshape(len(blocks), -1), blocks, strict=True)
    )


def _expected(order: BenchOrder, rank: int, ranks: int) -> list[Values]:
    offset, op = rank * order.count, order.op
    if order.measure in ("all_gather", "gather"):
        return [_of_rank(source, 0, op) for source in range(ranks)]
    if order.measure == "all_to_all":
        return [_of_rank(source, offset, op) for source in range(ranks)]
    if order.measure == "scatter":
        return [_of_rank(order.root, offset, op)]
    if order.measure == "broadcast":
        return [_of_rank(order.root, 0, op)]
    if order.measure.startswith("p2p"):
        return [_of_rank(0, 0, op)]
    start = offset if order.measure == "reduce_scatter" else 0
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
    # Averages are between 0 and 2: one rounding of the narrowest types is at most 1/8 there, of all others far less.
    tolerance = 1e-3 if block.dtype.itemsize >= 4 else 0.13
    return sum(
        int(np.count_nonzero(np.abs(found.astype(np.float32) - known.astype(np.float32)) > tolerance))
        for found, known in pairs
    )


TimedCall = Callable[[], object]


class Unsupported(Exception):
    """The system does not support the order."""


class System(Protocol):
    """A rank of a system."""

    rank: int
    size: int
    version: str

    def barrier(self) -> None: ...

    def bind(self, order: BenchOrder, source: NDArray[Any], target: NDArray[Any]) -> TimedCall:
        """Return one call on this memory. Raises Unsupported if the system lacks the operation."""


def measure(system: System, order: BenchOrder) -> BenchReply:
    """Check the result if ordered, warm up, then time every call."""
    kind = MEASURES[order.measure]
    if kind.pair and system.rank > 1:
        return BenchReply()
    try:
        source, target = _memory(order, system.size)
        call = system.bind(order, source, target)
    except Unsupported as reason:
        return BenchReply(problem=str(reason))
    wrong = _checked(system, order, call, source, target) if order.check else 0
    source.fill(steady_value(order.op))
    target.fill(steady_value(order.op))
    for _ in range(order.warmups):
        call()
    if not kind.pair:  # the replies keep a pair together
        system.barrier()
    times = _timed(call, order.iterations)
    return BenchReply(nanoseconds=times if not kind.pair or system.rank == 0 else (), wrong=wrong)


def _timed(call: TimedCall, iterations: int) -> tuple[int, ...]:
    now = time.perf_counter_ns
    times = []
    for _ in range(iterations):
        began = now()
        call()
        times.append(now() - began)
    return tuple(times)


def _checked(system: System, order: BenchOrder, call: TimedCall, source: NDArray[Any], target: NDArray[Any]) -> int:
    # An in-place target holds the values; another one is filled with a wrong value.
    in_place = not source.size and order.measure != "barrier"
    fill(source, system.rank, order.op)
    if in_place:
        fill(target, system.rank, order.op)
    else:
        target.fill(7)
    call()
    return count_wrong(target, order, system.rank, system.size) if _holds_result(order, system.rank) else 0


def _holds_result(order: BenchOrder, rank: int) -> bool:
    if order.measure == "barrier":
        return False
    if order.measure in ("gather", "reduce"):
        return rank == order.root
    return rank == 1 if order.measure == "p2p-bandwidth" else True


def _memory(order: BenchOrder, ranks: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Allocate and write: untouched memory is one shared page, which reads too fast."""
    dtype = dtype_named(order.dtype)
    source, target = (np.empty(count, dtype) for count in MEASURES[order.measure].counts(order.count, ranks))
    source.fill(0)
    target.fill(0)
    return source, target


def dtype_named(name: str) -> np.dtype[Any]:
    """Return a dtype of NumPy or ml_dtypes. Raises Unsupported."""
    try:
        return np.dtype(name)
    except TypeError:
        pass
    try:
        import ml_dtypes  # noqa: PLC0415 - not every system's environment has it

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found
    except (ImportError, AttributeError):
        raise Unsupported(f"no dtype {name} here") from None


def serve(system: System, path: str) -> None:
    """Serve orders from this Unix socket until the command closes it."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)
        line.sendall(RankHello(rank=system.rank, version=system.version).line())
        with line.makefile("rb") as orders:
            for order in orders:
                line.sendall(measure(system, parse_order(order)).line())
