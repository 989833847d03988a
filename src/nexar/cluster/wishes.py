"""What one member will bring to the next checkpoint: who waits to come in, whether it wants to go, whom it asks to."""

from __future__ import annotations

import threading
from collections.abc import Callable

from nexar.cluster.decisions.resize import Wish
from nexar.cluster.membership import Member
from nexar.types import NodeId


class Wishes:
    """What this node will bring to the next checkpoint. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # over everything below
        self._waiting: tuple[Member, ...] = ()
        self._leaving = False
        self._removals: dict[NodeId, str] = {}

    def set_waiting(self, members: tuple[Member, ...]) -> None:
        """The seed says who waits to come in."""
        with self._changed:
            self._waiting = members
            self._changed.notify_all()

    def leave(self) -> None:
        """This node wants to go."""
        with self._changed:
            self._leaving = True

    def remove(self, node: NodeId, reason: str) -> None:
        """Another is to go."""
        with self._changed:
            self._removals[node] = reason[:1000]

    def settle(self, gone: frozenset[NodeId]) -> None:
        """These are gone: nobody need ask for it any more."""
        with self._changed:
            for node in gone:
                self._removals.pop(node, None)

    def wait(self, count: int, timeout: float, is_over: Callable[[], bool]) -> bool:
        """Until so many wait; False: not in time, or it is over. Whoever ends it calls `look` afterwards."""
        with self._changed:
            seconds = min(timeout, threading.TIMEOUT_MAX)
            self._changed.wait_for(lambda: len(self._waiting) >= count or is_over(), seconds)
            return len(self._waiting) >= count

    def look(self) -> None:
        """Let who waits see whether it is over. Never blocks."""
        with self._changed:
            self._changed.notify_all()

    def mine(self) -> Wish:
        """As the others are told."""
        with self._changed:
            return Wish(self._waiting, self._leaving, dict(self._removals))
