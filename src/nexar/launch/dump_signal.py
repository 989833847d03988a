"""SIGUSR1 makes the flight recorder write what this process is doing."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TypeAlias

from nexar.environment import inherited
from nexar.launch.plan import MARK_VARIABLE

_Handler: TypeAlias = Callable[[int, FrameType | None], None]


def listen() -> None:
    """From now on, unless SIGUSR1 means something already. Handlers are set in the main thread only: elsewhere nothing
    happens. To be called before a node is opened: that sees to it that a blocked call does not keep the signal waiting.
    """
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, _handler())


def _handler() -> _Handler:
    """A launcher asks all its ranks: who has nothing to tell goes on."""
    return partial(_dump, os.getpid() if MARK_VARIABLE in inherited() else 0)


def _dump(launched: int, number: int, _frame: FrameType | None) -> None:
    """Where no communicator is open, also in a forked child, the signal does what it would do without us; but for the
    process that a launcher has `launched`.
    """
    from nexar.collectives.flight_recorder import dump_all  # noqa: PLC0415  # loaded by whoever has a communicator

    if not dump_all("SIGUSR1") and os.getpid() != launched:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
