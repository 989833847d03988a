"""Ctrl-C while the main thread waits, and so perhaps drives, or is inside a verb of a link.

A signal handler may raise between any two instructions of the main thread. If that thread is just dispatching a frame,
taking the lead or sending, the frame would be half delivered, the lead lost, or a message counted that never left. So
meanwhile the handler that was there before us is put off: the signal is noted, a wait is woken, and the handler runs
(and raises, if it likes) when nothing is under way. At all other times it runs at once, as if we were not here.
"""

from __future__ import annotations

import os
import signal
import threading
from _signal import getsignal  # type: ignore[import-not-found]  # that of `signal` is ten times as slow
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import ParamSpec, TypeVar

Handler = Callable[[int, FrameType | None], object]
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Interrupts:
    """Puts SIGINT off while the main thread is busy here. One for the process; only the main thread writes to it."""

    def __init__(self) -> None:
        self.pending = False  # a signal was put off
        self._main = threading.main_thread().ident
        self._installed = False
        self._ours = self._receive  # one object, to be known again
        self._handler: Handler | None = None  # who was there before us
        self._wake: tuple[Callable[[], None], ...] = ()  # what ends the main thread's sleep, while it waits
        self._held = 0  # verbs under way in the main thread, one inside the other

    def begin(self, *wake: Callable[[], None]) -> bool:
        """The calling thread begins to wait, and `wake` ends its sleep. True in the main thread, which then must `end`.

        Handlers run in the main thread only, so the others need not care.
        """
        if threading.get_ident() != self._main:
            return False
        if getsignal(signal.SIGINT) is not self._ours:  # never installed, or the user has a new handler since
            self._install()
        self._wake = wake
        return True

    def end(self) -> None:
        """The main thread waits no more: what was put off happens now."""
        self._wake = ()
        if self.pending:
            self.settle()

    def hold(self) -> bool:
        """A verb begins, perhaps within a wait. True in the main thread, which then must `release`."""
        if threading.get_ident() != self._main:
            return False
        if not self._installed:
            self._install()
        self._held += 1
        return True

    def release(self) -> None:
        """The verb is over; if it was the outermost thing, what was put off happens now."""
        self._held -= 1
        if self.pending and not self._held and not self._wake:
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
        self._held = 0
        self.pending = False

    def _install(self) -> None:
        """Step before a handler written in Python, which is what raises KeyboardInterrupt; leave any other alone."""
        self._installed = True
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._ours)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._wake or self._held:
            self.pending = True
            for wake in self._wake:
                wake()
        elif self._handler is not None:
            self._handler(number, frame)


interrupts = Interrupts()


def uninterrupted(verb: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """A verb that Ctrl-C does not leave half done."""

    @wraps(verb)
    def whole(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if not interrupts.hold():
            return verb(*args, **kwargs)
        try:
            return verb(*args, **kwargs)
        finally:
            interrupts.release()

    return whole


os.register_at_fork(after_in_child=interrupts.forked)
