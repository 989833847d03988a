"""A clock that a test advances."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable


class VirtualClock:
    """Implements `nexar.clock.Clock`. Time passes only in `advance()`, which stops at every scheduled time.

    Callbacks run in the advancing thread, ordered by time and then by scheduling, each at its own `now()`. All methods
    are thread-safe, also in a callback; one thread advances at a time.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start  # the advancing thread writes it
        self._lock = threading.Lock()  # guards _scheduled
        self._advancing = threading.Lock()
        self._scheduled: list[tuple[float, int, Callable[[], None]]] = []  # heap
        self._ties = itertools.count()
        self._watchers: tuple[Callable[[], None], ...] = ()  # on_advance() replaces it

    def now(self) -> float:
        return self._now

    def at(self, when: float, callback: Callable[[], None]) -> None:
        """Calls `callback` when the clock reaches `when`; a past time means the next advance."""
        with self._lock:
            heapq.heappush(self._scheduled, (when, next(self._ties), callback))

    def on_advance(self, watcher: Callable[[], None]) -> None:
        """Calls `watcher`, for example `MemoryNetwork.changed`, after every change of the time."""
        self._watchers = (*self._watchers, watcher)

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time cannot go back by {-seconds} seconds")
        with self._advancing:
            end = self._now + seconds
            while (callback := self._step_to(end)) is not None:
                callback()
                self._notify()
            self._now = end
            self._notify()

    def advance_to_next(self) -> bool:
        """Advances to the next scheduled time. Returns False if nothing is scheduled."""
        with self._lock:
            when = self._scheduled[0][0] if self._scheduled else None
        if when is not None:
            self.advance(max(0.0, when - self._now))
        return when is not None

    def _step_to(self, end: float) -> Callable[[], None] | None:
        with self._lock:
            if not self._scheduled or self._scheduled[0][0] > end:
                return None
            when, _, callback = heapq.heappop(self._scheduled)
        self._now = max(self._now, when)
        return callback

    def _notify(self) -> None:
        for watcher in self._watchers:
            watcher()
