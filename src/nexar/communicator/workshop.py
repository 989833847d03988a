"""Threads that make successors, one for each branch: who waits in one for a member that does not come, or has closed
that communicator, keeps no other waiting.

So many at once, and those with the lowest ids first, on every member: two members that have more to make than that do
not wait for each other in different ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from nexar.communicator.branch import Branch

AT_ONCE: Final = 16


class Workshop:
    """Of one node. Under the lock of who has it, but for `close`. Each thread ends by itself."""

    def __init__(self, changed: threading.Condition) -> None:
        """`changed`: the lock, and who is notified when a thread has ended."""
        self._changed = changed
        self._threads: dict[Branch, threading.Thread] = {}

    @property
    def is_full(self) -> bool:
        """No other can be made now."""
        return len(set(self._threads.values())) >= AT_ONCE

    def is_at(self, branch: Branch) -> bool:
        """Whether a thread is at this one."""
        return branch in self._threads

    def start(self, branch: Branch, make: Callable[[], None]) -> None:
        """A thread calls `make`, without the lock. It must not raise."""

        def run() -> None:
            try:
                make()
            finally:
                with self._changed:
                    mine = threading.current_thread()
                    self._threads = {each: thread for each, thread in self._threads.items() if thread is not mine}
                    self._changed.notify_all()

        name = f"nexar-successor-{branch.communicator}"
        thread = self._threads[branch] = threading.Thread(target=run, name=name, daemon=True)
        thread.start()

    def take(self, successor: Branch) -> None:
        """The thread that has made it, and calls this, is at it until it ends: it is handed over before it gets a
        successor itself.
        """
        self._threads[successor] = threading.current_thread()

    def close(self) -> None:
        """Wait for all, when nobody starts one any more and all have been told to end. Idempotent."""
        with self._changed:
            threads = list(self._threads.values())
        for thread in threads:
            thread.join()
