"""Who drives a node: one thread at a time, and those that would if it left.

Why no wake-up is lost: a follower first enters the list and then looks whether somebody leads, and whether waiting is
over; a leader first gives up leadership and then looks at the list, and who ends all waiting says so first and then
wakes the list. Of each pair, one sees the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from nexar.errors import NexarError
from nexar.links.waiter import Waiter


class Leadership:
    """The lead of one node."""

    def __init__(self, lock: threading.Lock, on_end: Callable[[], None] = lambda: None) -> None:
        """`on_end` is called whenever `end` is: by whichever thread, not under the lock, and must not block."""
        self._lock = lock  # the node's
        self._on_end = on_end
        self.lead = threading.Lock()  # held by the leading thread
        self.turns = 0  # how often a waiting thread took the lead; written by who takes it
        self.followers: list[Waiter] = []  # each appends and removes itself; list methods are atomic
        self.ended: NexarError | None = None  # why waiting is over: closed, forked, or a bug; each writes it once

    def offer(self) -> None:
        """The lead is free: wake one follower that still waits; it leads, or offers in its turn when it leaves."""
        with self._lock:
            for follower in list(self.followers):
                if follower.asleep:
                    follower.wake()
                    return

    def end(self, reason: NexarError) -> None:
        """Every wait raises `reason`, now and later. All are woken: one that raises has nothing to offer to the next,
        while who closes the node holds the lead.
        """
        self.ended = reason
        with self._lock:
            for follower in list(self.followers):
                follower.wake()
        self._on_end()

    def abandon(self, reason: NexarError) -> None:
        """In a forked child: those who followed or led are not here."""
        self.ended = reason
        self.followers.clear()
