"""The operations of an arena in the order of their slips, and who advances them: see arena for the law."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from time import monotonic
from typing import Final, Protocol

from nexar.collectives.arena_memory import ArenaMemory
from nexar.collectives.arena_operation import ArenaOperation
from nexar.collectives.arena_pace import Differs, GaveUp, Pace
from nexar.collectives.arena_plans import Plans
from nexar.collectives.arena_records import GIVEN_UP, Announcement, Records
from nexar.collectives.arena_slots import Slots
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.shared_memory import Rounds
from nexar.errors import Cancelled, UsageError
from nexar.links.operation import FINISHED, Operation
from nexar.links.progress import Progress
from nexar.types import AwaitedPeer

_CLOSED: Final = "this communicator is closed; use it before closing it"
_INLINE_ROUNDS: Final = 3  # an operation of more is better driven: transports must not wait for it


class Members(Protocol):
    """What an arena must be told of its ranks: who they are, and what to say when they disagree. Called by who has the
    turn, so it must not call back.
    """

    def awaited(self, index: int) -> AwaitedPeer:
        """The rank with that index in the arena."""

    def given_up(self, index: int, operation: str) -> BaseException:
        """The error of an operation that this rank gave up."""

    def differs(self, index: int, theirs: Fingerprint, mine: Announcement) -> BaseException:
        """The error of an operation that this rank takes to be another one. Nothing runs in the arena after it."""


class ArenaQueue:
    """A Poller: whoever leads advances the operation at the head."""

    def __init__(
        self,
        progress: Progress,
        memory: ArenaMemory,
        rank: int,
        members: Members,
        nudges: Sequence[Callable[[], None]],
    ) -> None:
        self.records = Records(memory.records(), rank, memory.geometry.size)
        self.slots = Slots(memory, rank)
        self.lock = progress.lock
        self.closed = False
        self._progress = progress
        self._memory = memory
        self._members = members
        self.plans = Plans(self.slots)
        self._pace = Pace(self.records, self.slots, nudges)
        self._turn = threading.Lock()
        self._base = 0  # the round before the operation that is being run at once
        self._head = 1  # the slip whose turn it is; written by who has the turn
        self._posted: dict[int, ArenaOperation] = {}  # by slip; any thread adds, who has the turn removes
        self._ended: BaseException | None = None  # why nothing can be waited for any more; written once
        self._differs = False  # nor does what others publish mean anything; written by who has the turn
        self._unfork = progress.when_forked(self._let_go)
        progress.add_poller(self)

    def start(self, label: str, slip: int, announcement: Announcement | None, rounds: Rounds, spin: bool) -> Operation:
        """Post an operation; with `spin`, run it at once as far as that goes without sleeping."""
        if announcement is GIVEN_UP:
            self.skip(slip, rounds[0])
            return FINISHED
        if spin and rounds[0] <= _INLINE_ROUNDS:
            begun = self._progress.attempt(self._run, label, slip, announcement, rounds)
            if begun is not None:
                return begun
        operation = ArenaOperation(self, label, slip, announcement, rounds)
        self._post(operation)
        return operation

    def skip(self, slip: int, rounds: int) -> None:
        """See Arena.skip."""
        operation = ArenaOperation(self, "skipped", slip, None, (rounds, iter(())))
        operation.done = True
        self._post(operation)
        self._progress.kick()  # who has the turn just now may not have seen it

    def _post(self, operation: ArenaOperation) -> None:
        self._posted[operation.slip] = operation
        self._progress.attempt(self.poll)

    # -- by who has the turn ---------------------------------------------------------------------------

    def _run(self, label: str, slip: int, announcement: Announcement | None, rounds: Rounds) -> Operation | None:
        """From its beginning as far as it gets by spinning; the rest is left to the queue. None: it is not its turn.

        This is what `ArenaOperation` and `Pace.step` do, without an object: the way of every small call.
        """
        if not self._turn.acquire(False):
            return None
        try:
            if self._head != slip or self._ended is not None or not self._pace.settled:
                return None
            try:
                if not self._run_rounds(slip, announcement, rounds[1]):
                    return self._leave_to_queue(label, slip, announcement, rounds)
            except BaseException as error:  # noqa: BLE001 - see _go_on
                operation = self._leave_to_queue(label, slip, announcement, rounds)
                self._fail(operation, error)
                return operation
            self._head = slip + 1
            return FINISHED
        finally:
            self._turn.release()

    def _run_rounds(self, slip: int, announcement: Announcement | None, body: Iterator[None]) -> bool:
        """True: that was all."""
        pace, longest = self._pace, self._progress.spin
        self._base = number = pace.round
        self.slots.parity = (number + 1) & 1
        if announcement is not None:
            self.records.take(slip, announcement[1])
        for _ in body:
            number += 1
            pace.publish(number)
            if not pace.spin(number, longest, self._has_ended):
                return False
            pace.check(slip, announcement)
            announcement = None  # it is compared once
        return True

    def _leave_to_queue(
        self, label: str, slip: int, announcement: Announcement | None, rounds: Rounds
    ) -> ArenaOperation:
        operation = ArenaOperation(self, label, slip, announcement, rounds)
        operation.begun, operation.base, operation.wants = True, self._base, self._pace.round
        self._posted[slip] = operation
        return operation

    def _has_ended(self) -> bool:
        return self._ended is not None

    def _go_on(self, operation: ArenaOperation) -> bool:
        """One step. True: that was its end, good or bad."""
        try:
            if self._pace.step(operation):
                self._leave(operation, None)
            else:
                operation.moved = monotonic()
        except BaseException as error:  # noqa: BLE001 - of a user's function, say: it is the operation's
            self._fail(operation, error)
        return operation.done

    def _fail(self, operation: ArenaOperation, error: BaseException) -> None:
        if isinstance(error, GaveUp):
            self._join_giving_up(operation, error.index)
        elif isinstance(error, Differs):
            theirs = self.records.taken(self.records.all[error.index], operation.slip)
            self._disagree(operation, error.index, theirs)
        else:
            self._give_up(operation, error)

    def _join_giving_up(self, operation: ArenaOperation, index: int) -> None:
        """That rank gave the operation up. It may have done so because a third one calls something else, of which this
        rank has not been told yet: the announcements show that, and it is what every rank has to raise.
        """
        found = self._announced_difference(operation)
        if found is None:
            self._give_up(operation, self._members.given_up(index, operation.name))
        else:
            self._disagree(operation, *found)

    def _announced_difference(self, operation: ArenaOperation) -> tuple[int, Fingerprint] | None:
        announcement = operation.announcement
        return None if announcement is None else self.records.disagreement(announcement[0])

    def _leave(self, operation: ArenaOperation, error: BaseException | None) -> None:
        self._posted.pop(operation.slip, None)
        self._head = operation.slip + 1
        with operation.lock:
            operation.finish(error)

    def _give_up(self, operation: ArenaOperation, error: BaseException) -> None:
        operation.close()
        self._pace.give_up(operation)
        self._leave(operation, error)

    def _disagree(self, operation: ArenaOperation, index: int, theirs: Fingerprint) -> None:
        """It is not marked as given up: the others shall see the difference, and nothing comes after it."""
        assert operation.announcement is not None
        error = self._members.differs(index, theirs, operation.announcement)
        self._ended, self._differs = self._ended or error, True
        operation.close()
        self._leave(operation, error)

    def _fail_all(self, error: BaseException) -> bool:
        failed = list(self._posted.values())
        self._posted.clear()
        for operation in failed:
            operation.close()
        with self._progress.lock:
            for operation in failed:
                operation.finish(error)
        return bool(failed)

    # -- driven by who leads ---------------------------------------------------------------------------

    @property
    def spins(self) -> bool:
        """See Poller."""
        return bool(self._posted)

    def poll(self) -> bool:
        """See Poller. Also called by who posts, so not only by who leads."""
        if not self._posted or not self._turn.acquire(False):
            return False
        try:
            return self._advance()
        finally:
            self._turn.release()

    def _advance(self) -> bool:
        """What peers had published before they were lost counts: so first go on, then fail what cannot."""
        happened = False
        while (operation := self._posted.get(self._head)) is not None and not (self.closed or self._differs):
            if operation.done:  # cancelled before its turn came
                self._give_up(operation, Cancelled())
            elif not self._advance_one(operation):
                break
            happened = True
        if self._ended is not None:
            return self._fail_all(self._ended) or happened
        return happened

    def _advance_one(self, operation: ArenaOperation) -> bool:
        """True if anything could be done."""
        moved = not operation.begun
        if moved:
            self._pace.begin(operation)
        while self._pace.reached(operation.wants):
            moved = True
            if self._go_on(operation):
                return True
        deserter = self._pace.deserter(operation.slip)  # no need to wait for the others then
        if deserter is not None:
            self._fail(operation, GaveUp(deserter))
            return True
        return moved

    def arm(self) -> bool:
        """See Poller. Who is about to sleep has time to look at what the others have announced."""
        if not self._posted:
            return True
        if not self._turn.acquire(False):
            return False
        try:
            return self._may_sleep()
        finally:
            self._turn.release()

    def _may_sleep(self) -> bool:
        operation = self._posted.get(self._head)
        if self._ended is not None:
            return False
        if operation is None:
            return True
        if operation.done or not operation.begun or not self._pace.waits(operation):
            return False
        found = self._announced_difference(operation)
        if found is not None:
            self._disagree(operation, *found)
        return found is None

    # -- any thread ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise why nothing can be posted any more, if it was closed or the process is a forked child."""
        if self.closed:
            self._progress.check()
            raise copy(self._ended) if self._ended is not None else UsageError(_CLOSED)

    def awaited(self, operation: ArenaOperation) -> AwaitedPeer:
        """The first who has not published what the operation waits for; if it is not its turn, what the head does."""
        head = self._posted.get(self._head) or operation
        with self._turn:
            missing = None if self.closed else self._pace.missing(max(head.wants, head.base + 1))
        return AwaitedPeer() if missing is None else self._members.awaited(missing)

    def cancel(self, operation: ArenaOperation) -> None:
        """On return nothing touches its arrays."""
        with self._turn:
            if operation.done:
                return
            if operation.begun and not self.closed:
                self._give_up(operation, Cancelled(operation=operation.name))
            else:  # it keeps its slip until its turn comes
                operation.close()
                with operation.lock:
                    operation.finish(Cancelled(operation=operation.name))
        self._progress.kick()  # who leads goes on with the next

    def fail(self, error: BaseException) -> None:
        """See Arena.fail."""
        self._ended = self._ended or error
        self._progress.kick()

    def close(self) -> None:
        """See Arena.close."""
        if self.closed:
            return
        self._unfork()
        self._progress.remove_poller(self)
        with self._turn:
            self._ended = self._ended or UsageError(_CLOSED)
            self._fail_all(self._ended)
            self._let_go()
        self._progress.kick()

    def _let_go(self) -> None:
        """Also in a forked child, where nobody else can have the turn."""
        self.closed = True
        self.plans.release()
        self.slots.release()
        self.records.release()
        self._memory.close()
