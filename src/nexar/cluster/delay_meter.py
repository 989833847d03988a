"""Measures how much slower this process runs than on an idle machine."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Final

from nexar.cluster.decisions.failure_detector import OwnDelay

_TASKS: Final = Path("/proc/self/task")
_NANOSECOND: Final = 1e-9


class DelayMeter:
    """Measures in `timer_ran` and `sample`. Any thread."""

    def __init__(self, longest: float) -> None:
        self._lock = threading.Lock()
        self._delay = OwnDelay(longest)  # guarded by the lock
        self._seconds = 0.0  # written under the lock, read without
        with self._lock:  # starting the process counts as the first measurement
            self._delay.threads_used(0.0, 0.0, time.monotonic() - time.process_time() - _waited())
        self.sample()

    @property
    def seconds(self) -> float:
        return self._seconds

    def timer_ran(self, due: float, now: float) -> None:
        """Times are of time.monotonic."""
        with self._lock:
            self._delay.timer_ran(due, now)
        self.sample()

    def sample(self) -> None:
        """Read how long this process's threads have waited for a CPU."""
        now, cpu, waited = time.monotonic(), time.process_time(), _waited()
        with self._lock:
            self._delay.threads_used(cpu, waited, now)
            self._seconds = self._delay.seconds


def _waited() -> float:
    """0 if unknown."""
    return sum(_waited_by(task) for task in _tasks()) * _NANOSECOND


def _tasks() -> list[Path]:
    try:
        return list(_TASKS.iterdir())
    except OSError:
        return []


def _waited_by(task: Path) -> int:
    # The second of three numbers; 0 for a thread that has just ended.
    try:
        return int((task / "schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
