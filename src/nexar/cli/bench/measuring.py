"""One block of calls on one rank, whatever the system: memory, values, warm-ups, time of each call.

Runs in the ranks of every system, so that none is measured in a way of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nexar.cli.bench.measures import MEASURES
from nexar.cli.bench.order import Order, Reply
from nexar.cli.bench.pattern import count_wrong, fill, steady_value

Call = Callable[[], object]


class Unsupported(Exception):
    """This system does not have what was asked for."""


class System(Protocol):
    """What a system's rank can do."""

    rank: int
    size: int
    version: str

    def barrier(self) -> None:
        """Return when all ranks are here."""

    def bind(self, order: Order, source: NDArray[Any], target: NDArray[Any]) -> Call:
        """One call of the operation on this memory; `Unsupported` where there is no such operation."""


def measure(system: System, order: Order) -> Reply:
    """Check it if asked to, warm up, then time every call. All ranks begin the block together."""
    kind = MEASURES[order.measure]
    if kind.pair and system.rank > 1:
        return Reply()
    try:
        source, target = _memory(order, system.size)
        call = system.bind(order, source, target)
    except Unsupported as reason:
        return Reply(problem=str(reason))
    wrong = _checked(system, order, call, source, target) if order.check else 0
    source.fill(steady_value(order.op))
    target.fill(steady_value(order.op))
    for _ in range(order.warmups):
        call()
    if not kind.pair:  # a pair answers one another, which keeps them together
        system.barrier()
    times = _timed(call, order.iterations)
    return Reply(nanoseconds=times if not kind.pair or system.rank == 0 else (), wrong=wrong)


def _timed(call: Call, iterations: int) -> tuple[int, ...]:
    now = time.perf_counter_ns
    times = []
    for _ in range(iterations):
        began = now()
        call()
        times.append(now() - began)
    return tuple(times)


def _checked(system: System, order: Order, call: Call, source: NDArray[Any], target: NDArray[Any]) -> int:
    # A target that is also the input holds the values; one that is not is left with something wrong everywhere.
    in_place = not source.size and order.measure != "barrier"
    fill(source, system.rank, order.op)
    if in_place:
        fill(target, system.rank, order.op)
    else:
        target.fill(7)
    call()
    return count_wrong(target, order, system.rank, system.size) if _holds_result(order, system.rank) else 0


def _holds_result(order: Order, rank: int) -> bool:
    if order.measure == "barrier":
        return False
    if order.measure in ("gather", "reduce"):
        return rank == order.root
    return rank == 1 if order.measure == "p2p-bandwidth" else True


def _memory(order: Order, ranks: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Written to before use: memory that nobody wrote to is all one page, and reads faster than any."""
    dtype = dtype_named(order.dtype)
    source, target = (np.empty(count, dtype) for count in MEASURES[order.measure].counts(order.count, ranks))
    source.fill(0)
    target.fill(0)
    return source, target


def dtype_named(name: str) -> np.dtype[Any]:
    """A dtype of NumPy, or of ml_dtypes where that is installed."""
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
