"""The algorithm selection table: a pure function of facts that are equal on all ranks."""

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
"""Below, the number of rounds dominates; above, the number of bytes."""
_TWO_LEVEL_BYTES: Final = 64 * 1024
_BLOCK_BYTES: Final = 4 * 1024
"""Blocks up to this size are forwarded on a tree to reduce the root's messages."""

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
_IN_TWO_LEVELS: Final = frozenset({OperationCode.ALL_REDUCE})
_BLOCK_PER_RANK: Final = frozenset({OperationCode.ALL_GATHER, OperationCode.GATHER, OperationCode.SCATTER})
_COUNTS_AT_ROOT: Final = frozenset(
    {OperationCode.GATHER_V, OperationCode.SCATTER_V, OperationCode.GATHER_OBJECT, OperationCode.SCATTER_OBJECT}
)


@dataclass(frozen=True)
class Facts:
    """What a selection depends on, equal on all ranks."""

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
    def kind(self) -> OperationCode:
        """The operation of which this is a variant."""
        return SAME_AS.get(self.operation, self.operation)

    @property
    def whole_bytes(self) -> int:
        return self.size_bytes * (self.size if self.kind in _BLOCK_PER_RANK else 1)

    @property
    def is_small(self) -> bool:
        return self.whole_bytes < _SMALL_BYTES

    @property
    def is_large(self) -> bool:
        return self.whole_bytes >= self.large_msg_bytes

    @property
    def suits_a_ring(self) -> bool:
        """The rounds of a ring grow with the world. But in a sparse topology nothing else moves as few bytes, except in
        a hypercube.
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
        """n - 1 concurrent messages must be few or long, and none relayed."""
        if self.is_small or self.is_sparse:
            return False
        return self.size <= self.ring_max_world or self.is_large or self.size_bytes >= self.size * _SMALL_BYTES

    @property
    def suits_a_pipeline(self) -> bool:
        return self.is_large and not self.is_cube


def choose_algorithm(facts: Facts, algorithm: str | None) -> str:
    """Returns the algorithm. Raises UsageError if a forced one does not suit the call."""
    if algorithm is not None:
        return _forced(facts, algorithm)
    if facts.size > 1 and _why_not_shared_memory(facts) is None:
        return SHARED_MEMORY
    if facts.size_bytes >= _TWO_LEVEL_BYTES and _why_not_two_level(facts) is None:
        return TWO_LEVEL
    if facts.deterministic or not facts.commutative:
        return _in_order(facts)
    if facts.rounds and facts.size > 2:
        return _rounding_once(facts)
    return _DEFAULTS[facts.kind](facts)


def allowed_algorithms(facts: Facts) -> list[str]:
    """Returns the names that suit the call, sorted."""
    names = [SHARED_MEMORY, TWO_LEVEL, *algorithms_of(facts.operation)]
    return sorted(name for name in names if _why_not(facts, name) is None)


def _forced(facts: Facts, algorithm: str) -> str:
    reason = _why_not(facts, algorithm)
    if reason is None:
        return algorithm
    names = ", ".join(allowed_algorithms(facts)) or "none"
    raise UsageError(f"algorithm={algorithm!r} {reason}; allowed for this {facts.operation.name.lower()}: {names}")


def _why_not(facts: Facts, name: str) -> str | None:
    """Returns the reason, as the end of a sentence, or None."""
    if name == SHARED_MEMORY:
        return _why_not_shared_memory(facts)
    if name == TWO_LEVEL:
        return _why_not_two_level(facts)
    found = algorithms_of(facts.operation).get(name)
    if found is None:
        return "does not exist for this operation"
    if not found.ordered and not facts.commutative:
        return "does not keep rank order, which a non-commutative reduction needs"
    if not found.folds and facts.deterministic:
        return "does not fold in rank order, which deterministic=True requires"
    return None


def _why_not_shared_memory(facts: Facts) -> str | None:
    if facts.kind not in _IN_SHARED_MEMORY:
        return "does not exist for this operation"
    if len(facts.hosts) > 1:
        return f"needs all ranks on one host, and they are on {len(facts.hosts)}"
    return None if facts.shared_memory else "needs shared memory, and the ranks do not share memory"


def _why_not_two_level(facts: Facts) -> str | None:
    if facts.kind not in _IN_TWO_LEVELS:
        return "does not exist for this operation"
    if len(facts.hosts) < 2 or max(facts.hosts) < 2:
        return "needs several hosts, one of them with several ranks"
    if not facts.shared_memory:
        return "needs shared memory within hosts, and their ranks do not share memory"
    if facts.deterministic or not facts.commutative:
        return "combines host by host, not in one order over all ranks"
    return None


def _in_order(facts: Facts) -> str:
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
    """Small arrays are sent as float32. For others one rank receives all contributions to a share, with no more bytes
    than a ring.
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
    """With two ranks, one exchange has half the latency of a ring; a ring computes less beyond the cache."""
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
    """A tree requires that ranks know the others' block sizes."""
    if facts.operation in _COUNTS_AT_ROOT or facts.size < 8 or facts.size_bytes > _BLOCK_BYTES:
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
