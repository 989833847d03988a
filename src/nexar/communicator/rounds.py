"""Rounds that survive the loss of members: the same ones, with the same results, on all survivors.

Calls are numbered. Call #k runs its collective, and then a barrier, the commit; only then it returns. When members are
lost, everybody goes on with the successor. There they first compare notes: the highest number whose result each holds.
The lowest of these is what all have *completed*. A rank whose call is not above it returns the result that it holds; a
rank whose call is above gives up what it holds, restores its input, and runs the call again. Nobody does either before
a barrier has shown that all know.

Why no two survivors disagree on a result, or on how many calls there were:

1. Who has returned from #k has passed the commit, or was told that #k is completed. Either way every member of the
   communicator on which it was held #k. Memberships that follow have no others, since who joins is not in the team;
   and what is held is given up only if it is above what all have completed. So from then on #k is completed wherever
   notes are compared: whoever is still in it returns what it holds, and nobody runs it again.
2. If nobody has returned from #k, and somebody does not hold it, #k is not completed: all who are in it run it again.
   Nobody is further: to be in #k + 1, it would have returned.
3. Results that are held at the same time are of the same run. A run on a successor begins after its barrier, and by
   then all its members have given up what they held of earlier runs of that number. So whoever holds a result of that
   run knows that no member holds one of another; and 1 and 2 never mix two runs.
4. Being interrupted while notes are compared changes nothing: what is held stays held, and the next successor asks
   again. Members that are lost only take their notes with them: the lowest of fewer is no lower.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from nexar.cluster.membership import Membership
from nexar.communicator.events import MembershipEvent
from nexar.errors import CollectiveMismatch, MembershipChanged, UsageError
from nexar.types import Rank


class Gathering(Protocol):
    """What rounds need of a communicator."""

    @property
    def rank(self) -> Rank: ...
    @property
    def size(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def membership(self) -> Membership: ...
    def barrier(self, *, algorithm: str | None = None, timeout: float | None = None) -> Any: ...
    def all_gather(
        self, array: Any, *, out: Any = None, algorithm: str | None = None, timeout: float | None = None
    ) -> Any: ...


C = TypeVar("C", bound=Gathering)


class Rounds(Generic[C]):
    """Calls of all ranks, made in the same order on each, by one thread at a time."""

    def __init__(self, communicator: C) -> None:
        """Made on all its ranks at the same point."""
        self.communicator = communicator
        """The one that is used now: the first, or its latest successor."""
        self.contributors: Membership = communicator.membership
        """Those of the last result that is held."""
        self.changes: Final[list[MembershipEvent]] = []
        self.last_change: MembershipEvent | None = None
        self._born = communicator.epoch
        self._busy = threading.Lock()  # taken by the thread that is in a call; nobody waits for it
        # What is below is written by that thread; and so is what is above.
        self._call = 0  # the number of the call that is under way, or was last
        self._held = 0  # the highest whose result this rank holds, or has returned
        self._result: Any = None  # of call #held, until it is returned
        self._settled = True  # notes have been compared on this communicator, or none were needed

    def carry_through(
        self, run: Callable[[C], Any], timeout: float | None, restore: Callable[[], object] | None = None
    ) -> Any:
        """The result of `run` on a communicator, once all who are left hold it. `restore` is called before it is run
        again.

        MembershipChanged if others have joined: these have no notes. Other errors pass through; the call is over then.
        """
        if not self._busy.acquire(blocking=False):
            raise UsageError("another call of this team is under way; make one call at a time, from one thread")
        try:
            self._call += 1
            return self._finish(run, timeout, restore)
        except UsageError:
            if self._held < self._call:
                self._call -= 1  # refused before it began: on the others it is no call either
            raise
        finally:
            self._result = None
            self._busy.release()

    def _finish(self, run: Callable[[C], Any], timeout: float | None, restore: Callable[[], object] | None) -> Any:
        while True:
            try:
                if not self._settled:
                    self._settle(timeout)
                    if self._held >= self._call:
                        return self._result
                    if restore is not None:
                        restore()
                self._hold(run(self.communicator))
                self.communicator.barrier(timeout=timeout)
                return self._result
            except MembershipChanged as change:
                self._follow(change)

    def _hold(self, result: Any) -> None:
        self._result, self._held = result, self._call
        self.contributors = self.communicator.membership

    def _follow(self, change: MembershipChanged) -> None:
        old, new = self.communicator, change.communicator
        if new is None or change.joined:
            raise change
        self.last_change = MembershipEvent(
            new.epoch, old.size, new.size, old.rank, new.rank, (), dict(change.lost), communicator=new
        )
        self.changes.append(self.last_change)
        self.communicator, self._settled = new, False

    def _settle(self, timeout: float | None) -> None:
        """Compare notes, and give up what not all have."""
        mine = np.array([self._born, self._call, self._held], np.int64)
        notes = [Note(*row) for row in self.communicator.all_gather(mine, timeout=timeout).tolist()]
        self._held = min(self._held, completed(notes, self.communicator.rank))
        self.communicator.barrier(timeout=timeout)
        self._settled = True

    def __repr__(self) -> str:
        return f"{self._call} calls, {len(self.changes)} changes of {self.communicator!r}"


class Note(NamedTuple):
    """What one rank says on a successor."""

    born: int
    """The epoch in which its rounds began."""
    call: int
    """It is in this one."""
    held: int
    """It holds the result of this one, or has returned it."""


def completed(notes: Sequence[Note], me: Rank) -> int:
    """The highest call whose result all hold.

    CollectiveMismatch, on all ranks alike, if those who would run a call again are not in the same one. That is so
    only after errors that some ranks had and others had not, or if rounds of different beginnings meet.
    """
    lowest = min(note.held for note in notes)
    again = {note.call for note in notes if note.call > lowest}
    if len(again) <= 1 and len({note.born for note in notes}) == 1:
        return lowest
    calls = {rank: f"call #{note.call} of the team made in epoch {note.born}" for rank, note in enumerate(notes)}
    other = next(call for call in calls.values() if call != calls[me])
    ranks = [rank for rank, call in calls.items() if call == other]
    raise CollectiveMismatch(expected=calls[me], found=other, ranks=ranks, calls=calls)
