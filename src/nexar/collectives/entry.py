"""One call of a collective, from the moment in which it has its number to its end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import monotonic

from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import name_of
from nexar.links.operation import Operation
from nexar.types import AwaitedPeer, Rank


def name_of_call(operation: int, sequence: int) -> str:
    """`all_reduce #12`, as errors and reports say it."""
    return f"{name_of(operation)} #{sequence}"


class Entry(Operation):
    """The alarm of everything the call waits for: it is done when the call is over, and has an error as soon as
    somebody else has ended it for all.
    """

    __slots__ = ("arrivals", "awaits", "began", "carried", "fingerprint", "moved_at", "sequence", "step")

    arrivals: dict[int, float]
    """By node: when it was first heard of in this call. Under the node's lock."""

    def __init__(self, lock: threading.Lock, sequence: int, fingerprint: Fingerprint) -> None:
        self.lock = lock  # the base's part, written out: one is made for every call
        self.done = False
        self.error = None
        self._waiter = None
        self._callbacks = None
        self.sequence = sequence
        self.fingerprint = fingerprint
        self.step = 0
        self.awaits: Sequence[Operation] = ()  # what it waits for, once it lasts; written by who runs the call
        self.began = self.moved_at = monotonic()
        self.carried: float | None = None  # bytes on all links when they were last looked at, once the call lasts

    @property
    def operation(self) -> str:
        """`all_reduce`."""
        return name_of(self.fingerprint.operation)

    @property
    def name(self) -> str:
        """`all_reduce #12`."""
        return name_of_call(self.fingerprint.operation, self.sequence)

    def moved(self) -> None:
        """One more step is done: that is progress. By who runs the call."""
        self.step += 1
        self.moved_at = monotonic()

    def waiting_for(self) -> set[Rank]:
        """The ranks that it has been waiting for since it turned out to last, so far as they are known. Any thread."""
        awaited = (each.awaited().rank for each in self.awaits if not each.done)
        return {rank for rank in awaited if rank is not None}

    def awaited(self) -> AwaitedPeer:
        """Nobody in particular."""
        return AwaitedPeer(missing=self.name)

    def cancel(self) -> None:
        """It has no buffers: who made the call ends it."""
