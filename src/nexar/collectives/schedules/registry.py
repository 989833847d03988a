"""All collective algorithms by operation and name."""

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
    """The input of a schedule, equal on all ranks except `rank` and the spans of all_to_all_v."""

    rank: int
    size: int
    count: int  # type: ignore[assignment] # tuple.count() is not needed
    """Elements of the vector, or of one rank's block."""
    root: int = 0
    segment: int = 0
    """Elements of a pipeline segment; 0: none."""
    spans: tuple[Span, ...] | None = None
    """Unequal blocks; for all_to_all_v of the input, then of the output."""
    topology: str = FULL_MESH

    @property
    def blocks(self) -> tuple[Span, ...]:
        return self.spans or equal(self.count, self.size)

    @property
    def shares(self) -> tuple[Span, ...]:
        return self.spans or split(self.count, self.size)

    @property
    def inputs(self) -> tuple[Span, ...]:
        """In buffer 0."""
        return self.blocks[: self.size]

    @property
    def outputs(self) -> tuple[Span, ...]:
        """In buffer 1."""
        return self.blocks[-self.size :]


def _none(_: Shape) -> tuple[int, ...]:
    return ()


class Algorithm(NamedTuple):
    """One algorithm of one operation."""

    make: Callable[[Shape], Iterator[Step]]
    buffers: Callable[[Shape], tuple[int, ...]] = _none
    """Sizes of buffers 1 …."""
    ordered: bool = True
    """Combines in rank order: the reduction need not commute."""
    folds: bool = True
    """One left fold over all ranks: bit-identical results."""
    single_fold: bool = False
    """One rank combines all operands of an element, so it is rounded once."""


def _all_ranks(s: Shape) -> tuple[int, ...]:
    return (s.size * s.count,)


def _at_root(s: Shape) -> tuple[int, ...]:
    return _all_ranks(s) if s.rank == s.root else ()


def _my_share(s: Shape) -> tuple[int, ...]:
    return (s.size * s.shares[s.rank].count,)


def _output(s: Shape) -> tuple[int, ...]:
    return (max(span.stop for span in s.outputs),)


def _commutative(make: Callable[[Shape], Iterator[Step]]) -> Algorithm:
    """Only for commutative reductions."""
    return Algorithm(make, ordered=False, folds=False)


def _ordered(make: Callable[[Shape], Iterator[Step]], buffers: Callable[[Shape], tuple[int, ...]] = _none) -> Algorithm:
    """Not one left fold."""
    return Algorithm(make, buffers, folds=False)


def _single_fold(make: Callable[[Shape], Iterator[Step]], buffers: Callable[[Shape], tuple[int, ...]]) -> Algorithm:
    """By LocalFold steps only."""
    return Algorithm(make, buffers, single_fold=True)


ALGORITHMS: Final[Mapping[OperationCode, Mapping[str, Algorithm]]] = {
    OperationCode.BARRIER: {
        "dissemination": Algorithm(lambda s: direct.dissemination_barrier(s.rank, s.size)),
        "two_phase": Algorithm(lambda s: direct.two_phase_barrier(s.rank, s.size)),
    },
    OperationCode.ALL_REDUCE: {
        "recursive_doubling": _ordered(lambda s: recursive.doubling_all_reduce(s.rank, s.size, s.count)),
        "halving_doubling": _commutative(lambda s: recursive.halving_doubling_all_reduce(s.rank, s.size, s.count)),
        "ring": _commutative(lambda s: ring.ring_all_reduce(s.rank, s.size, s.count)),
        "pipelined_ring": _commutative(lambda s: ring.ring_all_reduce(s.rank, s.size, s.count, segment=s.segment)),
        "direct": _single_fold(
            lambda s: direct.direct_all_reduce(s.rank, s.size, s.count, segment=s.segment), _my_share
        ),
        "gather_fold": _single_fold(lambda s: direct.gather_fold(s.rank, s.size, s.count), _all_ranks),
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
        "reduce_scatter_gather": _commutative(lambda s: tree.scattered_reduce(s.rank, s.size, s.count, s.root)),
        "direct": _single_fold(
            lambda s: tree.scattered_fold(s.rank, s.size, s.count, s.root, segment=s.segment), _my_share
        ),
        "gather_fold": _single_fold(lambda s: direct.gather_fold_to(s.rank, s.size, s.count, s.root), _at_root),
    },
    OperationCode.ALL_GATHER: {
        "direct": Algorithm(lambda s: direct.direct_all_gather(s.rank, s.size, s.blocks)),
        "bruck": Algorithm(lambda s: recursive.bruck_all_gather(s.rank, s.size, s.blocks)),
        "recursive_doubling": Algorithm(lambda s: recursive.doubling_all_gather(s.rank, s.size, s.blocks)),
        "ring": Algorithm(lambda s: ring.ring_all_gather(s.rank, s.size, s.blocks)),
        "pipelined_ring": Algorithm(lambda s: ring.ring_all_gather(s.rank, s.size, s.blocks, segment=s.segment)),
    },
    OperationCode.REDUCE_SCATTER: {
        "halving": _commutative(lambda s: recursive.halving_reduce_scatter(s.rank, s.size, s.shares)),
        "ring": _commutative(lambda s: ring.ring_reduce_scatter(s.rank, s.size, s.shares)),
        "pipelined_ring": _commutative(lambda s: ring.ring_reduce_scatter(s.rank, s.size, s.shares, segment=s.segment)),
        "pairwise": _commutative(lambda s: ring.pairwise_reduce_scatter(s.rank, s.size, s.shares)),
        "direct": _single_fold(
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
"""Operations without arithmetic are trivially ordered and folding."""

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
    OperationCode.ALL_REDUCE_COMPRESSED: OperationCode.ALL_REDUCE,  # or all_gather, for pieces that are not linear
    OperationCode.CHECKPOINT: OperationCode.ALL_GATHER,
    OperationCode.GROW: OperationCode.ALL_GATHER,
}
"""Variants that use another operation's algorithms."""


def algorithms_of(operation: OperationCode) -> Mapping[str, Algorithm]:
    """Returns the algorithms by name."""
    return ALGORITHMS[SAME_AS.get(operation, operation)]


def steps(name: str, operation: OperationCode, shape: Shape) -> tuple[Step, ...]:
    """Returns this rank's steps. Empty messages are omitted, except in a barrier."""
    made = algorithms_of(operation)[name].make(shape)
    if operation is OperationCode.BARRIER:
        return tuple(step for step in made if step.sends or step.receives)
    return tuple(without_empty(made))


def buffers(name: str, operation: OperationCode, shape: Shape) -> tuple[int, ...]:
    """Returns the sizes of buffers 1 …."""
    return algorithms_of(operation)[name].buffers(shape)
