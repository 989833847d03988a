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

FIRST_NOTICE: Final = 2.0  # seconds; intervals double
_LAST_NOTICE: Final = 1.0
"""Seconds that the end of a wait gives a notice being written: standard error may block."""

Tell: TypeAlias = Callable[[str], None]  # shows one line to the user; must not block for long


def tell_on_stderr(text: str) -> None:
    """Errors are ignored: a call must not fail for a notice."""
    if sys.stderr is None:
        return
    with suppress(OSError, ValueError):  # a broken pipe, or a closed file
        sys.stderr.write(f"nexar: {text}\n")
        sys.stderr.flush()


def seconds_left(deadline: float) -> str:
    """Empty without a deadline."""
    return "" if math.isinf(deadline) else f"; trying for {max(0.0, deadline - time.monotonic()):.0f} s more"


class NoticeTimes:
    """`next` is the time of the next notice, on the monotonic clock."""

    def __init__(self, now: float) -> None:
        self._interval = FIRST_NOTICE
        self.next = now + FIRST_NOTICE

    def advance(self, now: float) -> None:
        self._interval *= 2
        self.next = now + self._interval


class WaitNotice:
    """Shows `describe()` in a thread while the block runs."""

    def __init__(self, tell: Tell | None, describe: Callable[[], str]) -> None:
        """`describe` must not block."""
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
