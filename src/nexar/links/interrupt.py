"""Signals while the main thread waits, and so perhaps drives, or is inside a verb of a link or of a communicator.

A signal handler written in Python may raise between any two instructions of the main thread, as Ctrl-C does. If that
thread is just dispatching a frame, taking the lead or sending, the frame would be half delivered, the lead lost, or a
message counted that never left; a collective would have its number, and nobody would run it or give it up. So while a
node is open we stand before such handlers. During a wait the signal is noted, the wait is woken, and the handler runs
(and raises, if it likes) when nothing is under way. Inside a verb it is put off until the verb waits or has returned
(see delay). At all other times it runs at once, as if we were not here. A verb pays nothing for that: what the main
thread is doing is read off its stack when a signal comes.

Which     `SIGNALS`, if their handler is written in Python when a node is opened in the main thread (or, if none was,
          at the main thread's first wait). Others, and handlers for others than SIGINT that are set later, are not
          stood before: such a handler had better not raise. SIGINT is looked at again at every wait.
Replaced  A handler that the user sets while a node is open is respected: until the next wait it runs at once, from
          then on we stand before it. It may call ours, or put ours back.
Given     back with the last node, if that is closed in the main thread; else ours stays and does nothing but hand
back      over.
asyncio   `asyncio.run` cancels its main task on Ctrl-C only if it finds Python's own handler. If it runs while a node
          is open it finds ours; then Ctrl-C raises KeyboardInterrupt inside the loop (as before Python 3.11), and
          asyncio.run cancels all tasks on its way out. A node that is opened inside `asyncio.run` changes nothing: we
          stand before its handler.
"""

from __future__ import annotations

import signal
import sys
import threading
from _signal import getsignal  # type: ignore[import-not-found]  # that of `signal` is ten times as slow
from collections.abc import Callable
from threading import get_ident
from types import FrameType
from typing import Any, Final

from nexar.links.delay import Delay
from nexar.links.handler import Handler
from nexar.links.waiter import Waiter

SIGNALS: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGALRM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)

_INTERRUPT: Final = int(signal.SIGINT)


class Interrupts:
    """Finds signals their moment. One for the process; only the main thread writes to it."""

    def __init__(self) -> None:
        self.pending: list[Handler] = []
        """Handlers to run as soon as nothing is under way in a wait. This one list for ever: who drives looks at it
        in every round.
        """
        self._main = threading.main_thread().ident
        self._entered = False
        self._waiting: tuple[Callable[[], None], Waiter] | None = None  # what ends the main thread's sleep, if it waits
        self._delay = Delay()
        self._late = self._delay.late

    # -- waits -----------------------------------------------------------------------------------------

    def begin(self, kick: Callable[[], None], waiter: Waiter) -> bool:
        """The calling thread begins to wait; `kick` ends its sleep if it leads. True in the main thread, which then
        must `end`.

        Handlers run in the main thread only, so the others need not care.
        """
        if get_ident() != self._main:
            return False
        if type(getsignal(_INTERRUPT)) is not Handler:  # never entered, or the user has a new handler since
            self._step_before_again()
        self._waiting = kick, waiter
        if self._late:  # it came on the way here, and can be dealt with now
            for handler in self._delay.take():
                self._note(handler)
        return True

    def end(self) -> None:
        """The main thread waits no more: what was noted happens now."""
        self._waiting = None
        if self.pending:
            self.settle()

    def settle(self) -> None:
        """Nothing is under way in the main thread: run the handlers that were noted. They may wait in their turn."""
        waiting, self._waiting = self._waiting, None
        try:
            while self.pending:
                self.pending.pop(0).hand_over(sys._getframe(1))
        finally:
            self._waiting = waiting

    # -- installing ------------------------------------------------------------------------------------

    def enter(self) -> None:
        """A node is opened. Handlers can be set in the main thread only; elsewhere its next wait will do it."""
        if get_ident() == self._main:
            self._entered = True
            for number in SIGNALS:
                self._step_before(number)

    def leave(self) -> None:
        """No node is open: whom we stood before gets its place back, unless somebody else has taken it meanwhile."""
        if get_ident() != self._main:
            return
        self._entered = False
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if isinstance(handler, Handler):
                signal.signal(number, handler.before)

    def forked(self) -> None:
        """In a forked child, the thread that forked is the main thread, and no node is open."""
        self._main = threading.main_thread().ident
        self._waiting = None
        self.pending.clear()
        self._delay.forked()
        self.leave()

    def _step_before_again(self) -> None:
        if self._entered:
            self._step_before(signal.SIGINT)
        else:
            self.enter()

    def _step_before(self, number: int) -> None:
        """Only a handler written in Python can raise; leave any other alone."""
        handler: Any = signal.getsignal(number)
        if callable(handler) and not isinstance(handler, Handler):
            signal.signal(number, Handler(number, handler, self._receive))

    # -- signals ---------------------------------------------------------------------------------------

    def _receive(self, handler: Handler, frame: FrameType) -> None:
        if self._delay.is_echo(handler.number):
            return
        if self._waiting is not None:
            self._note(handler)
        elif not self._delay.put_off(handler, frame):
            handler.hand_over(frame)

    def _note(self, handler: Handler) -> None:
        if handler not in self.pending:
            self.pending.append(handler)
        if self._waiting is not None:
            kick, waiter = self._waiting
            kick()
            waiter.wake()


interrupts = Interrupts()
