"""Threads that run functions of the user's: never the driving thread, which everything else waits for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic

from nexar.types import format_seconds

_log = logging.getLogger(__name__)


class Pool:
    """Threads of one communicator, made when they are needed. Close it: each ends as soon as what it runs returns.

    They are daemons: a function that never returns must not keep the process from ending.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []  # under the lock
        self._free = 0  # threads that nothing was handed to; under the lock
        self._closed = False  # under the lock

    def submit(self, task: Callable[[], None]) -> None:
        """A thread runs it, at once while there are fewer than the limit. It must not raise. After `close`: dropped."""
        with self._lock:
            if self._closed:
                return
            if self._free:
                self._free -= 1
            elif len(self._threads) < self._limit:
                self._start()
            self._tasks.put(task)

    def _start(self) -> None:
        number = len(self._threads) + 1
        thread = threading.Thread(target=self._work, name=f"{self._name}-{number}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # what it holds must not live until the next one comes
            with self._lock:
                self._free += 1

    def tell(self) -> None:
        """Every thread ends when what it runs has returned. Never blocks. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in self._threads:
                self._tasks.put(None)

    def close(self, patience: float) -> None:
        """Tell, and wait for them for so many seconds; the log names those that are still at it. Idempotent."""
        self.tell()
        deadline = monotonic() + patience
        others = [each for each in self._threads if each is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, deadline - monotonic()))
        late = [each.name for each in others if each.is_alive()]
        if late:
            _log.warning(
                "functions that others called have not returned within %s of the end of their communicator; "
                "they go on in %s, and nobody hears of their results",
                format_seconds(patience), ", ".join(late),
            )  # fmt: skip
