"""Statistics of collective calls: recent calls, totals and stragglers.

Any thread records without a lock: `itertools.count` and a list store are atomic. Stragglers are estimated from arrivals
(a rank's first message in a call, on this rank's clock), because a slow rank makes the call equally long for all.
Latency and indirect delays average out.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from nexar.collectives.fingerprint import Fingerprint, operation_name
from nexar.types import NodeId, Rank

KEPT: Final = 4096
"""Calls kept."""
TRACED: Final = 1 << 18
"""Calls kept if traced: about 50 MB."""
RecordFields: TypeAlias = tuple[int, Fingerprint, float, float, int, str]
"""The fields of a Record; a tuple is cheaper."""


@dataclass(frozen=True, slots=True)
class Record:
    """One finished call. Times are of time.monotonic."""

    sequence: int
    fingerprint: Fingerprint
    began: float
    ended: float
    size_bytes: int
    outcome: str
    """Empty on success, else the name of the error."""


class RecentCalls:
    """The recent calls of one communicator."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._ring: list[RecordFields | None] = [None] * kept
        self._numbers = itertools.count()

    def record(self, facts: RecordFields) -> None:
        self._ring[next(self._numbers) % self._kept] = facts

    def drain(self) -> tuple[list[RecordFields], int]:
        """All calls by end time, and how many were overwritten. Record nothing afterwards."""
        missed = max(0, next(self._numbers) - self._kept)
        return sorted((each for each in self._ring if each is not None), key=lambda facts: facts[3]), missed

    def snapshot(self) -> list[Record]:
        records = [Record(*each) for each in self._ring.copy() if each is not None]
        return sorted(records, key=lambda record: record.ended)


class _Totals:
    __slots__ = ("calls", "errors", "seconds", "size_bytes", "waiting")

    def __init__(self) -> None:
        self.calls = 0
        self.errors = 0
        self.size_bytes = 0
        self.seconds = 0.0
        self.waiting = 0.0

    def facts(self) -> dict[str, float]:
        return {
            "calls": self.calls,
            "bytes": self.size_bytes,
            "seconds": self.seconds,
            "seconds_waiting": self.waiting,
            "errors": self.errors,
        }


class CallTotals:
    """Totals of one communicator. Not thread-safe."""

    def __init__(self) -> None:
        self._operations: dict[int, _Totals] = {}
        self._errors: Counter[str] = Counter()

    def count(self, operation: int, size_bytes: int, seconds: float, waiting: float, outcome: str) -> None:
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
        found = self._operations.values()
        return (
            sum(each.calls for each in found),
            sum(each.size_bytes for each in found),
            sum(each.errors for each in found),
            sum(each.waiting for each in found),
        )

    def stats(self) -> dict[str, Any]:
        operations = {operation_name(code): totals.facts() for code, totals in self._operations.items()}
        sums: dict[str, Any] = {name: sum(facts[name] for facts in operations.values()) for name in _Totals().facts()}
        return {
            **sums,
            "operations": operations,
            "errors_by_kind": dict(self._errors),
        }


class Straggler(NamedTuple):
    """How late one rank was after the first of each call, in seconds."""

    rank: Rank
    mean_lateness: float
    worst: float
    times_last: int
    share: float
    """Share of the lateness of all ranks."""


class _NodeDelays:
    __slots__ = ("calls", "last", "seconds", "waiting", "worst")

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0
        self.worst = 0.0
        self.last = 0
        self.waiting = 0.0  # of this node for that one

    def merge(self, other: _NodeDelays) -> None:
        self.calls += other.calls
        self.seconds += other.seconds
        self.worst = max(self.worst, other.worst)
        self.last += other.last
        self.waiting += other.waiting


class _OperationDelays:
    __slots__ = ("mine", "others")

    def __init__(self) -> None:
        self.mine = _NodeDelays()
        self.others: dict[NodeId, _NodeDelays] = {}


class StragglerEstimate:
    """Sums over all calls by operation and node. Not thread-safe."""

    def __init__(self, node: NodeId) -> None:
        self._node = node
        self._delays: dict[int, _OperationDelays] = {}

    def add_call(self, began: float, arrivals: Mapping[NodeId, float], operation: int = 0) -> float:
        """Returns how long this node waited."""
        delays = self._delays.get(operation)
        if delays is None:
            delays = self._delays[operation] = _OperationDelays()
        first = last = began
        for when in arrivals.values():  # min() and max() cost more, and every call runs this
            if when < first:
                first = when
            elif when > last:
                last = when
        self._add(delays.mine, began - first, last=last == began > first)
        for node, when in arrivals.items():
            found = delays.others.get(node)
            if found is None:
                found = delays.others[node] = _NodeDelays()
            if when > began:
                found.waiting += when - began
            self._add(found, when - first, last=when == last > first)
        return last - began

    def _add(self, found: _NodeDelays, late: float, *, last: bool) -> None:
        found.calls += 1
        found.last += last
        if late:
            found.seconds += late
            found.worst = max(found.worst, late)

    def stragglers(self, rank_of: Callable[[NodeId], Rank]) -> list[Straggler]:
        sums = self._all()
        total = sum(each.seconds for each in sums.values()) or 1.0
        ranks = [
            Straggler(rank_of(node), each.seconds / each.calls, each.worst, each.last, each.seconds / total)
            for node, each in sums.items()
        ]
        return sorted(ranks, key=lambda each: (-each.share, each.rank))

    def waiting(self, rank_of: Callable[[NodeId], Rank]) -> dict[Rank, float]:
        return {rank_of(node): each.waiting for node, each in self._all().items() if node != self._node}

    def arrivals(self, rank_of: Callable[[NodeId], Rank]) -> dict[int, dict[Rank, dict[str, float]]]:
        """By operation and rank: calls, mean and worst lateness (seconds after the first), and times last."""
        return {
            operation: {
                rank_of(node): {
                    "calls": each.calls,
                    "mean_lateness": each.seconds / each.calls,
                    "worst": each.worst,
                    "times_last": each.last,
                    "seconds_waited_for": each.waiting,
                }
                for node, each in {self._node: delays.mine, **delays.others}.items()
            }
            for operation, delays in self._delays.items()
        }

    def _all(self) -> dict[NodeId, _NodeDelays]:
        sums: dict[NodeId, _NodeDelays] = {}
        for delays in self._delays.values():
            for node, each in {self._node: delays.mine, **delays.others}.items():
                sums.setdefault(node, _NodeDelays()).merge(each)
        return sums
