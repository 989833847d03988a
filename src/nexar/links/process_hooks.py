"""A signal handler of ours that stands before another one, and the question whether that may run now.

Each installation is an object of its own that knows whom it stands before. So a handler that a user puts before ours
may call ours, which goes on to the one before it, and ours may step before that user's again: the chain only ever
leads to older ones, and a user who puts an old handler back gets what stood there then.

Signals that came while the main thread was inside a verb of ours, and how each finds the first moment after it.

The interpreter tells a trace function of every line and call. So once a signal is late, and only then, we trace the
main thread: the next line outside our code, or the next call from there, is the moment. Where a debugger already
traces, a thread sends the signal again every few milliseconds instead, until one finds the main thread outside. (That
alone would not do: the main thread lets others run while it is in a system call, which in a program that only sends
is always inside a verb.)

Verbs take microseconds. If one is still not over after a second it is stuck, and a program that cannot be interrupted
is worse than a verb half done: then the handler runs after all.

Signals while the main thread waits, and so perhaps drives, or is inside a verb of a link or of a communicator.

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

The open nodes of this process: closed when the interpreter ends, abandoned in a forked child.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from _signal import getsignal  # type: ignore[import-not-found]  # that of `signal` is ten times as slow
from _thread import start_new_thread  # `threading` takes locks, which the interrupted thread may hold
from collections.abc import Callable
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, Final, Protocol

from nexar.links.operation import Waiter

SignalFunction = Callable[[int, FrameType | None], object]

_OURS: Final = ("nexar.links.", "nexar.group", "nexar.rpc.", "nexar.collectives.", "nexar.communicator.")
_BLOCKING: Final = "nexar.links.reconnect"  # waits for a thread of its own, for long, and leaves nothing half done


class WrappedHandler:
    """Stands before `before`, which `receive` hands the signal to at the right time."""

    __slots__ = ("_receive", "before", "number")

    def __init__(
        self, number: int, before: SignalFunction, receive: Callable[[WrappedHandler, FrameType], None]
    ) -> None:
        self.number = number
        self.before = before
        self._receive = receive

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The interpreter calls a handler right from the frame that it interrupts. Any other caller is a handler that
        stands before us, and runs now because its time has come.
        """
        if frame is not None and frame is sys._getframe(1):
            self._receive(self, frame)
        else:
            self.hand_over(frame)

    def hand_over(self, frame: FrameType | None) -> None:
        """Now. May raise whatever the user's handler raises."""
        self.before(self.number, frame)


_HANDING_OVER: Final[CodeType] = WrappedHandler.hand_over.__code__


def is_inside(frame: FrameType | None) -> bool:
    """Is a thread that is here in the middle of something of ours?

    The innermost frame of ours says so. Transports do their work below a frame of ours, too; without one they dial,
    which blocks and may be interrupted. And below a user's handler that we call, it is the user's code that runs.

    A verb of a communicator is ours from its first line to its last: a collective that has its number, and is not run
    yet, is half done as well, and the other ranks would wait for it.
    """
    while frame is not None:
        module: str = frame.f_globals.get("__name__", "")
        if module.startswith(_OURS):
            return frame.f_code is not _HANDING_OVER and module != _BLOCKING
        frame = frame.f_back
    return False


_AGAIN: Final = 0.01
_STUCK: Final = 1.0


class DeferredSignals:
    """What is late. Only the main thread writes, but for the echoes."""

    def __init__(self) -> None:
        self.late: dict[int, WrappedHandler] = {}
        """By signal number. Looked at by every wait that begins, so it is this one dict for ever."""
        self._since = 0.0
        self._echoes: set[int] = set()  # signals sent again; added by the thread that sends
        self._sending = False  # whether that thread runs; cleared by it

    def put_off(self, handler: WrappedHandler, frame: FrameType) -> bool:
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

    def take(self) -> list[WrappedHandler]:
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
    """Finds signals their moment. One for the process; only the main thread writes to it."""

    def __init__(self) -> None:
        self.pending: list[WrappedHandler] = []
        """Handlers to run as soon as nothing is under way in a wait. This one list for ever: who drives looks at it
        in every round.
        """
        self._main = threading.main_thread().ident
        self._entered = False
        self._waiting: tuple[Callable[[], None], Waiter] | None = None  # what ends the main thread's sleep, if it waits
        self._delay = DeferredSignals()
        self._late = self._delay.late

    # -- waits -----------------------------------------------------------------------------------------

    def begin(self, wake: Callable[[], None], waiter: Waiter) -> bool:
        """The calling thread begins to wait; `kick` ends its sleep if it leads. True in the main thread, which then
        must `end`.

        Handlers run in the main thread only, so the others need not care.
        """
        if get_ident() != self._main:
            return False
        if type(getsignal(_INTERRUPT)) is not WrappedHandler:  # never entered, or the user has a new handler since
            self._step_before_again()
        self._waiting = wake, waiter
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
            if isinstance(handler, WrappedHandler):
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
        if callable(handler) and not isinstance(handler, WrappedHandler):
            signal.signal(number, WrappedHandler(number, handler, self._receive))

    # -- signals ---------------------------------------------------------------------------------------

    def _receive(self, handler: WrappedHandler, frame: FrameType) -> None:
        if self._delay.is_echo(handler.number):
            return
        if self._waiting is not None:
            self._note(handler)
        elif not self._delay.put_off(handler, frame):
            handler.hand_over(frame)

    def _note(self, handler: WrappedHandler) -> None:
        if handler not in self.pending:
            self.pending.append(handler)
        if self._waiting is not None:
            wake, waiter = self._waiting
            wake()
            waiter.wake()


interrupts = SignalDeferral()


class OpenNode(Protocol):
    """What owns threads and connections (a Progress)."""

    def close(self) -> None:
        """Idempotent."""

    def abandon(self) -> None:
        """In a forked child, which has one thread: let go without waiting for anybody."""


_open_nodes: dict[int, OpenNode] = {}  # written by their makers and closers
_before_exit: list[Callable[[], None]] = []  # written at import


def node_opened(node: OpenNode) -> None:
    """At exit the hook registered last runs first: nodes must close before the packages that they stand on."""
    _open_nodes[id(node)] = node
    atexit.unregister(_close_all)
    atexit.register(_close_all)
    interrupts.enter()


def node_closed(node: OpenNode) -> None:
    """It needs nothing any more; with the last one our signal handlers go."""
    _open_nodes.pop(id(node), None)
    if not _open_nodes:
        interrupts.leave()


def before_exit(action: Callable[[], None]) -> None:
    """At exit call this while the open nodes still work: a hook of its own may run too late."""
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
