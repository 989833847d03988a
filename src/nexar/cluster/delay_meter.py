"""Measures how much slower this process runs than it would on an idle machine: see `decisions.own_delay`."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Final

from nexar.cluster.decisions.failure_detector import OwnDelay

_TASKS: Final = Path("/proc/self/task")
_NANOSECOND: Final = 1e-9


class DelayMeter:
    """Of one node. Any thread. It measures whenever it is told of a timer, or `sample`d."""

    def __init__(self, longest: float) -> None:
        """`longest`: seconds that the delay has at most."""
        self._lock = threading.Lock()
        self._delay = OwnDelay(longest)  # under the lock
        self._seconds = 0.0
        with self._lock:  # from the beginning: what starting the process took is a measurement already
            self._delay.threads_used(0.0, 0.0, time.monotonic() - time.process_time() - _waited())
        self.sample()

    @property
    def seconds(self) -> float:
        """By which deadlines for peers extend now."""
        return self._seconds

    def timer_ran(self, due: float, now: float) -> None:
        """A timer that was set to `due` has run at `now` (time.monotonic)."""
        with self._lock:
            self._delay.timer_ran(due, now)
        self.sample()

    def sample(self) -> None:
        """Look how long this process's threads have waited for a CPU."""
        now, cpu, waited = time.monotonic(), time.process_time(), _waited()
        with self._lock:
            self._delay.threads_used(cpu, waited, now)
            self._seconds = self._delay.seconds


def _waited() -> float:
    """Seconds that the threads of this process were ready to run and had no CPU; 0 where the system does not say."""
    return sum(_waited_by(task) for task in _tasks()) * _NANOSECOND


def _tasks() -> list[Path]:
    try:
        return list(_TASKS.iterdir())
    except OSError:
        return []


def _waited_by(task: Path) -> int:
    """The second of three numbers; 0 for a thread that has just ended."""
    try:
        return int((task / "schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
