"""Leaves the cluster when the interpreter exits and the program has not closed its communicator.

A program that ends, or calls `sys.exit`, leaves as `close()` does: messages that were sent arrive, sends that were
started get time to end, and the other ranks are told. An exit handler cannot see the exit code; the launcher reports
it. An uncaught exception of the main thread is in `sys.last_value`, whatever `sys.excepthook` is, and the other ranks
are told of it with its traceback.

A thread that is started by `init()` does the leaving: from Python 3.12 on no thread can be started during exit, and an
exit handler that waits for a thread can stop waiting.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Final, TypeAlias

from nexar.errors import NexarError
from nexar.links import nodes

_log = logging.getLogger(__name__)

EXIT_TIMEOUT: Final = 5.0
"""Seconds for all nodes of the process to leave."""

Leave: TypeAlias = Callable[[BaseException | None], None]
"""Leaves the cluster because of this exception; None: the program has ended well, as far as can be seen."""


class ExitLeaver:
    """Leaves for one node at exit. `cancel` it when the node is closed before. Any thread."""

    def __init__(self, leave: Leave) -> None:
        self._leave = leave
        self._wake = threading.Event()
        self._cancelled = False  # written before `_wake` is set
        self._error: BaseException | None = None  # likewise
        self._thread = threading.Thread(target=self._run, name="nexar-exit", daemon=True)
        self._thread.start()
        _leavers[id(self)] = self

    def cancel(self) -> None:
        """The node is closed, or is being closed. Idempotent."""
        _leavers.pop(id(self), None)
        if not self._wake.is_set():
            self._cancelled = True
            self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(EXIT_TIMEOUT)

    def begin(self, error: BaseException | None) -> None:
        """The interpreter exits: leave now, in the thread."""
        self._error = error
        self._wake.set()

    def has_left(self, deadline: float) -> bool:
        """Whether the node has left by then (time.monotonic)."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._wake.wait()
        if self._cancelled:
            return
        try:
            self._leave(self._error)
        except Exception as error:  # noqa: BLE001  # nobody is left who could catch it: the process ends
            _log.warning("this rank could not leave the cluster at exit: %s", error)


_leavers: Final[dict[int, ExitLeaver]] = {}
"""Of this process, by id. Each method of a dict is atomic."""


def _leave_all() -> None:
    """At exit, before the nodes lose their threads."""
    leavers = list(_leavers.values())
    if not leavers:
        return
    threading.excepthook = _quiet(threading.excepthook)
    deadline, error = time.monotonic() + EXIT_TIMEOUT, _uncaught()
    for leaver in leavers:
        leaver.begin(error)
    try:
        late = [leaver for leaver in leavers if not leaver.has_left(deadline)]
    except KeyboardInterrupt:
        return  # the user does not want to wait
    if late:
        _log.warning("this rank exits; other ranks have not taken all that it sent within %g s", EXIT_TIMEOUT)


def _uncaught() -> BaseException | None:
    """The exception that ended the main thread. The prompt of an interactive interpreter goes on after one."""
    interactive = hasattr(sys, "ps1") or sys.flags.interactive
    return None if interactive else getattr(sys, "last_value", None)


def _quiet(hook: Callable[[threading.ExceptHookArgs], object]) -> Callable[[threading.ExceptHookArgs], object]:
    """As `threading.excepthook`. The exit ends the calls of daemon threads, which is no failure of the program."""

    def report(arguments: threading.ExceptHookArgs) -> None:
        daemon = arguments.thread is not None and arguments.thread.daemon
        if daemon and isinstance(arguments.exc_value, NexarError):
            _log.debug("a call of a daemon thread ended with the process: %s", arguments.exc_value)
        else:
            hook(arguments)

    return report


nodes.before_exit(_leave_all)
os.register_at_fork(after_in_child=_leavers.clear)  # in a forked child the nodes are the parent's
