"""What collectives have cost so far: calls, bytes, time, and how much of it was waiting."""

from __future__ import annotations

from collections import Counter
from typing import Any

from nexar.collectives.operations import name_of


class _Totals:
    """Of one operation."""

    __slots__ = ("calls", "errors", "seconds", "size_bytes", "waiting")

    def __init__(self) -> None:
        self.calls = 0
        self.errors = 0
        self.size_bytes = 0
        self.seconds = 0.0
        self.waiting = 0.0

    def facts(self) -> dict[str, float]:
        """As stats() gives them."""
        return {
            "calls": self.calls,
            "bytes": self.size_bytes,
            "seconds": self.seconds,
            "seconds_waiting": self.waiting,
            "errors": self.errors,
        }


class Tally:
    """Of one communicator. One thread at a time."""

    def __init__(self) -> None:
        self._operations: dict[int, _Totals] = {}
        self._errors: Counter[str] = Counter()

    def count(self, operation: int, size_bytes: int, seconds: float, waiting: float, outcome: str) -> None:
        """One call has ended. `waiting`: seconds of it; `outcome` is empty, or names the error."""
        totals = self._operations.get(operation)
        if totals is None:
            totals = self._operations[operation] = _Totals()
        totals.calls += 1
        totals.size_bytes += size_bytes
        totals.seconds += seconds
        totals.waiting += waiting
        if outcome:
            totals.errors += 1
            self._errors[outcome] += 1

    def totals(self) -> tuple[int, int, int, float]:
        """Calls, bytes, errors, and seconds waiting, of all operations."""
        found = self._operations.values()
        return (
            sum(each.calls for each in found),
            sum(each.size_bytes for each in found),
            sum(each.errors for each in found),
            sum(each.waiting for each in found),
        )

    def stats(self) -> dict[str, Any]:
        """Everything, by operation, with sums."""
        operations = {name_of(code): totals.facts() for code, totals in self._operations.items()}
        names = ("calls", "bytes", "seconds", "seconds_waiting", "errors")
        sums: dict[str, Any] = {name: sum(facts[name] for facts in operations.values()) for name in names}
        return {
            **sums,
            "operations": operations,
            "errors_by_kind": dict(self._errors),
        }
