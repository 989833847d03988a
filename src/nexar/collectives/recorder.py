"""The last operations, for whoever wants to know afterwards what happened.

A ring: one store for each operation, and nothing that grows. Any thread records, without a lock: a number from
`itertools.count` is given to one caller only, and a list store is atomic.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final, TypeAlias

from nexar.collectives.fingerprint import Fingerprint

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


class Recorder:
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
