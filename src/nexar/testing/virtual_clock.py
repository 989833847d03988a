"""A clock that stands still until a test moves it."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable


class VirtualClock:
    """Implements `nexar.clock.Clock`. Time passes in `advance()` only, and stops at every scheduled moment on its way.

    Callbacks run in the thread that advances, in the order of their time and then of their scheduling, each at exactly
    its own `now()`. Every method may be called from any thread, also from a callback; one thread advances at a time.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start  # written by the advancing thread
        self._lock = threading.Lock()  # guards _scheduled
        self._advancing = threading.Lock()
        self._scheduled: list[tuple[float, int, Callable[[], None]]] = []  # heap
        self._ties = itertools.count()
        self._watchers: tuple[Callable[[], None], ...] = ()  # replaced by on_advance()

    def now(self) -> float:
        """Seconds; never less than what it said before."""
        return self._now

    def at(self, when: float, callback: Callable[[], None]) -> None:
        """Call back when the time is `when`; a time that has passed means at the next advance."""
        with self._lock:
            heapq.heappush(self._scheduled, (when, next(self._ties), callback))

    def on_advance(self, watcher: Callable[[], None]) -> None:
        """Call back after every move of the time, e.g. `MemoryNetwork.changed`."""
        self._watchers = (*self._watchers, watcher)

    def advance(self, seconds: float) -> None:
        """Move the time on, doing on the way what is due."""
        if seconds < 0:
            raise ValueError(f"time cannot go back by {-seconds} seconds")
        with self._advancing:
            end = self._now + seconds
            while (callback := self._step_to(end)) is not None:
                callback()
                self._tell()
            self._now = end
            self._tell()

    def advance_to_next(self) -> bool:
        """Move to the next scheduled moment. False if nothing is scheduled."""
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

    def _tell(self) -> None:
        for watcher in self._watchers:
            watcher()
