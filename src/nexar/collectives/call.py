"""One collective call of this rank."""

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
    """For example `all_reduce #12`."""
    return f"{operation_name(operation)} #{sequence}"


class Call(Operation):
    """A call in progress. Its error is set as soon as a failure ends the call on all ranks."""

    __slots__ = ("arrivals", "awaits", "began", "carried", "fingerprint", "moved_at", "sequence", "step")

    arrivals: dict[int, float]
    """Arrival times by node. The node's lock guards it."""

    def __init__(self, lock: threading.Lock, sequence: int, fingerprint: Fingerprint) -> None:
        self.lock = lock  # the base class's fields, set here to save a call per collective
        self.done = False
        self.error = None
        self._waiter = None
        self._callbacks = None
        self.sequence = sequence
        self.fingerprint = fingerprint
        self.step = 0
        # the operations it waits for, set once the call takes long; written by the thread that runs the call
        self.awaits: Sequence[Operation] = ()
        self.began = self.moved_at = monotonic()
        self.carried: float | None = None  # bytes on all links at the last progress check

    @property
    def operation(self) -> str:
        return operation_name(self.fingerprint.operation)

    @property
    def name(self) -> str:
        return call_name(self.fingerprint.operation, self.sequence)

    def moved(self) -> None:
        """Count a finished step. Only the thread that runs the call."""
        self.step += 1
        self.moved_at = monotonic()

    def waiting_for(self) -> set[Rank]:
        """The known ranks that a long call waits for. Any thread."""
        awaited = (each.awaited().rank for each in self.awaits if not each.done)
        return {rank for rank in awaited if rank is not None}

    def awaited(self) -> AwaitedPeer:
        return AwaitedPeer(missing=self.name)

    def cancel(self) -> None:
        """Does nothing: a call has no buffers, and its caller ends it."""


PostInRegion: TypeAlias = Callable[[int, PublishedCall, bool], Operation]
"""Posts a step: order number, call, whether to spin."""


class RegionCall:
    """A call and its region steps. Every step must be posted or aborted, in order: other ranks wait for it."""

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
        """Whether the calling thread runs the call."""
        self._taken = 0
        self._last: Operation = FINISHED

    def post_next(self) -> Operation:
        self._last = self._post((self.entry.sequence, self.fingerprint), spin=self.spin)
        return self._last

    def abort(self) -> None:
        """Abort the remaining steps. Nothing accesses the arrays afterwards."""
        self._last.cancel()
        while self._taken < len(self.region_steps):
            self._post(ABORTED, spin=False)

    def _post(self, announcement: PublishedCall, *, spin: bool) -> Operation:
        index, self._taken = self._taken, self._taken + 1
        return self.region_steps[index](self.order_number + index, announcement, spin)
