"""The table of collective operations: numbers, schedules and selection of algorithms.

`COLLECTIVES` has a row per operation. docs/howto/write-a-collective.md lists what else a new operation needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from enum import Enum, IntEnum, auto
from functools import cached_property
from typing import Final

from nexar.collectives.schedule import Step, without_empty
from nexar.collectives.schedules import direct, recursive, ring, tree
from nexar.collectives.schedules.algorithm import (
    Algorithm,
    CostFormulas,
    Shape,
    all_ranks_buffer,
    commutative,
    ordered,
    output_buffer,
    root_buffer,
    share_buffer,
    single_fold,
)
from nexar.topology import FULL_MESH, HYPERCUBE

_SMALL_BYTES: Final = 32 * 1024
"""Below, the number of rounds dominates; above, the number of bytes."""
_BLOCK_BYTES: Final = 4 * 1024
"""Blocks up to this size are forwarded on a tree to reduce the root's messages."""


class OperationCode(IntEnum):
    """Wire numbers: never reuse one."""

    BARRIER = 1
    ALL_REDUCE = 2
    BROADCAST = 3
    REDUCE = 4
    ALL_GATHER = 5
    REDUCE_SCATTER = 6
    ALL_TO_ALL = 7
    GATHER = 8
    SCATTER = 9
    SCAN = 10
    EXCLUSIVE_SCAN = 11
    ALL_GATHER_V = 12
    GATHER_V = 13
    SCATTER_V = 14
    REDUCE_SCATTER_V = 15
    ALL_TO_ALL_V = 16
    BROADCAST_OBJECT = 17
    GATHER_OBJECT = 18
    ALL_GATHER_OBJECT = 19
    SCATTER_OBJECT = 20
    SPLIT = 21
    ALL_REDUCE_COMPRESSED = 22
    CHECKPOINT = 23
    GROW = 24


class AlgorithmCode(IntEnum):
    """Wire numbers, 1 to 31: never reuse one. 0: not stated. The upper three bits are flags of a fingerprint."""

    SHARED_MEMORY = 1
    TWO_LEVEL = 2
    BRUCK = 3
    CHAIN = 4
    DIRECT = 5
    DISSEMINATION = 6
    FLAT = 7
    GATHER_FOLD = 8
    HALVING = 9
    HALVING_DOUBLING = 10
    PAIRWISE = 11
    PIPELINED_RING = 12
    RECURSIVE_DOUBLING = 13
    REDUCE_SCATTER_GATHER = 14
    RING = 15
    SCATTER_ALL_GATHER = 16
    TREE = 17
    TWO_PHASE = 18
    SPANNING_TREE = 19


@dataclass(frozen=True)
class SelectionFacts:
    """Facts that determine the algorithm, equal on all ranks."""

    operation: OperationCode
    size_bytes: int
    count: int
    """Elements of one rank's array; all blocks for all_to_all, the received block for scatter."""
    size: int
    hosts: tuple[int, ...]
    """Ranks per host."""
    shared_memory: bool
    """Ranks of a host share usable memory."""
    deterministic: bool = False
    commutative: bool = True
    rounds: bool = False
    """Partial results lose digits (narrow floats)."""
    large_msg_bytes: int = 8 * 1024 * 1024
    pipeline_segment_bytes: int = 2 * 1024 * 1024
    ring_max_world: int = 8
    topology: str = FULL_MESH
    """Ranks that are not neighbours communicate through relays."""

    @property
    def collective(self) -> Collective:
        return COLLECTIVES[self.operation]

    @property
    def whole_bytes(self) -> int:
        return self.size_bytes * (self.size if self.collective.layout in _BLOCK_PER_RANK else 1)

    @property
    def is_small(self) -> bool:
        return self.whole_bytes < _SMALL_BYTES

    @property
    def is_large(self) -> bool:
        return self.whole_bytes >= self.large_msg_bytes

    @property
    def suits_a_ring(self) -> bool:
        """A ring's rounds grow with the world. But in a sparse topology, except a hypercube, no other algorithm moves
        as few bytes.
        """
        return not self.is_cube and (self.is_sparse or self.size <= self.ring_max_world)

    @property
    def is_sparse(self) -> bool:
        return self.topology != FULL_MESH

    @property
    def is_cube(self) -> bool:
        """Consecutive ranks need not be neighbours."""
        return self.topology == HYPERCUBE

    @property
    def suits_direct(self) -> bool:
        """n - 1 concurrent messages must be few or long, and not relayed."""
        if self.is_small or self.is_sparse:
            return False
        return self.size <= self.ring_max_world or self.is_large or self.size_bytes >= self.size * _SMALL_BYTES

    @property
    def suits_a_pipeline(self) -> bool:
        return self.is_large and not self.is_cube


def _barrier(facts: SelectionFacts) -> str:
    return "two_phase" if facts.size < 5 else "dissemination"


def _all_reduce(facts: SelectionFacts) -> str:
    """For two ranks, one exchange has half a ring's latency; beyond the cache a ring computes less."""
    if facts.is_small or (facts.size == 2 and facts.size_bytes <= 4 * facts.large_msg_bytes):
        return "recursive_doubling"
    if facts.suits_a_pipeline:
        return "pipelined_ring"
    return "ring" if facts.suits_a_ring else "halving_doubling"


def _choose_ordered(facts: SelectionFacts) -> str:
    if facts.deterministic:
        return "gather_fold" if facts.size_bytes * facts.size < _SMALL_BYTES else "direct"
    return facts.collective.choose(facts) if facts.is_small else "direct"


def _choose_single_rounding(facts: SelectionFacts) -> str:
    """Small arrays are sent as float32. Otherwise one rank receives all contributions to a share, with no more bytes
    than a ring.
    """
    return "direct" if facts.suits_direct else facts.collective.choose(facts)


def _broadcast(facts: SelectionFacts) -> str:
    if facts.is_sparse:
        return "spanning_tree"
    if facts.size < 4 and not facts.is_large:
        return "flat"
    if facts.is_small:
        return "tree"
    return "chain" if facts.is_large else "scatter_all_gather"


def _reduce(facts: SelectionFacts) -> str:
    if not facts.is_small:
        return "reduce_scatter_gather"
    return "flat" if facts.size < 4 else "tree"


def _reduce_single_rounding(facts: SelectionFacts) -> str:
    if facts.is_small and facts.size < 4:
        return "gather_fold"
    return "direct" if not facts.is_small and not facts.is_sparse else _reduce(facts)


def _all_gather(facts: SelectionFacts) -> str:
    if facts.size < 4:
        return "direct"
    if facts.suits_a_pipeline:
        return "pipelined_ring"
    if facts.is_cube and not facts.is_small:
        return "recursive_doubling"
    return "ring" if facts.suits_a_ring and not facts.is_small else "bruck"


def _reduce_scatter(facts: SelectionFacts) -> str:
    if facts.is_small:
        return "halving"
    if facts.suits_a_pipeline:
        return "pipelined_ring"
    return "ring" if facts.suits_a_ring else "halving"


def _all_to_all(facts: SelectionFacts) -> str:
    return "direct" if facts.size < 4 or facts.is_small else "pairwise"


def _to_or_from_root(facts: SelectionFacts) -> str:
    """A tree requires that ranks know the others' block sizes."""
    if facts.collective.counts_at_root or facts.size < 8 or facts.size_bytes > _BLOCK_BYTES:
        return "flat"
    return "tree"


def _scan(facts: SelectionFacts) -> str:
    return "chain" if facts.is_large else "recursive_doubling"


def _scan_ordered(facts: SelectionFacts) -> str:
    return "chain" if facts.deterministic else _scan(facts)


class Layout(Enum):
    """Content of a schedule's first buffers before and after it."""

    NONE = auto()
    """No data."""
    IN_PLACE = auto()
    """Buffer 0 is the array of the call and becomes the result."""
    COPY = auto()
    """Buffer 0 is a copy of the array and becomes the result."""
    GATHERED = auto()
    """Buffer 0 is the result, one block per rank. Before, it holds this rank's array as its block."""
    SHARE = auto()
    """Buffer 0 is a copy of the array. This rank's share of it becomes the result."""
    SCATTERED = auto()
    """Buffer 0 has a block per rank and is filled at the root. This rank's block is the result."""
    EXCHANGED = auto()
    """Buffer 0 is the array, buffer 1 the result. Both have one block per rank."""


_BLOCK_PER_RANK: Final = (Layout.GATHERED, Layout.SCATTERED)


class RootRole(Enum):
    """The role of the root."""

    NONE = auto()
    """There is no root."""
    SOURCE = auto()
    """It has the input."""
    TARGET = auto()
    """It gets the result."""


def _all_ranks_operands(_: int, size: int) -> int:
    return size


@dataclass(frozen=True)
class Collective:
    """One row of the table."""

    code: OperationCode
    layout: Layout
    algorithms: Mapping[str, Algorithm]
    """By name. `ordered` and `left_fold` are true for those of operations without arithmetic."""
    choose: Callable[[SelectionFacts], str]
    """Returns the default algorithm."""
    _: KW_ONLY
    choose_ordered: Callable[[SelectionFacts], str] | None = None
    """Like `choose`, if operands must be combined in rank order; None: `choose`."""
    choose_single_rounding: Callable[[SelectionFacts], str] | None = None
    """The same for narrow floats on three ranks or more, to round an element once; None: as `choose`."""
    root: RootRole = RootRole.NONE
    operands: Callable[[int, int], int] | None = None
    """A reduction: returns how many operands are in the result of a rank, given rank and size. A rank without any gets
    the identity.
    """
    shared_memory: bool = False
    """Ranks of one host can do it in the shared region: a method of SharedRegion, in `prepared_call._IN_REGION`."""
    two_level: bool = False
    """It can be done in each host first, and then between hosts."""
    synchronous: bool = False
    """No rank ends before all have begun."""
    counts_at_root: bool = False
    """Only the root knows the sizes of all blocks."""
    same_as: OperationCode | None = None
    """A variant: if it runs a schedule, then one of that operation. Variants with arrays of any shape run none."""

    @cached_property
    def name(self) -> str:
        return self.code.name.lower()

    @cached_property
    def has_identity(self) -> bool:
        """Whether the result of some rank has no operands and is the identity of the reduction."""
        return self.operands is not None and self.operands(0, 1) == 0

    @cached_property
    def is_scan(self) -> bool:
        """Whether a rank's result combines only the operands up to that rank."""
        return self.operands is not None and self.operands(0, 2) != self.operands(1, 2)

    @cached_property
    def base_operation(self) -> OperationCode:
        """The operation whose schedules it runs: itself, or that of which it is a variant."""
        return self.same_as or self.code


_OWN_ALGORITHMS: Final = (
    Collective(
        OperationCode.BARRIER,
        Layout.NONE,
        {
            "dissemination": Algorithm(
                lambda s: direct.dissemination_barrier(s.rank, s.size), CostFormulas("rounds", "0")
            ),
            "two_phase": Algorithm(lambda s: direct.two_phase_barrier(s.rank, s.size), CostFormulas("2", "0")),
        },
        _barrier,
        shared_memory=True,
        synchronous=True,
    ),
    Collective(
        OperationCode.ALL_REDUCE,
        Layout.IN_PLACE,
        {
            "recursive_doubling": ordered(
                lambda s: recursive.doubling_all_reduce(s.rank, s.size, s.count),
                CostFormulas("log2(p) + 2 * (n > p)", "c * (log2(p) + (n > p))"),
            ),
            "halving_doubling": commutative(
                lambda s: recursive.halving_doubling_all_reduce(s.rank, s.size, s.count),
                CostFormulas("2 * rounds", "2 * c * (n - 1) / n"),
            ),
            "ring": commutative(
                lambda s: ring.ring_all_reduce(s.rank, s.size, s.count),
                CostFormulas("2 * (n - 1)", "2 * c * (n - 1) / n"),
            ),
            "pipelined_ring": commutative(
                lambda s: ring.ring_all_reduce(s.rank, s.size, s.count, segment=s.segment),
                CostFormulas("2 * (n - 1) * s", "2 * c * (n - 1) / n"),
            ),
            "direct": single_fold(
                lambda s: direct.direct_all_reduce(s.rank, s.size, s.count, segment=s.segment),
                CostFormulas("s + 1", "2 * c * (n - 1) / n", "c"),
                share_buffer,
            ),
            "gather_fold": single_fold(
                lambda s: direct.gather_fold(s.rank, s.size, s.count),
                CostFormulas("1", "c * (n - 1)", "c * n"),
                all_ranks_buffer,
            ),
        },
        _all_reduce,
        choose_ordered=_choose_ordered,
        choose_single_rounding=_choose_single_rounding,
        operands=_all_ranks_operands,
        shared_memory=True,
        two_level=True,
        synchronous=True,
    ),
    Collective(
        OperationCode.BROADCAST,
        Layout.IN_PLACE,
        {
            "flat": Algorithm(
                lambda s: tree.flat_broadcast(s.rank, s.size, s.count, s.root), CostFormulas("1", "c * (n - 1)")
            ),
            "tree": Algorithm(
                lambda s: tree.tree_broadcast(s.rank, s.size, s.count, s.root), CostFormulas("rounds", "c * rounds")
            ),
            "chain": Algorithm(
                lambda s: ring.chain_broadcast(s.rank, s.size, s.count, s.root, segment=s.segment),
                CostFormulas("s + (n > 2)", "c"),
            ),
            "scatter_all_gather": Algorithm(
                lambda s: tree.scattered_broadcast(s.rank, s.size, s.count, s.root),
                CostFormulas("n - 1 + rounds", "2 * c * (n - 1) / n"),
            ),
            "spanning_tree": Algorithm(
                lambda s: tree.spanning_tree_broadcast(s.rank, s.size, s.count, s.root, s.topology, segment=s.segment),
                CostFormulas("s", "c * (n - 1)"),
            ),
        },
        _broadcast,
        root=RootRole.SOURCE,
        shared_memory=True,
    ),
    Collective(
        OperationCode.REDUCE,
        Layout.IN_PLACE,
        {
            "flat": ordered(lambda s: tree.flat_reduce(s.rank, s.size, s.count, s.root), CostFormulas("1", "c")),
            "tree": ordered(lambda s: tree.tree_reduce(s.rank, s.size, s.count, s.root), CostFormulas("rounds", "c")),
            "reduce_scatter_gather": commutative(
                lambda s: tree.scattered_reduce(s.rank, s.size, s.count, s.root), CostFormulas("n", "c")
            ),
            "direct": single_fold(
                lambda s: tree.scattered_fold(s.rank, s.size, s.count, s.root, segment=s.segment),
                CostFormulas("s + 1", "c", "c"),
                share_buffer,
            ),
            "gather_fold": single_fold(
                lambda s: direct.gather_fold_to(s.rank, s.size, s.count, s.root),
                CostFormulas("1", "c", "c * n"),
                root_buffer,
            ),
        },
        _reduce,
        choose_ordered=_choose_ordered,
        choose_single_rounding=_reduce_single_rounding,
        root=RootRole.TARGET,
        operands=_all_ranks_operands,
        shared_memory=True,
    ),
    Collective(
        OperationCode.ALL_GATHER,
        Layout.GATHERED,
        {
            "direct": Algorithm(
                lambda s: direct.direct_all_gather(s.rank, s.size, s.blocks), CostFormulas("1", "c * (n - 1)")
            ),
            "bruck": Algorithm(
                lambda s: recursive.bruck_all_gather(s.rank, s.size, s.blocks), CostFormulas("rounds", "c * (n - 1)")
            ),
            "recursive_doubling": Algorithm(
                lambda s: recursive.doubling_all_gather(s.rank, s.size, s.blocks),
                CostFormulas("rounds", "c * (n - 1)", powers_of_two=True),
            ),
            "ring": Algorithm(
                lambda s: ring.ring_all_gather(s.rank, s.size, s.blocks), CostFormulas("n - 1", "c * (n - 1)")
            ),
            "pipelined_ring": Algorithm(
                lambda s: ring.ring_all_gather(s.rank, s.size, s.blocks, segment=s.segment),
                CostFormulas("(n - 1) * s", "c * (n - 1)"),
            ),
        },
        _all_gather,
        shared_memory=True,
        synchronous=True,
    ),
    Collective(
        OperationCode.REDUCE_SCATTER,
        Layout.SHARE,
        {
            "halving": commutative(
                lambda s: recursive.halving_reduce_scatter(s.rank, s.size, s.shares),
                CostFormulas("rounds", "c * (n - 1) / n"),
            ),
            "ring": commutative(
                lambda s: ring.ring_reduce_scatter(s.rank, s.size, s.shares), CostFormulas("n - 1", "c * (n - 1) / n")
            ),
            "pipelined_ring": commutative(
                lambda s: ring.ring_reduce_scatter(s.rank, s.size, s.shares, segment=s.segment),
                CostFormulas("(n - 1) * s", "c * (n - 1) / n"),
            ),
            "pairwise": commutative(
                lambda s: ring.pairwise_reduce_scatter(s.rank, s.size, s.shares),
                CostFormulas("n - 1", "c * (n - 1) / n"),
            ),
            "direct": single_fold(
                lambda s: direct.direct_reduce_scatter(s.rank, s.size, s.shares, segment=s.segment),
                CostFormulas("s", "c * (n - 1) / n", "c"),
                share_buffer,
            ),
        },
        _reduce_scatter,
        choose_ordered=lambda _: "direct",
        choose_single_rounding=_choose_single_rounding,
        operands=_all_ranks_operands,
        shared_memory=True,
    ),
    Collective(
        OperationCode.ALL_TO_ALL,
        Layout.EXCHANGED,
        {
            "direct": Algorithm(
                lambda s: direct.direct_all_to_all(s.rank, s.size, s.blocks),
                CostFormulas("1", "c * (n - 1)", "c * n"),
                output_buffer,
            ),
            "pairwise": Algorithm(
                lambda s: ring.pairwise_all_to_all(s.rank, s.size, s.blocks),
                CostFormulas("n - 1", "c * (n - 1)", "c * n"),
                output_buffer,
            ),
        },
        _all_to_all,
        synchronous=True,
    ),
    Collective(
        OperationCode.GATHER,
        Layout.GATHERED,
        {
            "flat": Algorithm(lambda s: tree.flat_gather(s.rank, s.size, s.blocks, s.root), CostFormulas("1", "c")),
            "tree": Algorithm(
                lambda s: tree.tree_gather(s.rank, s.size, s.blocks, s.root),
                CostFormulas("rounds", "c * ((n + 1) // 2)"),
            ),
        },
        _to_or_from_root,
        root=RootRole.TARGET,
    ),
    Collective(
        OperationCode.SCATTER,
        Layout.SCATTERED,
        {
            "flat": Algorithm(
                lambda s: tree.flat_scatter(s.rank, s.size, s.blocks, s.root), CostFormulas("1", "c * (n - 1)")
            ),
            "tree": Algorithm(
                lambda s: tree.tree_scatter(s.rank, s.size, s.blocks, s.root), CostFormulas("rounds", "c * (n - 1)")
            ),
        },
        _to_or_from_root,
        root=RootRole.SOURCE,
    ),
    Collective(
        OperationCode.SCAN,
        Layout.COPY,
        {
            "recursive_doubling": ordered(
                lambda s: recursive.doubling_scan(s.rank, s.size, s.count), CostFormulas("rounds", "c * rounds")
            ),
            "chain": Algorithm(
                lambda s: ring.chain_scan(s.rank, s.size, s.count, segment=s.segment), CostFormulas("s + (n > 2)", "c")
            ),
        },
        _scan,
        choose_ordered=_scan_ordered,
        operands=lambda rank, _: rank + 1,
    ),
    Collective(
        OperationCode.EXCLUSIVE_SCAN,
        Layout.COPY,
        {
            "recursive_doubling": ordered(
                lambda s: recursive.doubling_exclusive_scan(s.rank, s.size, s.count),
                CostFormulas("rounds", "c * rounds", "2 * c"),
                lambda s: (s.count, s.count),
            ),
            "chain": Algorithm(
                lambda s: ring.chain_exclusive_scan(s.rank, s.size, s.count, segment=s.segment),
                CostFormulas("s + (n > 2)", "c", "c"),
                lambda s: (s.count,),
            ),
        },
        _scan,
        choose_ordered=_scan_ordered,
        operands=lambda rank, _: rank,
    ),
)

_ROWS: Final = {row.code: row for row in _OWN_ALGORITHMS}


def _variant(
    code: OperationCode, base: OperationCode, *, synchronous: bool = False, counts_at_root: bool = False
) -> Collective:
    return replace(_ROWS[base], code=code, same_as=base, synchronous=synchronous, counts_at_root=counts_at_root)


_VARIANTS: Final = (
    _variant(OperationCode.ALL_GATHER_V, OperationCode.ALL_GATHER, synchronous=True),
    _variant(OperationCode.GATHER_V, OperationCode.GATHER, counts_at_root=True),
    _variant(OperationCode.SCATTER_V, OperationCode.SCATTER, counts_at_root=True),
    _variant(OperationCode.REDUCE_SCATTER_V, OperationCode.REDUCE_SCATTER),
    _variant(OperationCode.ALL_TO_ALL_V, OperationCode.ALL_TO_ALL),
    _variant(OperationCode.BROADCAST_OBJECT, OperationCode.BROADCAST),
    _variant(OperationCode.GATHER_OBJECT, OperationCode.GATHER, counts_at_root=True),
    _variant(OperationCode.ALL_GATHER_OBJECT, OperationCode.ALL_GATHER, synchronous=True),
    _variant(OperationCode.SCATTER_OBJECT, OperationCode.SCATTER, counts_at_root=True),
    _variant(OperationCode.SPLIT, OperationCode.ALL_GATHER),
    # or as all_gather, for pieces that are not linear
    _variant(OperationCode.ALL_REDUCE_COMPRESSED, OperationCode.ALL_REDUCE),
    _variant(OperationCode.CHECKPOINT, OperationCode.ALL_GATHER),
    _variant(OperationCode.GROW, OperationCode.ALL_GATHER),
)

COLLECTIVES: Final[Mapping[OperationCode, Collective]] = _ROWS | {row.code: row for row in _VARIANTS}
"""All operations."""


def algorithms_of(operation: OperationCode) -> Mapping[str, Algorithm]:
    """Algorithms by name."""
    return COLLECTIVES[operation].algorithms


def steps(name: str, operation: OperationCode, shape: Shape) -> tuple[Step, ...]:
    """This rank's steps. Empty messages are omitted, except in a barrier."""
    made = algorithms_of(operation)[name].make(shape)
    if COLLECTIVES[operation].layout is Layout.NONE:
        return tuple(step for step in made if step.sends or step.receives)
    return tuple(without_empty(made))


def buffers(name: str, operation: OperationCode, shape: Shape) -> tuple[int, ...]:
    """Sizes of buffers 1 …."""
    return algorithms_of(operation)[name].buffers(shape)
