"""Ctrl-C while the main thread waits, and so perhaps drives.

A signal handler may raise between any two instructions of the main thread. If that thread is just dispatching a frame,
or taking the lead, the frame would be half delivered, or the lead lost. So while the main thread waits, the handler
that was there before us is put off: the signal is noted, the wait is woken, and the handler runs (and raises, if it
likes) when nothing is under way. At all other times it runs at once, as if we were not here.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


class Interrupts:
    """Puts SIGINT off while the main thread waits. One for the process; only the main thread writes to it."""

    def __init__(self) -> None:
        self.pending = False  # a signal was put off
        self._main = threading.main_thread().ident
        self._installed = False
        self._handler: Handler | None = None  # who was there before us
        self._wake: tuple[Callable[[], None], ...] = ()  # what ends the main thread's sleep, while it waits

    def begin(self, *wake: Callable[[], None]) -> bool:
        """The calling thread begins to wait, and `wake` ends its sleep. True in the main thread, which then must `end`.

        Handlers run in the main thread only, so the others need not care.
        """
        if threading.get_ident() != self._main:
            return False
        if not self._installed:
            self._install()
        self._wake = wake
        return True

    def end(self) -> None:
        """The main thread waits no more: what was put off happens now."""
        self._wake = ()
        if self.pending:
            self.settle()

    def settle(self) -> None:
        """Nothing is under way in the main thread: run the handler that was put off, if any."""
        if self.pending:
            self.pending = False
            if self._handler is not None:
                self._handler(signal.SIGINT, None)

    def forked(self) -> None:
        """In a forked child, the thread that forked is the main thread."""
        self._main = threading.main_thread().ident
        self._wake = ()
        self.pending = False

    def _install(self) -> None:
        """Step before a handler written in Python, which is what raises KeyboardInterrupt; leave any other alone."""
        self._installed = True
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._wake:
            self.pending = True
            for wake in self._wake:
                wake()
        elif self._handler is not None:
            self._handler(number, frame)


interrupts = Interrupts()
os.register_at_fork(after_in_child=interrupts.forked)
