"""A bounded pool of threads for blocking work, such as dials and name lookups.

A task must not wait for another task of its pool: with all threads taken, neither would end. So the attempts of a dial
run in their own threads.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Final

from nexar.cluster.control_loop import DialCancelled

_log = logging.getLogger(__name__)

IDLE_SECONDS: Final = 1.0  # an idle thread ends after this time


class Priority(IntEnum):
    """The order in which tasks get a thread."""

    PROBE = 0  # name lookups and redials of probes: all members wait for the result
    CONTROL = 1  # control messages, such as votes, that need a dial first
    BACKGROUND = 2  # everything that may wait behind slow dials


class TaskPool:
    """Runs tasks in at most `size` threads, which start when needed and end when idle. Any thread. Close it.

    BACKGROUND tasks never take the last `reserved` threads, so unreachable hosts, which block a thread until its
    timeout, cannot delay these steps of probes, or votes.
    """

    def __init__(self, name: str, size: int, *, reserved: int = 0, idle_seconds: float = IDLE_SECONDS) -> None:
        self._name = name
        self._size = size
        self._background_size = size - reserved
        self._idle_seconds = idle_seconds
        self._owner = os.getpid()
        self._numbers = itertools.count()
        # Guards everything below. Reentrant: a finaliser that the garbage collector runs may submit.
        self._changed = threading.Condition()
        self._waiting: list[tuple[Priority, int, Callable[[], None]]] = []  # heap; the number keeps the order
        self._threads: dict[int, threading.Thread] = {}  # by number
        self._idle = 0  # threads without a task
        self._background = 0  # running BACKGROUND tasks
        self._closed = False

    @property
    def threads(self) -> int:
        with self._changed:
            return len(self._threads)

    def submit(self, task: Callable[[], None], priority: Priority = Priority.BACKGROUND) -> None:
        """Run it soon. It must end when the node closes; its exceptions are logged. Dropped when the pool is closed,
        and in a forked child. Never blocks. Raises RuntimeError if no thread runs and none can be started.
        """
        if os.getpid() != self._owner:
            return
        with self._changed:
            if self._closed:
                return
            heapq.heappush(self._waiting, (priority, next(self._numbers), task))
            self._changed.notify()
            if len(self._waiting) > self._idle and len(self._threads) < self._size and self._has_task:
                self._start()

    def try_submit(self, task: Callable[[], None], otherwise: str, priority: Priority = Priority.BACKGROUND) -> bool:
        """As `submit`. False if no thread can be started; then `otherwise`, the consequence, is logged with the cause.
        For callers that others depend on, such as the driver.
        """
        try:
            self.submit(task, priority)
        except RuntimeError as error:
            _log.warning("%s: %s", otherwise, error)
            return False
        return True

    def close(self) -> None:
        """Drop waiting tasks and wait for running ones. Idempotent."""
        if os.getpid() != self._owner:
            return
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
            threads = list(self._threads.values())
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _start(self) -> None:
        """Under the condition, so that `close` finds the thread."""
        number = next(number for number in itertools.count(1) if number not in self._threads)
        thread = threading.Thread(target=self._run, args=(number,), name=f"{self._name}-{number}", daemon=True)
        self._threads[number] = thread
        try:
            thread.start()
        except RuntimeError:
            del self._threads[number]
            if not self._threads:
                self._waiting.clear()
                raise

    @property
    def _has_task(self) -> bool:
        """Whether the first task may run now. Under the condition."""
        if not self._waiting:
            return False
        return self._waiting[0][0] != Priority.BACKGROUND or self._background < self._background_size

    def _run(self, number: int) -> None:
        while self._run_next(number):
            pass

    def _run_next(self, number: int) -> bool:
        """False ends the thread. A separate function, so that an idle thread keeps no task alive."""
        taken = self._take(number)
        if taken is None:
            return False
        priority, task = taken
        try:
            task()
        except DialCancelled:
            pass  # the node closes: the result is not needed
        except Exception:  # noqa: BLE001 - thread boundary: the log has the traceback
            _log.exception("a task of %s raised", self._name)
        with self._changed:
            self._background -= priority == Priority.BACKGROUND
        return True

    def _take(self, number: int) -> tuple[Priority, Callable[[], None]] | None:
        """None ends the thread."""
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._closed or self._has_task, self._idle_seconds)
            self._idle -= 1
            if not self._has_task:
                del self._threads[number]
                return None
            priority, _, task = heapq.heappop(self._waiting)
            self._background += priority == Priority.BACKGROUND
            return priority, task
