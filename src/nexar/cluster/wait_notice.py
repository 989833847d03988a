"""Tells the user what a call waits for: after 2 s, then at growing intervals."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, Self, TypeAlias

FIRST_NOTICE: Final = 2.0
"""Seconds until the first notice. Each further one takes twice as long as the one before."""
_LAST_NOTICE: Final = 1.0
"""Seconds that the end of a wait gives a notice which is being written: nobody may read standard error."""

Tell: TypeAlias = Callable[[str], None]
"""Shows one line to the user. Must not block for long."""


def tell_on_stderr(text: str) -> None:
    """One line on standard error, as all lines of nexar begin there. Without effect where that is closed, or nobody
    reads it: a call must not fail for a notice that nobody would see.
    """
    if sys.stderr is None:
        return
    with suppress(OSError, ValueError):  # a broken pipe; a file that the program has closed
        sys.stderr.write(f"nexar: {text}\n")
        sys.stderr.flush()


def seconds_left(deadline: float) -> str:
    """For the end of a notice; empty where there is no deadline."""
    return "" if math.isinf(deadline) else f"; trying for {max(0.0, deadline - time.monotonic()):.0f} s more"


class NoticeTimes:
    """When the user is told something: `next`, on the monotonic clock. Pure but for its beginning."""

    def __init__(self, now: float) -> None:
        self._interval = FIRST_NOTICE
        self.next = now + FIRST_NOTICE

    def advance(self, now: float) -> None:
        """The user was told."""
        self._interval *= 2
        self.next = now + self._interval


class WaitNotice:
    """A thread that tells what `describe` says, as long as the block takes. Nobody to tell: no thread."""

    def __init__(self, tell: Tell | None, describe: Callable[[], str]) -> None:
        """`describe` is called by the thread, and must not block."""
        self._tell = tell
        self._describe = describe
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nexar-wait-notice", daemon=True)

    def _run(self) -> None:
        times = NoticeTimes(time.monotonic())
        while not self._over.wait(max(0.0, times.next - time.monotonic())):
            if self._tell is not None:
                self._tell(self._describe())
            times.advance(time.monotonic())

    def __enter__(self) -> Self:
        if self._tell is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._tell is not None:
            self._thread.join(_LAST_NOTICE)
