"""Signals deferred to a safe point, exit and fork hooks, and the open nodes of this process.

A Python signal handler may raise between any two instructions of the main thread, as Ctrl-C does. In the middle of our
code, that would deliver half a frame, lose the driver lock, or number a message or collective without sending it. So
while a node is open, our handlers wrap the user's:

- During a wait, the signal is recorded and wakes the waiting thread. The handler runs, and may raise, once nothing is
  in progress.
- Inside an operation, the handler is deferred until the operation waits or returns.
- Otherwise it runs at once.

Operations pay nothing for this: our handler reads the main thread's stack. A deferred signal traces the main thread:
the next line or call outside our code is the safe point. If a debugger already traces, a thread resends the signal
until one arrives outside. After a second the handler runs anyway: a program that cannot be interrupted is worse.

`SIGNALS` are wrapped if their handler is in Python when a node opens in the main thread, or at its first wait. Handlers
set later are not wrapped and should not raise, except SIGINT, which every wait checks. The last node restores the
handlers if it closes in the main thread; otherwise ours only forward. A wrapper knows the handler that it replaced, so
a chain always leads to older ones.

`asyncio.run` cancels its main task on Ctrl-C only if it finds Python's default handler. With ours, Ctrl-C raises
KeyboardInterrupt inside the loop.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from _signal import getsignal  # type: ignore[import-not-found]  # signal.getsignal is ten times as slow
from _thread import start_new_thread  # `threading` takes locks, which the interrupted thread may hold
from collections.abc import Callable
from threading import get_ident
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final

from nexar.links.operation import Waiter

if TYPE_CHECKING:
    from nexar.links.progress import Progress

SignalFunction = Callable[[int, FrameType | None], object]

_OURS: Final = ("nexar.links.", "nexar.group", "nexar.rpc.", "nexar.collectives.", "nexar.communicator.")


class WrappedHandler:
    """Wraps a handler; `receive` decides when that runs."""

    __slots__ = ("_receive", "number", "wrapped")

    def __init__(
        self, number: int, wrapped: SignalFunction, receive: Callable[[WrappedHandler, FrameType], None]
    ) -> None:
        self.number = number
        self.wrapped = wrapped
        self._receive = receive

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The interpreter calls from the interrupted frame. Any other caller is a handler that wraps ours: run now."""
        if frame is not None and frame is sys._getframe(1):
            self._receive(self, frame)
        else:
            self.run_wrapped(frame)

    def run_wrapped(self, frame: FrameType | None) -> None:
        """May raise."""
        self.wrapped(self.number, frame)


_RUN_WRAPPED: Final[CodeType] = WrappedHandler.run_wrapped.__code__


def is_inside(frame: FrameType | None) -> bool:
    """Whether a thread at `frame` is in the middle of an operation.

    Our innermost frame decides. A transport without one is dialing, which may be interrupted. Below a handler that we
    call, user code runs. Communicator methods count entirely: other ranks would wait for a numbered collective.
    """
    while frame is not None:
        module: str = frame.f_globals.get("__name__", "")
        if module.startswith(_OURS):
            return frame.f_code is not _RUN_WRAPPED
        frame = frame.f_back
    return False


_RESEND_INTERVAL: Final = 0.01
_STUCK_AFTER: Final = 1.0


class DeferredSignals:
    """Signals that wait for a safe point. Only the main thread writes, except `_resent`."""

    def __init__(self) -> None:
        # by signal number; every wait reads it, so it is always the same dict
        self.handlers: dict[int, WrappedHandler] = {}
        self._since = 0.0
        self._resent: set[int] = set()  # signals sent again; the sending thread adds
        self._sending = False  # whether that thread runs; it clears this

    def defer(self, handler: WrappedHandler, frame: FrameType) -> bool:
        """Defer if `frame` is inside our code. Return False if the handler must run now."""
        stuck = bool(self.handlers) and time.monotonic() - self._since > _STUCK_AFTER
        if stuck or not is_inside(frame):
            self.handlers.pop(handler.number, None)
            return False
        if not self.handlers:
            self._since = time.monotonic()
        self.handlers.setdefault(handler.number, handler)
        self._trace(frame)
        self._resend()
        return True

    def is_resent(self, number: int) -> bool:
        """Whether it was resent although its handler has run."""
        if number not in self._resent:
            return False
        self._resent.discard(number)
        return number not in self.handlers

    def take(self) -> list[WrappedHandler]:
        handlers = list(self.handlers.values())
        self.handlers.clear()
        if sys.gettrace() == self._trace_step:
            sys.settrace(None)
        return handlers

    def forked(self) -> None:
        """The signals are the parent's, and the sending thread does not exist here."""
        self.take()
        self._resent.clear()
        self._sending = False

    # -- by tracing ------------------------------------------------------------------------------------

    def _trace(self, frame: FrameType) -> None:
        if sys.gettrace() is not None:
            return
        outside: FrameType | None = frame
        while outside is not None and is_inside(outside):
            outside = outside.f_back
        if outside is not None:
            outside.f_trace = self._trace_step
        sys.settrace(self._trace_step)

    def _trace_step(self, frame: FrameType, event: str, _: Any) -> None:
        """Run the handlers at a safe point. For a call, the caller's frame decides: the callee has done nothing yet."""
        if self.handlers and is_inside(frame.f_back if event == "call" else frame):
            return
        frame.f_trace = None
        for handler in self.take():
            handler.run_wrapped(frame)

    # -- by sending again ------------------------------------------------------------------------------

    def _resend(self) -> None:
        """Signal the main thread: a signal to the process might not interrupt its system call."""
        if not self._sending:
            self._sending = True
            start_new_thread(self._resend_loop, (threading.get_ident(),))

    def _resend_loop(self, main: int) -> None:
        while self.handlers:
            time.sleep(_RESEND_INTERVAL)
            for number in list(self.handlers):
                self._resent.add(number)
                signal.pthread_kill(main, number)
        self._sending = False


SIGNALS: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGALRM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)

_INTERRUPT: Final = int(signal.SIGINT)


class SignalDeferral:
    """Decides when handlers run. One per process; only the main thread writes."""

    def __init__(self) -> None:
        # handlers to run once nothing is in progress; always the same list, which the driver reads in every round
        self.pending: list[WrappedHandler] = []
        self._main = threading.main_thread().ident
        self._entered = False
        self._waiting: tuple[Callable[[], None], Waiter] | None = None  # how to wake the main thread if it waits
        self._deferred = DeferredSignals()
        self._deferred_handlers = self._deferred.handlers

    # -- waits -----------------------------------------------------------------------------------------

    def begin(self, wake: Callable[[], None], waiter: Waiter) -> bool:
        """Begin a wait; `wake` ends its sleep if it drives. Return True in the main thread, which must call `end`."""
        if get_ident() != self._main:
            return False
        if type(getsignal(_INTERRUPT)) is not WrappedHandler:  # never entered, or the user has set a new handler
            self._wrap_again()
        self._waiting = wake, waiter
        if self._deferred_handlers:  # it came just before, and can be handled now
            for handler in self._deferred.take():
                self._record(handler)
        return True

    def end(self) -> None:
        self._waiting = None
        if self.pending:
            self.settle()

    def settle(self) -> None:
        """Run recorded handlers. They may wait too."""
        waiting, self._waiting = self._waiting, None
        try:
            while self.pending:
                self.pending.pop(0).run_wrapped(sys._getframe(1))
        finally:
            self._waiting = waiting

    # -- installing ------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Wrap the handlers. Only the main thread can; from another thread, its next wait does."""
        if get_ident() == self._main:
            self._entered = True
            for number in SIGNALS:
                self._wrap(number)

    def leave(self) -> None:
        """Restore the handlers, unless replaced meanwhile."""
        if get_ident() != self._main:
            return
        self._entered = False
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if isinstance(handler, WrappedHandler):
                signal.signal(number, handler.wrapped)

    def forked(self) -> None:
        """The forking thread is the main thread now, and no node is open."""
        self._main = threading.main_thread().ident
        self._waiting = None
        self.pending.clear()
        self._deferred.forked()
        self.leave()

    def _wrap_again(self) -> None:
        if self._entered:
            self._wrap(signal.SIGINT)
        else:
            self.enter()

    def _wrap(self, number: int) -> None:
        """Wrap only Python handlers: others cannot raise."""
        handler: Any = signal.getsignal(number)
        if callable(handler) and not isinstance(handler, WrappedHandler):
            signal.signal(number, WrappedHandler(number, handler, self._receive))

    # -- signals ---------------------------------------------------------------------------------------

    def _receive(self, handler: WrappedHandler, frame: FrameType) -> None:
        if self._deferred.is_resent(handler.number):
            return
        if self._waiting is not None:
            self._record(handler)
        elif not self._deferred.defer(handler, frame):
            handler.run_wrapped(frame)

    def _record(self, handler: WrappedHandler) -> None:
        if handler not in self.pending:
            self.pending.append(handler)
        if self._waiting is not None:
            wake, waiter = self._waiting
            wake()
            waiter.wake()


interrupts = SignalDeferral()


_open_nodes: dict[int, Progress] = {}  # written by the opening and closing threads
_before_exit: list[Callable[[], None]] = []  # written at import


def node_opened(node: Progress) -> None:
    """Register the exit hook again. The last one runs first, so nodes close before the packages that they use."""
    _open_nodes[id(node)] = node
    atexit.unregister(_close_all)
    atexit.register(_close_all)
    interrupts.enter()


def node_closed(node: Progress) -> None:
    """The last node restores the signal handlers."""
    _open_nodes.pop(id(node), None)
    if not _open_nodes:
        interrupts.leave()


def before_exit(action: Callable[[], None]) -> None:
    """Call `action` at exit while nodes still work: its own exit hook might be too late."""
    _before_exit.append(action)


def _close_all() -> None:
    for action in _before_exit:
        action()
    for node in list(_open_nodes.values()):
        node.close()


def _abandon_all() -> None:
    for node in list(_open_nodes.values()):
        node.abandon()
    _open_nodes.clear()
    interrupts.forked()


os.register_at_fork(after_in_child=_abandon_all)
