"""Who keeps the others waiting. Collectives make all ranks equally slow, so durations cannot show it; arrivals can.

Pure. An arrival is the moment in which a rank was first heard of in a call, on this rank's clock; so it includes the
way of that message, and where a schedule lets a rank speak only after it has heard others, their lateness too. Over
many calls what is left is the rank that really comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from nexar.types import NodeId, Rank


class Straggler(NamedTuple):
    """How late one rank came, compared with the first of each call. Seconds."""

    rank: Rank
    mean_lateness: float
    worst: float
    times_last: int
    share: float
    """Of the lateness of all ranks together: 1 if nobody else was ever late."""


class _Sum:
    """Of one node."""

    __slots__ = ("calls", "last", "seconds", "waiting", "worst")

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0
        self.worst = 0.0
        self.last = 0
        self.waiting = 0.0  # of this node, for that one

    def merge(self, other: _Sum) -> None:
        """What was seen there too."""
        self.calls += other.calls
        self.seconds += other.seconds
        self.worst = max(self.worst, other.worst)
        self.last += other.last
        self.waiting += other.waiting


class _Book:
    """Of one operation."""

    __slots__ = ("mine", "others")

    def __init__(self) -> None:
        self.mine = _Sum()
        self.others: dict[NodeId, _Sum] = {}


class Lateness:
    """Sums over all calls so far, by operation and node: what a rank is, the reader says. One thread at a time."""

    def __init__(self, node: NodeId) -> None:
        """`node`: this one."""
        self._node = node
        self._books: dict[int, _Book] = {}

    def saw(self, began: float, arrivals: Mapping[NodeId, float], operation: int = 0) -> float:
        """One call: when this node came, and when each other that is known of. Returns how long this one waited."""
        book = self._books.get(operation)
        if book is None:
            book = self._books[operation] = _Book()
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
                found = book.others[node] = _Sum()
            if when > began:
                found.waiting += when - began
            self._add(found, when - first, last=when == last > first)
        return last - began

    def _add(self, found: _Sum, late: float, *, last: bool) -> None:
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

    def _all(self) -> dict[NodeId, _Sum]:
        """Over all operations."""
        sums: dict[NodeId, _Sum] = {}
        for book in self._books.values():
            for node, each in {self._node: book.mine, **book.others}.items():
                sums.setdefault(node, _Sum()).merge(each)
        return sums
