"""Ctrl-C while the main thread waits, and so perhaps drives.

A signal handler may raise between any two instructions of the main thread. If that thread is just dispatching a frame,
or taking the lead, the frame would be half delivered, or the lead lost. So while the main thread waits, the handler
that was there before us is put off: the signal is noted, the wait is woken, and the handler runs (and raises, if it
likes) when nothing is under way. At all other times it runs at once, as if we were not here.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


class Interrupts:
    """Puts SIGINT off while the main thread waits. One for the process."""

    def __init__(self) -> None:
        self._handler: Handler | None = None  # who was there before us; written by the main thread
        self._wake: Callable[[], None] | None = None  # set while the main thread waits; written by the main thread
        self.pending = False  # a signal was put off; written by the main thread (handlers run there)

    def begin(self, wake: Callable[[], None]) -> None:
        """The calling thread begins to wait; `wake` ends its sleep. Signals only ever arrive in the main thread."""
        if threading.get_ident() == threading.main_thread().ident:
            if self._handler is None:
                self._install()
            self._wake = wake

    def end(self) -> None:
        """It waits no more: what was put off happens now."""
        if self._wake is not None and threading.get_ident() == threading.main_thread().ident:
            self._wake = None
            self.settle()

    def settle(self) -> None:
        """Nothing is under way: run the handler that was put off, if any."""
        if self.pending:
            self.pending = False
            if self._handler is not None:
                self._handler(signal.SIGINT, None)

    def _install(self) -> None:
        """Step before a handler written in Python, which is what raises KeyboardInterrupt; leave any other alone."""
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._wake is not None:
            self.pending = True
            self._wake()
        elif self._handler is not None:
            self._handler(number, frame)


interrupts = Interrupts()
