"""The last operations, for whoever wants to know afterwards what happened.

A ring: one store for each operation, and nothing that grows. Any thread records, without a lock: a number from
`itertools.count` is given to one caller only, and a list store is atomic.

What collectives have cost so far: calls, bytes, time, and how much of it was waiting.

Who keeps the others waiting. Collectives make all ranks equally slow, so durations cannot show it; arrivals can.

Pure. An arrival is the moment in which a rank was first heard of in a call, on this rank's clock; so it includes the
way of that message, and where a schedule lets a rank speak only after it has heard others, their lateness too. Over
many calls what is left is the rank that really comes last.
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
"""Operations."""
TRACED: Final = 1 << 18
"""Where a trace is wanted: about 50 MB, if there are so many."""
Facts: TypeAlias = tuple[int, Fingerprint, float, float, int, str]
"""The fields of a Record, in its order: a tuple is what a call pays for."""


@dataclass(frozen=True, slots=True)
class Record:
    """One operation that has ended. Times are of time.monotonic."""

    sequence: int
    fingerprint: Fingerprint
    began: float
    ended: float
    size_bytes: int
    outcome: str
    """Empty: it went well; else the name of the error."""


class RecentCalls:
    """Of one communicator."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._ring: list[Facts | None] = [None] * kept
        self._numbers = itertools.count()

    def record(self, facts: Facts) -> None:
        """An operation has ended."""
        self._ring[next(self._numbers) % self._kept] = facts

    def drain(self) -> tuple[list[Facts], int]:
        """At the end, when nothing is recorded any more: all that is kept, by their end, and how many are not."""
        missed = max(0, next(self._numbers) - self._kept)
        return sorted((each for each in self._ring if each is not None), key=lambda facts: facts[3]), missed

    def snapshot(self) -> list[Record]:
        """The last operations, in the order in which they ended."""
        records = [Record(*each) for each in self._ring.copy() if each is not None]
        return sorted(records, key=lambda record: record.ended)


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


class CallTotals:
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
        operations = {operation_name(code): totals.facts() for code, totals in self._operations.items()}
        names = ("calls", "bytes", "seconds", "seconds_waiting", "errors")
        sums: dict[str, Any] = {name: sum(facts[name] for facts in operations.values()) for name in names}
        return {
            **sums,
            "operations": operations,
            "errors_by_kind": dict(self._errors),
        }


class Straggler(NamedTuple):
    """How late one rank came, compared with the first of each call. Seconds."""

    rank: Rank
    mean_lateness: float
    worst: float
    times_last: int
    share: float
    """Of the lateness of all ranks together: 1 if nobody else was ever late."""


class _NodeDelays:
    """Of one node."""

    __slots__ = ("calls", "last", "seconds", "waiting", "worst")

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0
        self.worst = 0.0
        self.last = 0
        self.waiting = 0.0  # of this node, for that one

    def merge(self, other: _NodeDelays) -> None:
        """What was seen there too."""
        self.calls += other.calls
        self.seconds += other.seconds
        self.worst = max(self.worst, other.worst)
        self.last += other.last
        self.waiting += other.waiting


class _OperationDelays:
    """Of one operation."""

    __slots__ = ("mine", "others")

    def __init__(self) -> None:
        self.mine = _NodeDelays()
        self.others: dict[NodeId, _NodeDelays] = {}


class StragglerEstimate:
    """Sums over all calls so far, by operation and node: what a rank is, the reader says. One thread at a time."""

    def __init__(self, node: NodeId) -> None:
        """`node`: this one."""
        self._node = node
        self._books: dict[int, _OperationDelays] = {}

    def saw(self, began: float, arrivals: Mapping[NodeId, float], operation: int = 0) -> float:
        """One call: when this node came, and when each other that is known of. Returns how long this one waited."""
        book = self._books.get(operation)
        if book is None:
            book = self._books[operation] = _OperationDelays()
        first = last = began
        for when in arrivals.values():  # not min() and max(): they cost more, and every call comes here
            if when < first:
                first = when
            elif when > last:
                last = when
        self._add(book.mine, began - first, last=last == began > first)
        for node, when in arrivals.items():
            found = book.others.get(node)
            if found is None:
                found = book.others[node] = _NodeDelays()
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
        """Every rank that was seen, the one that cost most first."""
        sums = self._all()
        total = sum(each.seconds for each in sums.values()) or 1.0
        ranks = [
            Straggler(rank_of(node), each.seconds / each.calls, each.worst, each.last, each.seconds / total)
            for node, each in sums.items()
        ]
        return sorted(ranks, key=lambda each: (-each.share, each.rank))

    def waiting(self, rank_of: Callable[[NodeId], Rank]) -> dict[Rank, float]:
        """Seconds that this node has waited for each."""
        return {rank_of(node): each.waiting for node, each in self._all().items() if node != self._node}

    def arrivals(self, rank_of: Callable[[NodeId], Rank]) -> dict[int, dict[Rank, dict[str, float]]]:
        """By operation and rank: in how many calls its arrival was seen, how late it was, in the mean and at worst
        (seconds after the first of the call), and how often it was the last.
        """
        return {
            operation: {
                rank_of(node): {
                    "calls": each.calls,
                    "mean_lateness": each.seconds / each.calls,
                    "worst": each.worst,
                    "times_last": each.last,
                    "seconds_waited_for": each.waiting,
                }
                for node, each in {self._node: book.mine, **book.others}.items()
            }
            for operation, book in self._books.items()
        }

    def _all(self) -> dict[NodeId, _NodeDelays]:
        """Over all operations."""
        sums: dict[NodeId, _NodeDelays] = {}
        for book in self._books.values():
            for node, each in {self._node: book.mine, **book.others}.items():
                sums.setdefault(node, _NodeDelays()).merge(each)
        return sums
