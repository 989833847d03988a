"""Time, as something a caller hands in.

Whoever needs to know the time takes a `Clock` (shells) or a plain `now: float` (decisions), so a test can own it.
Times are seconds on a clock that never goes back; only differences mean something.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """What tells the time."""

    def now(self) -> float:
        """Seconds since some fixed moment; never less than what it said before."""
        ...


class SystemClock:
    """The monotonic clock of this machine."""

    __slots__ = ()

    def now(self) -> float:
        """Seconds since an arbitrary moment, the same for all threads of the process."""
        return time.monotonic()
