"""All descriptors of one transport behind a single one.

An epoll instance is itself readable when one of its members is, so the node's sleeper watches one descriptor however
many peers there are, and after a sleep one call tells which doorbells rang.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable


class Descriptors:
    """`add` and `remove` from any thread; `dispatch` by the driving thread."""

    __slots__ = ("_epoll", "_handlers", "_lock")

    def __init__(self) -> None:
        self._epoll = select.epoll()  # close-on-exec
        self._handlers: dict[int, Callable[[], None]] = {}  # under the lock
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """The one to watch."""
        return self._epoll.fileno()

    def add(self, descriptor: int, handler: Callable[[], None]) -> None:
        """Call `handler` while the descriptor is readable or hung up."""
        with self._lock:
            self._handlers[descriptor] = handler
            self._epoll.register(descriptor, select.EPOLLIN)

    def remove(self, descriptor: int) -> None:
        """Before it is closed. A handler already chosen by `dispatch` may still be called once. Idempotent."""
        with self._lock:
            if self._handlers.pop(descriptor, None) is not None:
                self._epoll.unregister(descriptor)

    def dispatch(self) -> bool:
        """Call the handlers of what is ready now. True if there were any."""
        with self._lock:
            if self._epoll.closed:
                return False
            ready = [self._handlers.get(descriptor) for descriptor, _ in self._epoll.poll(0)]
        for handler in ready:
            if handler is not None:
                handler()
        return bool(ready)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._handlers.clear()
            self._epoll.close()

    def abandon(self) -> None:
        """In a forked child: the instance is the parent's, so nothing is removed from it."""
        self._epoll.close()
