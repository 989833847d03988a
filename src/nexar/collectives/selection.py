"""The selection of an algorithm: a pure function of facts that are equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from nexar.collectives.operations import SelectionFacts, algorithms_of
from nexar.errors import UsageError

SHARED_MEMORY: Final = "shared_memory"
TWO_LEVEL: Final = "two_level"

_TWO_LEVEL_BYTES: Final = 64 * 1024


def choose_algorithm(facts: SelectionFacts, algorithm: str | None) -> str:
    """UsageError if a forced algorithm does not suit the call."""
    if algorithm is not None:
        return _forced(facts, algorithm)
    if facts.size > 1 and _why_not_shared_memory(facts) is None:
        return SHARED_MEMORY
    if facts.size_bytes >= _TWO_LEVEL_BYTES and _why_not_two_level(facts) is None:
        return TWO_LEVEL
    return _default(facts)(facts)


def _default(facts: SelectionFacts) -> Callable[[SelectionFacts], str]:
    row = facts.collective
    if facts.deterministic or not facts.commutative:
        return row.choose_ordered or row.choose
    if facts.rounds and facts.size > 2:
        return row.choose_single_rounding or row.choose
    return row.choose


def allowed_algorithms(facts: SelectionFacts) -> list[str]:
    """Names that suit the call, sorted."""
    names = [SHARED_MEMORY, TWO_LEVEL, *algorithms_of(facts.operation)]
    return sorted(name for name in names if _why_not(facts, name) is None)


def _forced(facts: SelectionFacts, algorithm: str) -> str:
    reason = _why_not(facts, algorithm)
    if reason is None:
        return algorithm
    names = ", ".join(allowed_algorithms(facts)) or "none"
    raise UsageError(f"algorithm={algorithm!r} {reason}; allowed for this {facts.operation.name.lower()}: {names}")


def _why_not(facts: SelectionFacts, name: str) -> str | None:
    if name == SHARED_MEMORY:
        return _why_not_shared_memory(facts)
    if name == TWO_LEVEL:
        return _why_not_two_level(facts)
    found = algorithms_of(facts.operation).get(name)
    if found is None:
        return "does not exist for this operation"
    if not found.ordered and not facts.commutative:
        return "does not keep rank order, which a non-commutative reduction needs"
    if not found.left_fold and facts.deterministic:
        return "does not fold in rank order, which deterministic=True requires"
    return None


def _why_not_shared_memory(facts: SelectionFacts) -> str | None:
    if not facts.collective.shared_memory:
        return "does not exist for this operation"
    if len(facts.hosts) > 1:
        return f"needs all ranks on one host, and they are on {len(facts.hosts)}"
    return None if facts.shared_memory else "needs shared memory, and the ranks do not share memory"


def _why_not_two_level(facts: SelectionFacts) -> str | None:
    if not facts.collective.two_level:
        return "does not exist for this operation"
    if len(facts.hosts) < 2 or max(facts.hosts) < 2:
        return "needs several hosts, one of them with several ranks"
    if not facts.shared_memory:
        return "needs shared memory within hosts, and their ranks do not share memory"
    if facts.deterministic or not facts.commutative:
        return "combines host by host, not in one order over all ranks"
    return None
