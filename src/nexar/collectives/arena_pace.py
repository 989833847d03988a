"""Keeps this rank in step with the others of its arena: the law of rounds (see arena), one operation at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final

from nexar.collectives.arena_operation import ArenaOperation
from nexar.collectives.arena_records import GIVEN_UP_TO, Announcement, Records
from nexar.collectives.arena_slots import Slots
from nexar.errors import InternalError
from nexar.links.interrupt import interrupts
from nexar.transport.shm.doorbell import fence

_CROWDED: Final = 100e-6  # a yield that took longer: others need this core more than we do
_MOST_LOOKS: Final = 128  # before the first yield: some microseconds
_FEWEST_LOOKS: Final = 4
_LOOKS_AGAIN: Final = 8  # before each further yield
_FEW_YIELDS: Final = 2


class GaveUp(Exception):
    """That rank gave the operation up."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


class Differs(Exception):
    """That rank takes the operation to be another one."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


class Pace:
    """Belongs to who has the turn, but for `reached` and `missing`."""

    def __init__(self, records: Records, slots: Slots, nudges: Sequence[Callable[[], None]]) -> None:
        self._records = records
        self._words = records.words
        self._others = records.others
        self._nudges = tuple((word, nudges[records.index(word)]) for word in records.others)
        self._slots = slots
        self.round = 0  # what this rank has published
        self.settled = True  # nobody can still be reading what this rank gave in before
        self._patience = _MOST_LOOKS

    def begin(self, operation: ArenaOperation) -> None:
        """Its first step may be taken when everybody has come to the end of the one before: at once, unless that was
        given up.
        """
        operation.begun = True
        operation.wants = operation.base = self.round

    def reached(self, wanted: int) -> bool:
        """Have all others published that round?"""
        words = self._words
        for word in self._others:  # noqa: SIM110 - a generator costs more than all of this
            if words[word] < wanted:
                return False
        return True

    def missing(self, wanted: int) -> int | None:
        """The first who has not."""
        behind = (self._records.index(word) for word in self._others if self._words[word] < wanted)
        return next(behind, None)

    def deserter(self, slip: int) -> int | None:
        """The first who gave the operation up, whether it has begun here or not."""
        for word in self._others:
            if self._records.has_given_up(word, slip):
                return self._records.index(word)
        return None

    def waits(self, operation: ArenaOperation) -> bool:
        """Is there nothing that it could go on with?"""
        return not self.reached(operation.wants) and self.deserter(operation.slip) is None

    def spin(self, wanted: int, longest: float, ended: Callable[[], bool]) -> bool:
        """Look for that long whether all have published the round. Others get to run meanwhile; if they need long for
        it, this is no time to spin.

        Whom we wait for may need this very core: then yielding at once is best. Else it only costs, and much where the
        core is wanted by strangers. So if a yield or two helped, the next one comes sooner, and if none was needed,
        later.
        """
        words, looks, patience, yields, last, until = self._words, 0, self._patience, 0, 0.0, 0.0
        for word in self._others:
            while words[word] < wanted:
                looks += 1
                if looks < patience:
                    continue
                now = monotonic()
                if not yields:
                    until = now + longest
                elif now >= until or now - last > _CROWDED or interrupts.pending or ended():
                    return False
                last = now
                os.sched_yield()
                yields += 1
                looks = patience - _LOOKS_AGAIN
        if not yields:
            self._patience = min(patience + 1, _MOST_LOOKS)
        elif yields <= _FEW_YIELDS:
            self._patience = max(patience // 2, _FEWEST_LOOKS)
        return True

    def step(self, operation: ArenaOperation) -> bool:
        """All have published the round that it wants: go on to the next. True if that was the last.

        GaveUp, Differs, and whatever a user's function raises.
        """
        if self.round != operation.base:
            self.check(operation.slip, operation.announcement if self.round == operation.base + 1 else None)
        else:
            self.settled = True
            self._slots.parity = (self.round + 1) & 1
            if operation.announcement is not None:  # not before: others may still look at what it was two slips ago
                self._records.take(operation.slip, operation.announcement[1])
        try:
            next(operation.body)
        except StopIteration:
            rounds = self.round - operation.base
            if rounds != operation.rounds:
                raise InternalError(f"{operation.name} had {rounds} rounds, not {operation.rounds}") from None
            return True
        self.publish(self.round + 1)
        operation.wants = self.round
        return False

    def give_up(self, operation: ArenaOperation) -> None:
        """Move on to its end without the others, who learn of it."""
        if not operation.begun:
            self.begin(operation)
        self._records.give_up(operation.slip)
        self.settled = False
        self.round = self._words[self._records.mine] = operation.base + operation.rounds
        fence()
        for _, nudge in self._nudges:
            nudge()

    def check(self, slip: int, announcement: Announcement | None) -> None:
        """Is what the others have published what it seems to be? `announcement`: look also whether they take it to be
        the same, which they say with the first round.
        """
        records, words = self._records, self._words
        for word in self._others:
            if words[word + GIVEN_UP_TO] >= slip and records.has_given_up(word, slip):
                raise GaveUp(records.index(word))
            if announcement is not None and records.differs(word, slip):
                raise Differs(records.index(word))

    def publish(self, number: int) -> None:
        """This rank's part of round `number` is in its slot. Who has published it may be asleep waiting for us."""
        words = self._words
        self.round = words[self._records.mine] = number
        fence()
        for word, nudge in self._nudges:
            if words[word] >= number:
                nudge()
