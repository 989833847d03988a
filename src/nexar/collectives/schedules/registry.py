"""Every algorithm there is, by operation and name: how its steps are made, and what it is good for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from nexar.arrays.views import Span, split
from nexar.collectives.fingerprint import OperationCode
from nexar.collectives.schedule import Step, without_empty
from nexar.collectives.schedules import direct, recursive, ring, tree
from nexar.collectives.schedules.blocks import equal
from nexar.topology import FULL_MESH


class Shape(NamedTuple):
    """What a schedule is made from: all ranks have the same, but for `rank` (and the spans of all_to_all_v)."""

    rank: int
    size: int
    count: int  # type: ignore[assignment]  # a shape has no use for a tuple's count()
    """Elements of the vector; of one rank's block where each has one (all_gather, gather, scatter, all_to_all)."""
    root: int = 0
    segment: int = 0
    """Elements of a pipeline segment; 0: a vector is not cut."""
    spans: tuple[Span, ...] | None = None
    """Unequal blocks, one per rank; of all_to_all_v those of the input, then those of the output."""
    topology: str = FULL_MESH
    """Of which ranks have a connection of their own."""

    @property
    def blocks(self) -> tuple[Span, ...]:
        """One of `count` elements per rank."""
        return self.spans or equal(self.count, self.size)

    @property
    def shares(self) -> tuple[Span, ...]:
        """Of a vector of `count` elements, one per rank."""
        return self.spans or split(self.count, self.size)

    @property
    def inputs(self) -> tuple[Span, ...]:
        """What is for each rank, in buffer 0."""
        return self.blocks[: self.size]

    @property
    def outputs(self) -> tuple[Span, ...]:
        """What is from each rank, in buffer 1."""
        return self.blocks[-self.size :]


def _none(_: Shape) -> tuple[int, ...]:
    return ()


class Algorithm(NamedTuple):
    """One way to do one operation."""

    make: Callable[[Shape], Iterator[Step]]
    buffers: Callable[[Shape], tuple[int, ...]] = _none
    """Elements of the buffers 1 and above."""
    ordered: bool = True
    """Operands are combined in rank order: the reduction need not commute."""
    folds: bool = True
    """Each element is one left fold over all ranks: the same bits as on every other way that folds."""
    in_one_go: bool = False
    """One rank combines all operands of an element, by one Fold, so it is rounded once. Otherwise partial results
    travel between ranks, and each combination rounds them, unless they travel as float32.
    """


def _all_ranks(s: Shape) -> tuple[int, ...]:
    return (s.size * s.count,)


def _at_root(s: Shape) -> tuple[int, ...]:
    return _all_ranks(s) if s.rank == s.root else ()


def _my_share(s: Shape) -> tuple[int, ...]:
    return (s.size * s.shares[s.rank].count,)


def _output(s: Shape) -> tuple[int, ...]:
    return (max(span.stop for span in s.outputs),)


def _turning(make: Callable[[Shape], Iterator[Step]]) -> Algorithm:
    """Only for reductions that commute."""
    return Algorithm(make, ordered=False, folds=False)


def _ordered(make: Callable[[Shape], Iterator[Step]], buffers: Callable[[Shape], tuple[int, ...]] = _none) -> Algorithm:
    """In rank order, but not as one left fold."""
    return Algorithm(make, buffers, folds=False)


def _folding(make: Callable[[Shape], Iterator[Step]], buffers: Callable[[Shape], tuple[int, ...]]) -> Algorithm:
    """By Fold steps alone."""
    return Algorithm(make, buffers, in_one_go=True)


ALGORITHMS: Final[Mapping[OperationCode, Mapping[str, Algorithm]]] = {
    OperationCode.BARRIER: {
        "dissemination": Algorithm(lambda s: direct.dissemination_barrier(s.rank, s.size)),
        "two_phase": Algorithm(lambda s: direct.two_phase_barrier(s.rank, s.size)),
    },
    OperationCode.ALL_REDUCE: {
        "recursive_doubling": _ordered(lambda s: recursive.doubling_all_reduce(s.rank, s.size, s.count)),
        "halving_doubling": _turning(lambda s: recursive.halving_doubling_all_reduce(s.rank, s.size, s.count)),
        "ring": _turning(lambda s: ring.ring_all_reduce(s.rank, s.size, s.count)),
        "pipelined_ring": _turning(lambda s: ring.ring_all_reduce(s.rank, s.size, s.count, segment=s.segment)),
        "direct": _folding(lambda s: direct.direct_all_reduce(s.rank, s.size, s.count, segment=s.segment), _my_share),
        "gather_fold": _folding(lambda s: direct.gather_fold(s.rank, s.size, s.count), _all_ranks),
    },
    OperationCode.BROADCAST: {
        "flat": Algorithm(lambda s: tree.flat_broadcast(s.rank, s.size, s.count, s.root)),
        "tree": Algorithm(lambda s: tree.tree_broadcast(s.rank, s.size, s.count, s.root)),
        "chain": Algorithm(lambda s: ring.chain_broadcast(s.rank, s.size, s.count, s.root, segment=s.segment)),
        "scatter_all_gather": Algorithm(lambda s: tree.scattered_broadcast(s.rank, s.size, s.count, s.root)),
        "spanning_tree": Algorithm(
            lambda s: tree.spanning_tree_broadcast(s.rank, s.size, s.count, s.root, s.topology, segment=s.segment)
        ),
    },
    OperationCode.REDUCE: {
        "flat": _ordered(lambda s: tree.flat_reduce(s.rank, s.size, s.count, s.root)),
        "tree": _ordered(lambda s: tree.tree_reduce(s.rank, s.size, s.count, s.root)),
        "reduce_scatter_gather": _turning(lambda s: tree.scattered_reduce(s.rank, s.size, s.count, s.root)),
        "direct": _folding(
            lambda s: tree.scattered_fold(s.rank, s.size, s.count, s.root, segment=s.segment), _my_share
        ),
        "gather_fold": _folding(lambda s: direct.gather_fold_to(s.rank, s.size, s.count, s.root), _at_root),
    },
    OperationCode.ALL_GATHER: {
        "direct": Algorithm(lambda s: direct.direct_all_gather(s.rank, s.size, s.blocks)),
        "bruck": Algorithm(lambda s: recursive.bruck_all_gather(s.rank, s.size, s.blocks)),
        "recursive_doubling": Algorithm(lambda s: recursive.doubling_all_gather(s.rank, s.size, s.blocks)),
        "ring": Algorithm(lambda s: ring.ring_all_gather(s.rank, s.size, s.blocks)),
        "pipelined_ring": Algorithm(lambda s: ring.ring_all_gather(s.rank, s.size, s.blocks, segment=s.segment)),
    },
    OperationCode.REDUCE_SCATTER: {
        "halving": _turning(lambda s: recursive.halving_reduce_scatter(s.rank, s.size, s.shares)),
        "ring": _turning(lambda s: ring.ring_reduce_scatter(s.rank, s.size, s.shares)),
        "pipelined_ring": _turning(lambda s: ring.ring_reduce_scatter(s.rank, s.size, s.shares, segment=s.segment)),
        "pairwise": _turning(lambda s: ring.pairwise_reduce_scatter(s.rank, s.size, s.shares)),
        "direct": _folding(
            lambda s: direct.direct_reduce_scatter(s.rank, s.size, s.shares, segment=s.segment), _my_share
        ),
    },
    OperationCode.ALL_TO_ALL: {
        "direct": Algorithm(lambda s: direct.direct_all_to_all(s.rank, s.size, s.inputs, s.outputs), _output),
        "pairwise": Algorithm(lambda s: ring.pairwise_all_to_all(s.rank, s.size, s.inputs, s.outputs), _output),
    },
    OperationCode.GATHER: {
        "flat": Algorithm(lambda s: tree.flat_gather(s.rank, s.size, s.blocks, s.root)),
        "tree": Algorithm(lambda s: tree.tree_gather(s.rank, s.size, s.blocks, s.root)),
    },
    OperationCode.SCATTER: {
        "flat": Algorithm(lambda s: tree.flat_scatter(s.rank, s.size, s.blocks, s.root)),
        "tree": Algorithm(lambda s: tree.tree_scatter(s.rank, s.size, s.blocks, s.root)),
    },
    OperationCode.SCAN: {
        "recursive_doubling": _ordered(lambda s: recursive.doubling_scan(s.rank, s.size, s.count)),
        "chain": Algorithm(lambda s: ring.chain_scan(s.rank, s.size, s.count, segment=s.segment)),
    },
    OperationCode.EXCLUSIVE_SCAN: {
        "recursive_doubling": _ordered(
            lambda s: recursive.doubling_exclusive_scan(s.rank, s.size, s.count), lambda s: (s.count, s.count)
        ),
        "chain": Algorithm(
            lambda s: ring.chain_exclusive_scan(s.rank, s.size, s.count, segment=s.segment), lambda s: (s.count,)
        ),
    },
}
"""What carries no arithmetic is in order and a fold, trivially."""

SAME_AS: Final[Mapping[OperationCode, OperationCode]] = {
    OperationCode.ALL_GATHER_V: OperationCode.ALL_GATHER,
    OperationCode.GATHER_V: OperationCode.GATHER,
    OperationCode.SCATTER_V: OperationCode.SCATTER,
    OperationCode.REDUCE_SCATTER_V: OperationCode.REDUCE_SCATTER,
    OperationCode.ALL_TO_ALL_V: OperationCode.ALL_TO_ALL,
    OperationCode.BROADCAST_OBJECT: OperationCode.BROADCAST,
    OperationCode.GATHER_OBJECT: OperationCode.GATHER,
    OperationCode.ALL_GATHER_OBJECT: OperationCode.ALL_GATHER,
    OperationCode.SCATTER_OBJECT: OperationCode.SCATTER,
    OperationCode.SPLIT: OperationCode.ALL_GATHER,
    OperationCode.ALL_REDUCE_COMPRESSED: OperationCode.ALL_REDUCE,  # or all_gather's, for pieces that do not add up
    OperationCode.CHECKPOINT: OperationCode.ALL_GATHER,
    OperationCode.GROW: OperationCode.ALL_GATHER,
}
"""Forms of another operation, which move in the same ways."""


def algorithms_of(operation: OperationCode) -> Mapping[str, Algorithm]:
    """By name."""
    return ALGORITHMS[SAME_AS.get(operation, operation)]


def steps(name: str, operation: OperationCode, shape: Shape) -> tuple[Step, ...]:
    """What this rank does. Messages of no elements are left out, at both ends; but for a barrier's, which has no
    others.
    """
    made = algorithms_of(operation)[name].make(shape)
    if operation is OperationCode.BARRIER:
        return tuple(step for step in made if step.sends or step.receives)
    return tuple(without_empty(made))


def buffers(name: str, operation: OperationCode, shape: Shape) -> tuple[int, ...]:
    """How many elements the buffers 1 and above need on this rank. Buffer 1 of all_to_all is its output."""
    return algorithms_of(operation)[name].buffers(shape)
