"""Signals that came while the main thread was inside a verb of ours, and how each finds the first moment after it.

The interpreter tells a trace function of every line and call. So once a signal is late, and only then, we trace the
main thread: the next line outside our code, or the next call from there, is the moment. Where a debugger already
traces, a thread sends the signal again every few milliseconds instead, until one finds the main thread outside. (That
alone would not do: the main thread lets others run while it is in a system call, which in a program that only sends
is always inside a verb.)

Verbs take microseconds. If one is still not over after a second it is stuck, and a program that cannot be interrupted
is worse than a verb half done: then the handler runs after all.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from _thread import start_new_thread  # `threading` takes locks, which the interrupted thread may hold
from types import FrameType
from typing import Any, Final

from nexar.links.handler import Handler, is_inside

_AGAIN: Final = 0.01
_STUCK: Final = 1.0


class Delay:
    """What is late. Only the main thread writes, but for the echoes."""

    def __init__(self) -> None:
        self.late: dict[int, Handler] = {}
        """By signal number. Looked at by every wait that begins, so it is this one dict for ever."""
        self._since = 0.0
        self._echoes: set[int] = set()  # signals sent again; added by the thread that sends
        self._sending = False  # whether that thread runs; cleared by it

    def put_off(self, handler: Handler, frame: FrameType) -> bool:
        """Is `frame` inside our code? Then the handler's time will come. False: it is now."""
        stuck = bool(self.late) and time.monotonic() - self._since > _STUCK
        if stuck or not is_inside(frame):
            self.late.pop(handler.number, None)
            return False
        if not self.late:
            self._since = time.monotonic()
        self.late.setdefault(handler.number, handler)
        self._trace(frame)
        self._send_again()
        return True

    def is_echo(self, number: int) -> bool:
        """Was this signal sent again by us although its handler has run meanwhile?"""
        if number not in self._echoes:
            return False
        self._echoes.discard(number)
        return number not in self.late

    def take(self) -> list[Handler]:
        """Nothing is late any more: the caller sees to these."""
        handlers = list(self.late.values())
        self.late.clear()
        if sys.gettrace() == self._step:
            sys.settrace(None)
        return handlers

    def forked(self) -> None:
        """In a forked child: what is late is the parent's, and the thread that sends is not here."""
        self.take()
        self._echoes.clear()
        self._sending = False

    # -- by tracing ------------------------------------------------------------------------------------

    def _trace(self, frame: FrameType) -> None:
        if sys.gettrace() is not None:
            return
        outside: FrameType | None = frame
        while outside is not None and is_inside(outside):
            outside = outside.f_back
        if outside is not None:
            outside.f_trace = self._step
        sys.settrace(self._step)

    def _step(self, frame: FrameType, event: str, _: Any) -> None:
        """Is this the moment? A call that is just made has done nothing yet: what counts is where it came from."""
        if self.late and is_inside(frame.f_back if event == "call" else frame):
            return
        frame.f_trace = None
        for handler in self.take():
            handler.hand_over(frame)

    # -- by sending again ------------------------------------------------------------------------------

    def _send_again(self) -> None:
        """To this thread, the main one: a signal for the process might not end the system call that it sleeps in."""
        if not self._sending:
            self._sending = True
            start_new_thread(self._send_until_heard, (threading.get_ident(),))

    def _send_until_heard(self, main: int) -> None:
        while self.late:
            time.sleep(_AGAIN)
            for number in list(self.late):
                self._echoes.add(number)
                signal.pthread_kill(main, number)
        self._sending = False
