"""Virtual time: one heap of what is due, and the record of what happened.

Law: nothing here reads a clock, and ties are broken by the order of scheduling. So a run is a function of its seed, and
the record of two runs of one seed has the same digest.
"""

from __future__ import annotations

import heapq
import zlib
from collections import deque
from collections.abc import Callable
from typing import Final

REMEMBERED: Final = 30
"""So many of the last lines are shown when a law is broken."""


class Timeline:
    """Time that passes from one scheduled moment to the next."""

    def __init__(self, remembered: int | None = REMEMBERED) -> None:
        """`remembered`: so many of the last lines are kept; None: all."""
        self.now = 0.0
        self.events = 0
        """How many were recorded."""
        self._due: list[tuple[float, int, Callable[[], None]]] = []  # heap
        self._scheduled = 0
        self._last: deque[str] = deque(maxlen=remembered)
        self._digest = 0

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do it when the time is `when`; a time that has passed means next."""
        self._scheduled += 1
        heapq.heappush(self._due, (when, self._scheduled, action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do it so many seconds from now."""
        self.at(self.now + seconds, action)

    def run_until(self, end: float) -> None:
        """Do all that is due before `end`, in order, each at its own time."""
        due = self._due
        while due and due[0][0] <= end:
            when, _, action = heapq.heappop(due)
            self.now = max(self.now, when)
            action()
        self.now = max(self.now, end)

    def record(self, line: str) -> None:
        """This has happened now."""
        stamped = f"{self.now:10.4f}  {line}"
        self.events += 1
        self._digest = zlib.crc32(stamped.encode(), self._digest)
        self._last.append(stamped)

    @property
    def digest(self) -> int:
        """Of everything that was recorded, in order."""
        return self._digest

    @property
    def last(self) -> tuple[str, ...]:
        """The last lines of the record."""
        return tuple(self._last)
