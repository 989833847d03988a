"""Algorithms: their input, cost, buffers, and the order in which they combine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from nexar.arrays.views import Span, split
from nexar.collectives.schedule import Step
from nexar.collectives.schedules.blocks import equal
from nexar.topology import FULL_MESH


class Shape(NamedTuple):
    """Input of a schedule, equal on all ranks except `rank`."""

    rank: int
    size: int
    count: int  # type: ignore[assignment] # tuple.count() is not needed
    """Elements of the vector, or of one rank's block."""
    root: int = 0
    segment: int = 0
    """Elements of a pipeline segment; 0: none."""
    spans: tuple[Span, ...] | None = None
    """The shares of reduce_scatter_v; None: nearly equal ones."""
    topology: str = FULL_MESH

    @property
    def blocks(self) -> tuple[Span, ...]:
        return equal(self.count, self.size)

    @property
    def shares(self) -> tuple[Span, ...]:
        return self.spans or split(self.count, self.size)


def no_buffers(_: Shape) -> tuple[int, ...]:
    """Buffer 0 suffices."""
    return ()


class CostFormulas(NamedTuple):
    """Cost on two or more ranks, in the symbols of docs/reference/algorithms.md. A test checks it."""

    steps: str
    """Of the busiest rank."""
    sent: str
    """Elements that a rank sends at most."""
    memory: str = "0"
    """Elements beside the array."""
    powers_of_two: bool = False
    """If `n` is not a power of two, some ranks send up to two thirds more."""


class Algorithm(NamedTuple):
    """One algorithm of one operation."""

    make: Callable[[Shape], Iterator[Step]]
    cost: CostFormulas | None = None
    """Required in the table."""
    buffers: Callable[[Shape], tuple[int, ...]] = no_buffers
    """Sizes of buffers 1 …."""
    ordered: bool = True
    """Combines in rank order: the reduction need not commute."""
    left_fold: bool = True
    """One left fold over all ranks: bit-identical results."""
    single_fold: bool = False
    """One rank combines all operands of an element, so it is rounded once."""


def all_ranks_buffer(s: Shape) -> tuple[int, ...]:
    """Buffer 1 has room for the vectors of all ranks."""
    return (s.size * s.count,)


def root_buffer(s: Shape) -> tuple[int, ...]:
    """Like `all_ranks_buffer`, at the root only."""
    return all_ranks_buffer(s) if s.rank == s.root else ()


def share_buffer(s: Shape) -> tuple[int, ...]:
    """Buffer 1 has room for this rank's share from all ranks."""
    return (s.size * s.shares[s.rank].count,)


def output_buffer(s: Shape) -> tuple[int, ...]:
    """Buffer 1 is the output."""
    return (s.size * s.count,)


def commutative(make: Callable[[Shape], Iterator[Step]], cost: CostFormulas) -> Algorithm:
    """Only for commutative reductions."""
    return Algorithm(make, cost, ordered=False, left_fold=False)


def ordered(
    make: Callable[[Shape], Iterator[Step]],
    cost: CostFormulas,
    buffers: Callable[[Shape], tuple[int, ...]] = no_buffers,
) -> Algorithm:
    """Keeps rank order, but is not one left fold."""
    return Algorithm(make, cost, buffers, left_fold=False)


def single_fold(
    make: Callable[[Shape], Iterator[Step]], cost: CostFormulas, buffers: Callable[[Shape], tuple[int, ...]]
) -> Algorithm:
    """Combines by LocalFold steps only."""
    return Algorithm(make, cost, buffers, single_fold=True)
