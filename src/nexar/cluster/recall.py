"""Calling back whoever dials for a node that closes: their waits end at once, not at their deadlines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Recalled(Exception):
    """This node is closing, so nobody goes on dialing for it."""

    def __init__(self) -> None:
        super().__init__("this node is closed")


class Recall:
    """Made once, for good. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._made = threading.Event()
        self._lock = threading.Lock()
        self._wakes: dict[object, Callable[[], None]] = {}  # under the lock

    @property
    def made(self) -> bool:
        """Whether the node is closing."""
        return self._made.is_set()

    def make(self) -> None:
        """End every wait, now and later. Idempotent."""
        with self._lock:
            self._made.set()
            wakes = list(self._wakes.values())
        for wake in wakes:
            wake()

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """`wake`, which must not block, is called if the recall is made inside the block, or was made before it."""
        key = object()
        with self._lock:
            self._wakes[key] = wake
            made = self.made
        try:
            if made:
                wake()
            yield
        finally:
            with self._lock:
                del self._wakes[key]

    def pause(self, seconds: float) -> None:
        """Sleep. Recalled at once when it is made."""
        if self._made.wait(seconds):
            raise Recalled
