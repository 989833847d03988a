"""SIGUSR1 makes the flight recorder write what this process is doing."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType


def listen() -> None:
    """From now on, unless SIGUSR1 means something already. Handlers are set in the main thread only: elsewhere nothing
    happens. To be called before a node is opened: that sees to it that a blocked call does not keep the signal waiting.
    """
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, _dump)


def _dump(number: int, _frame: FrameType | None) -> None:
    """Where no communicator is open, also in a forked child, the signal does what it would do without us."""
    from nexar.collectives.black_box import dump_all  # noqa: PLC0415  # loaded by whoever has a communicator

    if not dump_all("SIGUSR1"):
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
