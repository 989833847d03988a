"""The threads that tell torch's futures that their work is done.

What hangs on a future runs in the thread that completes it: code of the user's, which may compute, and may wait for
another future. So it must not be the thread that drives the node, and there must always be one more thread than there
are that wait. A thread takes one finished work at a time; before it goes on with it, it sees to it that another one is
there for the next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

_IDLE: Final = 2  # threads kept while nothing is to be done: none has to be started then for work that does not wait

Task = Callable[[], None]


class Completion:
    """Runs tasks, each at once and in a thread of its own. Whoever made it closes it."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()  # None: the end, which each thread leaves for the next
        self._lock = threading.Lock()
        self._idle = 0  # threads that wait for a task; under the lock
        self._threads: set[threading.Thread] = set()  # all that live; under the lock

    def hand_over(self, task: Task) -> None:
        """Never blocks, and takes no lock: from any thread, whatever it holds. `open()` was called before."""
        self._tasks.put(task)

    def open(self) -> None:
        """Have a thread ready for what will be handed over."""
        if self._idle == 0:
            self._start_one()

    def close(self) -> None:
        """What was handed over before is still done; wait for it, but not for the thread that calls this."""
        self._tasks.put(None)
        while others := self._others():
            for thread in others:
                thread.join()

    def _others(self) -> list[threading.Thread]:
        """Those that live: a forked child has none of its parent's threads, and nobody there takes them off the set."""
        with self._lock:
            return [each for each in self._threads if each.is_alive() and each is not threading.current_thread()]

    def _start_one(self) -> None:
        with self._lock:
            if self._idle:
                return
            self._idle += 1
            thread = threading.Thread(target=self._serve, name="nexar-torch-futures", daemon=True)
            self._threads.add(thread)
            thread.start()  # here, so that nobody sees a thread that cannot be joined yet

    def _serve(self) -> None:
        try:
            while True:
                task = self._tasks.get()
                with self._lock:
                    self._idle -= 1
                if task is None:
                    self._tasks.put(None)
                    return
                self._start_one()
                task()
                with self._lock:
                    if self._idle >= _IDLE:
                        return
                    self._idle += 1
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())
