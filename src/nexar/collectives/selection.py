"""Which way a collective takes: one pure table. The same facts give the same answer, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from nexar.collectives.fingerprint import OperationCode
from nexar.collectives.schedules.registry import SAME_AS, algorithms_of
from nexar.errors import UsageError
from nexar.topology import FULL_MESH, HYPERCUBE

SHARED_MEMORY: Final = "shared_memory"
TWO_LEVEL: Final = "two_level"

_SMALL_BYTES: Final = 32 * 1024
"""Below, the number of rounds decides; above, the number of bytes."""
_TWO_LEVEL_BYTES: Final = 64 * 1024
_BLOCK_BYTES: Final = 4 * 1024
"""A block up to this is worth sending several times on a tree, to spare the root its messages."""

_IN_SHARED_MEMORY: Final = frozenset(
    {
        OperationCode.BARRIER,
        OperationCode.ALL_REDUCE,
        OperationCode.BROADCAST,
        OperationCode.REDUCE,
        OperationCode.ALL_GATHER,
        OperationCode.REDUCE_SCATTER,
    }
)
_ON_TWO_LEVELS: Final = frozenset({OperationCode.ALL_REDUCE})
_A_BLOCK_EACH: Final = frozenset({OperationCode.ALL_GATHER, OperationCode.GATHER, OperationCode.SCATTER})
_COUNTS_KNOWN_TO_THE_ROOT: Final = frozenset(
    {OperationCode.GATHER_V, OperationCode.SCATTER_V, OperationCode.GATHER_OBJECT, OperationCode.SCATTER_OBJECT}
)


@dataclass(frozen=True)
class Facts:
    """All that a choice depends on; the same on all ranks of one call."""

    operation: OperationCode
    size_bytes: int
    """Of `count` elements."""
    count: int
    """Of the array that a rank brings: all its blocks for all_to_all. For scatter, of the block that it gets."""
    size: int
    hosts: tuple[int, ...]
    """How many ranks each host has."""
    shared_memory: bool
    """The ranks of every host share memory that collectives may use."""
    deterministic: bool = False
    commutative: bool = True
    rounds: bool = False
    """Partial results lose digits: a sum, product or average of floats narrower than float32."""
    large_msg_bytes: int = 8 * 1024 * 1024
    pipeline_segment_bytes: int = 2 * 1024 * 1024
    ring_max_world: int = 8
    topology: str = FULL_MESH
    """Of which ranks have a connection of their own; what others say to one another is relayed."""

    @property
    def kind(self) -> OperationCode:
        """The operation of which this one is a form."""
        return SAME_AS.get(self.operation, self.operation)

    @property
    def whole_bytes(self) -> int:
        """Of the vector, or of all blocks."""
        return self.size_bytes * (self.size if self.kind in _A_BLOCK_EACH else 1)

    @property
    def is_small(self) -> bool:
        """Rounds cost more than bytes."""
        return self.whole_bytes < _SMALL_BYTES

    @property
    def is_large(self) -> bool:
        """Worth a pipeline."""
        return self.whole_bytes >= self.large_msg_bytes

    @property
    def suits_a_ring(self) -> bool:
        """The rounds of a ring grow with the world. But where all that is not said to a neighbour is relayed, nothing
        else moves as few bytes; unless the topology is a cube, whose edges are what halving and doubling go along.
        """
        return not self.is_cube and (self.is_sparse or self.size <= self.ring_max_world)

    @property
    def is_sparse(self) -> bool:
        """Not all ranks are neighbours."""
        return self.topology != FULL_MESH

    @property
    def is_cube(self) -> bool:
        """Ranks whose numbers differ in one bit are neighbours, not those that follow one another."""
        return self.topology == HYPERCUBE

    @property
    def suits_direct(self) -> bool:
        """Each rank may get everybody's contribution to its share: n - 1 messages at a time, which are few, or long
        enough to be worth it; and none is relayed.
        """
        if self.is_small or self.is_sparse:
            return False
        return self.size <= self.ring_max_world or self.is_large or self.size_bytes >= self.size * _SMALL_BYTES

    @property
    def suits_a_pipeline(self) -> bool:
        """Large, and round a ring of neighbours."""
        return self.is_large and not self.is_cube


def choose_algorithm(facts: Facts, algorithm: str | None) -> str:
    """The name of the way to take. `algorithm` forces one: UsageError if there is none, or it cannot serve here."""
    if algorithm is not None:
        return _forced(facts, algorithm)
    if facts.size > 1 and _why_not_shared_memory(facts) is None:
        return SHARED_MEMORY
    if facts.size_bytes >= _TWO_LEVEL_BYTES and _why_not_two_level(facts) is None:
        return TWO_LEVEL
    if facts.deterministic or not facts.commutative:
        return _keeping_order(facts)
    if facts.rounds and facts.size > 2:
        return _rounding_once(facts)
    return _DEFAULTS[facts.kind](facts)


def allowed_algorithms(facts: Facts) -> list[str]:
    """The names that `choose` takes for this call, sorted."""
    names = [SHARED_MEMORY, TWO_LEVEL, *algorithms_of(facts.operation)]
    return sorted(name for name in names if _why_not(facts, name) is None)


def _forced(facts: Facts, algorithm: str) -> str:
    reason = _why_not(facts, algorithm)
    if reason is None:
        return algorithm
    names = ", ".join(allowed_algorithms(facts)) or "none"
    raise UsageError(f"algorithm={algorithm!r} {reason}; for this {facts.operation.name.lower()} there are: {names}")


def _why_not(facts: Facts, name: str) -> str | None:
    """Why this name cannot serve, as the end of a sentence."""
    if name == SHARED_MEMORY:
        return _why_not_shared_memory(facts)
    if name == TWO_LEVEL:
        return _why_not_two_level(facts)
    found = algorithms_of(facts.operation).get(name)
    if found is None:
        return "does not exist here"
    if not found.ordered and not facts.commutative:
        return "does not keep rank order, which a reduction that does not commute needs"
    if not found.folds and facts.deterministic:
        return "does not fold in rank order, which deterministic=True means"
    return None


def _why_not_shared_memory(facts: Facts) -> str | None:
    if facts.kind not in _IN_SHARED_MEMORY:
        return "does not exist here"
    if len(facts.hosts) > 1:
        return f"needs all ranks on one host, and they are on {len(facts.hosts)}"
    return None if facts.shared_memory else "needs memory that the ranks share, and they share none"


def _why_not_two_level(facts: Facts) -> str | None:
    if facts.kind not in _ON_TWO_LEVELS:
        return "does not exist here"
    if len(facts.hosts) < 2 or max(facts.hosts) < 2:
        return "needs several hosts, one of them with several ranks"
    if not facts.shared_memory:
        return "needs memory that the ranks of a host share, and they share none"
    if facts.deterministic or not facts.commutative:
        return "combines host by host, not in one order over all ranks"
    return None


def _keeping_order(facts: Facts) -> str:
    """The default where order matters; deterministic also means one left fold."""
    match facts.kind:
        case OperationCode.ALL_REDUCE | OperationCode.REDUCE:
            if facts.deterministic:
                return "gather_fold" if facts.size_bytes * facts.size < _SMALL_BYTES else "direct"
            if not facts.is_small:
                return "direct"
            return "recursive_doubling" if facts.kind is OperationCode.ALL_REDUCE else _reduce(facts)
        case OperationCode.REDUCE_SCATTER:
            return "direct"
        case OperationCode.SCAN | OperationCode.EXCLUSIVE_SCAN if facts.deterministic:
            return "chain"
        case kind:
            return _DEFAULTS[kind](facts)


def _rounding_once(facts: Facts) -> str:
    """The default where partial results would be rounded: while they are few they travel as float32, at twice or four
    times the bytes; otherwise a rank gets all contributions to its share, which costs no more bytes than a ring does.
    Of two ranks any algorithm combines an element once.
    """
    match facts.kind:
        case OperationCode.REDUCE if facts.is_small and facts.size < 4:
            return "gather_fold"
        case OperationCode.REDUCE if not facts.is_small and not facts.is_sparse:
            return "direct"
        case OperationCode.ALL_REDUCE | OperationCode.REDUCE_SCATTER if facts.suits_direct:
            return "direct"
        case kind:
            return _DEFAULTS[kind](facts)


def _barrier(facts: Facts) -> str:
    return "two_phase" if facts.size < 5 else "dissemination"


def _all_reduce(facts: Facts) -> str:
    """Two ranks exchange everything in one step: no more bytes than in a ring, and half the waiting. A ring computes
    less, which counts where the vector leaves the cache.
    """
    if facts.is_small or (facts.size == 2 and facts.size_bytes <= 4 * facts.large_msg_bytes):
        return "recursive_doubling"
    if facts.suits_a_pipeline:
        return "pipelined_ring"
    return "ring" if facts.suits_a_ring else "halving_doubling"


def _broadcast(facts: Facts) -> str:
    if facts.is_sparse:
        return "spanning_tree"
    if facts.size < 4 and not facts.is_large:
        return "flat"
    if facts.is_small:
        return "tree"
    return "chain" if facts.is_large else "scatter_all_gather"


def _reduce(facts: Facts) -> str:
    if not facts.is_small:
        return "reduce_scatter_gather"
    return "flat" if facts.size < 4 else "tree"


def _all_gather(facts: Facts) -> str:
    if facts.size < 4:
        return "direct"
    if facts.suits_a_pipeline:
        return "pipelined_ring"
    if facts.is_cube and not facts.is_small:
        return "recursive_doubling"
    return "ring" if facts.suits_a_ring and not facts.is_small else "bruck"


def _reduce_scatter(facts: Facts) -> str:
    if facts.is_small:
        return "halving"
    if facts.suits_a_pipeline:
        return "pipelined_ring"
    return "ring" if facts.suits_a_ring else "halving"


def _all_to_all(facts: Facts) -> str:
    return "direct" if facts.size < 4 or facts.is_small else "pairwise"


def _to_or_from_root(facts: Facts) -> str:
    """A tree needs every rank to know the blocks of others."""
    if facts.operation in _COUNTS_KNOWN_TO_THE_ROOT or facts.size < 8 or facts.size_bytes > _BLOCK_BYTES:
        return "flat"
    return "tree"


def _scan(facts: Facts) -> str:
    return "chain" if facts.is_large else "recursive_doubling"


_DEFAULTS: Final[Mapping[OperationCode, Callable[[Facts], str]]] = {
    OperationCode.BARRIER: _barrier,
    OperationCode.ALL_REDUCE: _all_reduce,
    OperationCode.BROADCAST: _broadcast,
    OperationCode.REDUCE: _reduce,
    OperationCode.ALL_GATHER: _all_gather,
    OperationCode.REDUCE_SCATTER: _reduce_scatter,
    OperationCode.ALL_TO_ALL: _all_to_all,
    OperationCode.GATHER: _to_or_from_root,
    OperationCode.SCATTER: _to_or_from_root,
    OperationCode.SCAN: _scan,
    OperationCode.EXCLUSIVE_SCAN: _scan,
}
