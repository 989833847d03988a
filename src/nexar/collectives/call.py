"""One call of a collective that has its number, and its turns in the memory that ranks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from nexar.collectives.arena_records import GIVEN_UP, Announcement
from nexar.collectives.entry import Entry
from nexar.collectives.fingerprint import Fingerprint
from nexar.links.operation import FINISHED, Operation

Turn: TypeAlias = Callable[[int, Announcement, bool], Operation]
"""Posts an operation in the arena: its slip, what it is part of, and whether the caller may spin."""


class Call:
    """Turns are taken in order. Each must be taken or skipped: the other ranks count on it."""

    __slots__ = ("_last", "_taken", "entry", "fingerprint", "slip", "spin", "turns")

    def __init__(
        self,
        entry: Entry,
        fingerprint: Fingerprint,
        slip: int = 0,
        turns: Sequence[Turn] = (),
    ) -> None:
        self.entry = entry
        self.fingerprint = fingerprint
        self.slip = slip
        self.turns = turns
        self.spin = False
        """The thread that made the call runs it, and has nothing better to do. Written by who runs it."""
        self._taken = 0
        self._last: Operation = FINISHED

    def take_turn(self) -> Operation:
        """The next one."""
        self._last = self._post((self.entry.sequence, self.fingerprint), spin=self.spin)
        return self._last

    def give_up(self) -> None:
        """The turn that was taken, if it is not done, and those that are left: the other ranks find that this one gave
        up. On return nothing touches the arrays.
        """
        self._last.cancel()
        while self._taken < len(self.turns):
            self._post(GIVEN_UP, spin=False)

    def _post(self, announcement: Announcement, *, spin: bool) -> Operation:
        index, self._taken = self._taken, self._taken + 1
        return self.turns[index](self.slip + index, announcement, spin)
