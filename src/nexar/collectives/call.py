"""One call of a collective, from the moment in which it has its number to its end.

One call of a collective that has its number, and its turns in the memory that ranks share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TypeAlias

from nexar.collectives.fingerprint import Fingerprint, operation_name
from nexar.collectives.shared_region_layout import ABORTED, PublishedCall
from nexar.links.operation import FINISHED, Operation
from nexar.types import AwaitedPeer, Rank


def call_name(operation: int, sequence: int) -> str:
    """`all_reduce #12`, as errors and reports say it."""
    return f"{operation_name(operation)} #{sequence}"


class Call(Operation):
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
        return operation_name(self.fingerprint.operation)

    @property
    def name(self) -> str:
        """`all_reduce #12`."""
        return call_name(self.fingerprint.operation, self.sequence)

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


PostInRegion: TypeAlias = Callable[[int, PublishedCall, bool], Operation]
"""Posts an operation in the arena: its slip, what it is part of, and whether the caller may spin."""


class RegionCall:
    """Turns are taken in order. Each must be taken or skipped: the other ranks count on it."""

    __slots__ = ("_last", "_taken", "entry", "fingerprint", "order_number", "region_steps", "spin")

    def __init__(
        self,
        entry: Call,
        fingerprint: Fingerprint,
        order_number: int = 0,
        region_steps: Sequence[PostInRegion] = (),
    ) -> None:
        self.entry = entry
        self.fingerprint = fingerprint
        self.order_number = order_number
        self.region_steps = region_steps
        self.spin = False
        """The thread that made the call runs it, and has nothing better to do. Written by who runs it."""
        self._taken = 0
        self._last: Operation = FINISHED

    def post_next(self) -> Operation:
        """The next one."""
        self._last = self._post((self.entry.sequence, self.fingerprint), spin=self.spin)
        return self._last

    def give_up(self) -> None:
        """The turn that was taken, if it is not done, and those that are left: the other ranks find that this one gave
        up. On return nothing touches the arrays.
        """
        self._last.cancel()
        while self._taken < len(self.region_steps):
            self._post(ABORTED, spin=False)

    def _post(self, announcement: PublishedCall, *, spin: bool) -> Operation:
        index, self._taken = self._taken, self._taken + 1
        return self.region_steps[index](self.order_number + index, announcement, spin)
