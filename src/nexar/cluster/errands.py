"""What was decided, done in the order of the decisions, one thing at a time, by whichever thread finds nobody doing it.

So no thread waits for another one's I/O, nobody hears of a decision before the one that was made earlier, and what a
message brings about is done by the thread that heard it: there is no hop to another one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Errand = TypeVar("Errand")


class Errands(Generic[Errand]):
    """Of one machine. What `do` adds in its turn is done after what is there already."""

    def __init__(self, do: Callable[[Errand], None]) -> None:
        self._do = do
        self._waiting: deque[Errand] = deque()
        self._running = threading.Lock()  # held by who does them, without waiting for it

    def add(self, errands: Iterable[Errand]) -> None:
        """In this order. Under the lock that the decisions are made under, so that theirs is kept; `run` follows."""
        self._waiting.extend(errands)

    def run(self) -> None:
        """Do what is to be done, unless another thread is at it; it then does this too. Without the lock. Raises what
        `do` raises; the rest waits for the next run.
        """
        while self._waiting and self._running.acquire(blocking=False):
            try:
                while self._waiting:
                    self._do(self._waiting.popleft())
            finally:
                self._running.release()
