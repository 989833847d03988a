"""An operation that runs in the arena."""

from __future__ import annotations

import threading
from typing import Protocol

from nexar.collectives.arena_records import Announcement
from nexar.collectives.shared_memory import Rounds
from nexar.links.operation import Operation
from nexar.types import AwaitedPeer


class Owner(Protocol):
    """The arena, as its operations see it."""

    lock: threading.Lock
    """The node's."""

    def cancel(self, operation: ArenaOperation) -> None:
        """Give it up."""

    def awaited(self, operation: ArenaOperation) -> AwaitedPeer:
        """Who has not published the round that it waits for."""


class ArenaOperation(Operation):
    """All but the end is written by who has the turn."""

    __slots__ = ("_label", "_owner", "announcement", "base", "begun", "body", "moved", "rounds", "slip", "wants")

    def __init__(
        self,
        owner: Owner,
        label: str,
        slip: int,
        announcement: Announcement | None,
        rounds: Rounds,
    ) -> None:
        super().__init__(owner.lock)
        self._owner = owner
        self._label = label
        self.slip = slip
        self.announcement = announcement
        self.rounds, self.body = rounds
        self.begun = False
        self.wants = 0  # the round that all must have published before it can go on
        self.base = 0  # the last round before its first
        self.moved = 0.0  # when it last published a round

    @property
    def name(self) -> str:
        """As errors call it."""
        return self._label

    def close(self) -> None:
        """Nothing more of it will happen, and its arrays are free."""
        self.body = iter(())

    def last_moved(self) -> float:
        """Each round is progress."""
        return self.moved

    def awaited(self) -> AwaitedPeer:
        """See Owner."""
        return self._owner.awaited(self)

    def cancel(self) -> None:
        """See Owner."""
        self._owner.cancel(self)
