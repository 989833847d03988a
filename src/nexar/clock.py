"""Time as a parameter, so that tests control it: monotonic seconds."""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock."""

    def now(self) -> float: ...


class SystemClock:
    """The monotonic clock of this machine."""

    __slots__ = ()

    def now(self) -> float:
        return time.monotonic()
