"""What one member will bring to the next checkpoint: who waits to come in, whether it wants to go, whom it asks to."""

from __future__ import annotations

import threading

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

    def count(self) -> int:
        """How many wait."""
        with self._changed:
            return len(self._waiting)

    def wait(self, count: int, timeout: float) -> bool:
        """Until so many wait; False: not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._waiting) >= count, timeout)

    def mine(self) -> Wish:
        """As the others are told."""
        with self._changed:
            return Wish(self._waiting, self._leaving, dict(self._removals))
