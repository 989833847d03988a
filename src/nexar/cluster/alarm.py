"""A thread that does at its time what is due, and sleeps until then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

_LONGEST_SLEEP: Final = 3600.0


class Alarm:
    """Calls `ring(now)` at the times it was told of, in a thread of its own, never two calls at once. `ring` returns
    when it wants to be called next, None: when told. Close it.
    """

    def __init__(self, ring: Callable[[float], float | None]) -> None:
        """Without a thread until it is told of a time."""
        self._ring = ring
        self._condition = threading.Condition()
        self._due: float | None = None  # under the condition
        self._closed = False  # under the condition
        self._thread: threading.Thread | None = None  # under the condition

    def ring_by(self, due: float | None) -> None:
        """Ring at this time (time.monotonic), if it is earlier than what is due already. Any thread."""
        if due is None:
            return
        with self._condition:
            if self._due is None or due < self._due:
                self._due = due
                self._start()
                self._condition.notify()

    def close(self) -> None:
        """Returns when the thread has ended; not callable from it. Idempotent."""
        with self._condition:
            self._closed = True
            self._condition.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _start(self) -> None:
        """Under the condition."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="nexar-alarm", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while self._wait():
            self.ring_by(self._ring(time.monotonic()))

    def _wait(self) -> bool:
        """Until something is due; False: closed."""
        with self._condition:
            while not self._closed:
                left = _LONGEST_SLEEP if self._due is None else self._due - time.monotonic()
                if left <= 0:
                    self._due = None  # from here on a new time is a new call
                    return True
                self._condition.wait(min(left, _LONGEST_SLEEP))
            return False
