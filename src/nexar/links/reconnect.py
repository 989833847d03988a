"""Reconnects a broken link: at once, then with full jitter, until a deadline.

Pending operations have raised, because frames may be lost; the link serves the next generation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from nexar.transport.base import Carrier, ConnectRefused

if TYPE_CHECKING:
    from nexar.links.link import Link

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 2.0
_DOUBLINGS = 16  # far beyond the longest pause, and far below the largest float


def pause_before(attempt: int, random: Random) -> float:
    """Return the seconds before attempt 0, 1, 2, …: none, then up to a bound that doubles."""
    if attempt == 0:
        return 0.0
    bound = FIRST_PAUSE * 2.0 ** min(attempt - 1, _DOUBLINGS)
    return random.uniform(0.0, min(bound, LONGEST_PAUSE))


class Reconnect:
    """Dials in its own thread until connected, stopped, or the deadline."""

    def __init__(
        self, link: Link, connect: Callable[[float], Carrier], timeout: float, random: Random | None = None
    ) -> None:
        self._link = link
        self._connect = connect  # deadline → carrier
        self._deadline = time.monotonic() + timeout
        self._random = random or Random()
        self._stop = threading.Event()
        self.attempts = 0  # written by the thread
        self.error: Exception | None = None  # why the last attempt failed; written by the thread
        self._connected = False  # written by the thread
        self._thread = threading.Thread(target=self._run, name="nexar-redial", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def join(self) -> bool:
        """True if the link is connected again."""
        self._thread.join()
        return self._connected

    def _run(self) -> None:
        while not self._stop.wait(self._pause()):
            if self.attempts and time.monotonic() >= self._deadline:
                return
            self.attempts += 1
            try:
                self._link.adopt(self._connect(self._deadline))
            except (ConnectRefused, OSError) as error:
                self.error = error
            else:
                self.error = None
                self._connected = True
                return

    def _pause(self) -> float:
        left = max(0.0, self._deadline - time.monotonic())
        return min(pause_before(self.attempts, self._random), left)
