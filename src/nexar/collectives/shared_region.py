"""The operations of an arena in the order of their slips, and who advances them: see arena for the law.

The arena: where the ranks of one host run collectives through memory that they share.

Law of rounds. Every operation is a number of rounds, which follows from what the operation is; `round` is a running
number, the same on all ranks for the same moment of the same operation. A rank *publishes* round r when its part of it
is in its slot, and when it has read all that it needs of round r - 1. It goes on when all others have published r.
So nobody is ever more than one round ahead, and of two slots, used in turn, one is always free to be written:
the slot of round r + 1 was last read in round r - 1, and whoever has published r has done with that.

Order. An operation has a *slip*; operations run one at a time, in the order of slips, on every rank. Slips are
reserved at the call, in the order of the calls, so they are the same everywhere.

Giving up. An operation that is cancelled, too late or failed is marked as given up; then this rank's word moves on to
the operation's end. Others find that word far enough and the mark, in this order, whenever they come; they give up too.
Who gave up has not waited for the others, though, who may still be reading. So the next operation begins with waiting
for all to have come to the end of this one: after that the law holds again.

Turn. One thread at a time has the *turn*: it advances the operation at the head. That is whoever leads the node (the
arena is a Poller), or a thread that just called and finds nobody at it: it runs its operation at once, looking at the
words for a while (`spin`), and only then leaves it to the queue and waits as all do. The turn is taken without waiting,
but for giving up. It comes before the node's lock.

Waking. After publishing, a rank nudges those that have published the same round already: they may sleep waiting for it.
The others will look before they sleep. Between storing the round and looking at theirs there is a fence, as between
their arming and their last look: one of the two sees the other (see transport.shm.doorbell).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from time import monotonic
from typing import Any, Final, Protocol

from numpy.typing import NDArray

from nexar.arrays.operators import Reduction
from nexar.arrays.views import Span
from nexar.collectives import shared_region_rounds
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.shared_region_layout import (
    ABORTED,
    Fold,
    PublishedCall,
    RegionMemory,
    RegionPlans,
    RegionRecords,
    RegionSlots,
    folding,
)
from nexar.collectives.shared_region_rounds import FingerprintDiffers, RankAborted, RegionOperation, Rounds, RoundSync
from nexar.errors import Cancelled, UsageError
from nexar.links.operation import FINISHED, Operation
from nexar.links.progress import Progress
from nexar.types import AwaitedPeer

_CLOSED: Final = "this communicator is closed; use it before closing it"
_INLINE_ROUNDS: Final = 3  # an operation of more is better driven: transports must not wait for it


class RegionPeers(Protocol):
    """What an arena must be told of its ranks: who they are, and what to say when they disagree. Called by who has the
    turn, so it must not call back.
    """

    def awaited(self, index: int) -> AwaitedPeer:
        """The rank with that index in the arena."""

    def given_up(self, index: int, operation: str) -> BaseException:
        """The error of an operation that this rank gave up."""

    def differs(self, index: int, theirs: Fingerprint, mine: PublishedCall) -> BaseException:
        """The error of an operation that this rank takes to be another one. Nothing runs in the arena after it."""


class RegionQueue:
    """A Poller: whoever leads advances the operation at the head."""

    def __init__(
        self,
        progress: Progress,
        memory: RegionMemory,
        rank: int,
        members: RegionPeers,
        wake_calls: Sequence[Callable[[], None]],
    ) -> None:
        self.records = RegionRecords(memory.records(), rank, memory.geometry.size)
        self.slots = RegionSlots(memory, rank)
        self.lock = progress.lock
        self.closed = False
        self._progress = progress
        self._memory = memory
        self._members = members
        self.plans = RegionPlans(self.slots)
        self._round_sync = RoundSync(self.records, self.slots, wake_calls)
        self._region_lock = threading.Lock()
        self._base = 0  # the round before the operation that is being run at once
        self._head = 1  # the slip whose turn it is; written by who has the turn
        self._posted: dict[int, RegionOperation] = {}  # by slip; any thread adds, who has the turn removes
        self._ended: BaseException | None = None  # why nothing can be waited for any more; written once
        self._differs = False  # nor does what others publish mean anything; written by who has the turn
        self._unfork = progress.when_forked(self._let_go)
        progress.add_poller(self)

    def start(
        self, label: str, order_number: int, announcement: PublishedCall | None, rounds: Rounds, spin: bool
    ) -> Operation:
        """Post an operation; with `spin`, run it at once as far as that goes without sleeping."""
        if announcement is ABORTED:
            self.skip(order_number, rounds[0])
            return FINISHED
        if spin and rounds[0] <= _INLINE_ROUNDS:
            begun = self._progress.run_inline(self._run, label, order_number, announcement, rounds)
            if begun is not None:
                return begun
        operation = RegionOperation(self, label, order_number, announcement, rounds)
        self._post(operation)
        return operation

    def skip(self, order_number: int, rounds: int) -> None:
        """See Arena.skip."""
        operation = RegionOperation(self, "skipped", order_number, None, (rounds, iter(())))
        operation.done = True
        self._post(operation)
        self._progress.wake()  # who has the turn just now may not have seen it

    def _post(self, operation: RegionOperation) -> None:
        self._posted[operation.order_number] = operation
        self._progress.run_inline(self.poll)

    # -- by who has the turn ---------------------------------------------------------------------------

    def _run(
        self, label: str, order_number: int, announcement: PublishedCall | None, rounds: Rounds
    ) -> Operation | None:
        """From its beginning as far as it gets by spinning; the rest is left to the queue. None: it is not its turn.

        This is what `ArenaOperation` and `Pace.step` do, without an object: the way of every small call.
        """
        if not self._region_lock.acquire(False):
            return None
        try:
            if self._head != order_number or self._ended is not None or not self._round_sync.settled:
                return None
            try:
                if not self._run_rounds(order_number, announcement, rounds[1]):
                    return self._leave_to_queue(label, order_number, announcement, rounds)
            except BaseException as error:  # noqa: BLE001 - see _go_on
                operation = self._leave_to_queue(label, order_number, announcement, rounds)
                self._fail(operation, error)
                return operation
            self._head = order_number + 1
            return FINISHED
        finally:
            self._region_lock.release()

    def _run_rounds(self, order_number: int, announcement: PublishedCall | None, body: Iterator[None]) -> bool:
        """True: that was all."""
        round_sync, longest = self._round_sync, self._progress.spin
        self._base = number = round_sync.round
        self.slots.parity = (number + 1) & 1
        if announcement is not None:
            self.records.take(order_number, announcement[1])
        for _ in body:
            number += 1
            round_sync.publish(number)
            if not round_sync.spin(number, longest, self._has_ended):
                return False
            round_sync.check(order_number, announcement)
            announcement = None  # it is compared once
        return True

    def _leave_to_queue(
        self, label: str, order_number: int, announcement: PublishedCall | None, rounds: Rounds
    ) -> RegionOperation:
        operation = RegionOperation(self, label, order_number, announcement, rounds)
        operation.begun, operation.base, operation.wants = True, self._base, self._round_sync.round
        self._posted[order_number] = operation
        return operation

    def _has_ended(self) -> bool:
        return self._ended is not None

    def _go_on(self, operation: RegionOperation) -> bool:
        """One step. True: that was its end, good or bad."""
        try:
            if self._round_sync.step(operation):
                self._leave(operation, None)
            else:
                operation.moved = monotonic()
        except BaseException as error:  # noqa: BLE001 - of a user's function, say: it is the operation's
            self._fail(operation, error)
        return operation.done

    def _fail(self, operation: RegionOperation, error: BaseException) -> None:
        if isinstance(error, RankAborted):
            self._join_giving_up(operation, error.index)
        elif isinstance(error, FingerprintDiffers):
            theirs = self.records.taken(self.records.all[error.index], operation.order_number)
            self._disagree(operation, error.index, theirs)
        else:
            self._give_up(operation, error)

    def _join_giving_up(self, operation: RegionOperation, index: int) -> None:
        """That rank gave the operation up. It may have done so because a third one calls something else, of which this
        rank has not been told yet: the announcements show that, and it is what every rank has to raise.
        """
        found = self._announced_difference(operation)
        if found is None:
            self._give_up(operation, self._members.given_up(index, operation.name))
        else:
            self._disagree(operation, *found)

    def _announced_difference(self, operation: RegionOperation) -> tuple[int, Fingerprint] | None:
        announcement = operation.announcement
        return None if announcement is None else self.records.disagreement(announcement[0])

    def _leave(self, operation: RegionOperation, error: BaseException | None) -> None:
        self._posted.pop(operation.order_number, None)
        self._head = operation.order_number + 1
        with operation.lock:
            operation.finish(error)

    def _give_up(self, operation: RegionOperation, error: BaseException) -> None:
        operation.close()
        self._round_sync.give_up(operation)
        self._leave(operation, error)

    def _disagree(self, operation: RegionOperation, index: int, theirs: Fingerprint) -> None:
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
        if not self._posted or not self._region_lock.acquire(False):
            return False
        try:
            return self._advance()
        finally:
            self._region_lock.release()

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

    def _advance_one(self, operation: RegionOperation) -> bool:
        """True if anything could be done."""
        moved = not operation.begun
        if moved:
            self._round_sync.begin(operation)
        while self._round_sync.reached(operation.wants):
            moved = True
            if self._go_on(operation):
                return True
        deserter = self._round_sync.deserter(operation.order_number)  # no need to wait for the others then
        if deserter is not None:
            self._fail(operation, RankAborted(deserter))
            return True
        return moved

    def prepare_sleep(self) -> bool:
        """See Poller. Who is about to sleep has time to look at what the others have announced."""
        if not self._posted:
            return True
        if not self._region_lock.acquire(False):
            return False
        try:
            return self._may_sleep()
        finally:
            self._region_lock.release()

    def _may_sleep(self) -> bool:
        operation = self._posted.get(self._head)
        if self._ended is not None:
            return False
        if operation is None:
            return True
        if operation.done or not operation.begun or not self._round_sync.waits(operation):
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

    def awaited(self, operation: RegionOperation) -> AwaitedPeer:
        """The first who has not published what the operation waits for; if it is not its turn, what the head does."""
        head = self._posted.get(self._head) or operation
        with self._region_lock:
            missing = None if self.closed else self._round_sync.missing(max(head.wants, head.base + 1))
        return AwaitedPeer() if missing is None else self._members.awaited(missing)

    def cancel(self, operation: RegionOperation) -> None:
        """On return nothing touches its arrays."""
        with self._region_lock:
            if operation.done:
                return
            if operation.begun and not self.closed:
                self._give_up(operation, Cancelled(operation=operation.name))
            else:  # it keeps its slip until its turn comes
                operation.close()
                with operation.lock:
                    operation.finish(Cancelled(operation=operation.name))
        self._progress.wake()  # who leads goes on with the next

    def fail(self, error: BaseException) -> None:
        """See Arena.fail."""
        self._ended = self._ended or error
        self._progress.wake()

    def close(self) -> None:
        """See Arena.close."""
        if self.closed:
            return
        self._unfork()
        self._progress.remove_poller(self)
        with self._region_lock:
            self._ended = self._ended or UsageError(_CLOSED)
            self._fail_all(self._ended)
            self._let_go()
        self._progress.wake()

    def _let_go(self) -> None:
        """Also in a forked child, where nobody else can have the turn."""
        self.closed = True
        self.plans.release()
        self.slots.release()
        self.records.release()
        self._memory.close()


Row = NDArray[Any]
"""Flat and contiguous; nobody else touches it until the operation is done."""


class SharedRegion:
    """One rank's way into it. Close it before the node; its operations may be waited for by any thread.

    With `spin`, for callers that wait anyway, an operation is run in place as far as it gets in that time, often to its
    end. It compares its `announcement`, if it has one, with those of the others.
    """

    def __init__(
        self,
        progress: Progress,
        memory: RegionMemory,
        rank: int,
        members: RegionPeers,
        wake_calls: Sequence[Callable[[], None]],
    ) -> None:
        """`rank`: this one's index among the ranks of the arena. `nudges`: one for each of them (this one's is not
        used), which wakes the rank's process if it sleeps. The memory is the arena's to close.
        """
        self.rank = rank
        self.size = memory.geometry.size
        self._queue = RegionQueue(progress, memory, rank, members, wake_calls)
        self._slots = self._queue.slots
        self._records = self._queue.records
        self._plans = self._queue.plans
        self._reserved = 1

    # -- slips and announcements ---------------------------------------------------------------------

    def reserve(self, count: int = 1) -> int:
        """The first of `count` slips in a row. Each must be used, or given back with `skip`. Callers see to it that
        slips are reserved in the same order on all ranks, so not by two threads at once.
        """
        order_number = self._reserved
        self._reserved += count
        return order_number

    def skip(self, order_number: int, rounds: int) -> None:
        """This rank takes no part in that operation, of so many rounds: others find that it was given up."""
        self._queue.skip(order_number, rounds)

    def announce(self, sequence: int, fingerprint: Fingerprint) -> None:
        """This rank has come to its collective number `sequence`, whether that runs here or elsewhere. UsageError, once
        the arena is closed: also with the node, or in a forked child.
        """
        self._queue.check()
        self._records.announce(sequence, fingerprint)

    def disagreement(self, sequence: int) -> tuple[int, Fingerprint] | None:
        """A rank that has announced something else as that collective than this one has, and what. Only the last eight
        collectives are remembered.
        """
        return None if self._queue.closed else self._records.disagreement(sequence)

    def arrivals(self, sequence: int) -> list[int | None]:
        """When each rank came to that collective (of time.monotonic_ns); None: it has not, or it was too long ago."""
        return [None] * self.size if self._queue.closed else self._records.arrivals(sequence)

    # -- operations ------------------------------------------------------------------------------------

    def barrier(self, order_number: int, *, announcement: PublishedCall | None = None, spin: bool = False) -> Operation:
        """Done when all have come."""
        return self._queue.start("barrier", order_number, announcement, shared_region_rounds.region_barrier(), spin)

    def all_reduce(
        self,
        order_number: int,
        array: Row,
        reduction: Reduction,
        out: Row | None = None,
        *,
        announcement: PublishedCall | None = None,
        spin: bool = False,
    ) -> Operation:
        """`out` (default: `array`) becomes the reduction of all arrays, in the order of ranks."""
        rounds = shared_region_rounds.region_all_reduce(self._plans, array, reduction, array if out is None else out)
        return self._queue.start("all_reduce", order_number, announcement, rounds, spin)

    def reduce(
        self,
        order_number: int,
        array: Row,
        out: Row | None,
        reduction: Reduction,
        root: int,
        *,
        announcement: PublishedCall | None = None,
        spin: bool = False,
    ) -> Operation:
        """`out` of `root`, which may be its `array`, becomes the reduction of all arrays; that of others is ignored."""
        rounds = shared_region_rounds.region_all_reduce(
            self._plans, array, reduction, out if self.rank == root else None, root
        )
        return self._queue.start("reduce", order_number, announcement, rounds, spin)

    def reduce_scatter(
        self,
        order_number: int,
        array: Row,
        out: Row,
        spans: Sequence[Span],
        reduction: Reduction,
        *,
        fold: Fold | None = None,
        announcement: PublishedCall | None = None,
        spin: bool = False,
    ) -> Operation:
        """`out`, which may lie in `array`, becomes this rank's span of the reduction of all arrays. `fold`: to be used
        in place of the reduction's own, where `out` has another dtype or the ranks of this host are not all.
        """
        fold = fold or folding(self.size, array.dtype, reduction)
        rounds = shared_region_rounds.region_reduce_scatter(self._slots, array, out, spans, fold)
        return self._queue.start("reduce_scatter", order_number, announcement, rounds, spin)

    def all_gather(
        self,
        order_number: int,
        array: Row,
        out: Row,
        spans: Sequence[Span],
        *,
        announcement: PublishedCall | None = None,
        spin: bool = False,
    ) -> Operation:
        """`out` becomes everybody's array, each in its span. `array` may be that span of `out`."""
        rounds = shared_region_rounds.region_all_gather(self._slots, array, out, spans)
        return self._queue.start("all_gather", order_number, announcement, rounds, spin)

    def broadcast(
        self,
        order_number: int,
        array: Row,
        root: int,
        *,
        announcement: PublishedCall | None = None,
        spin: bool = False,
    ) -> Operation:
        """`array` becomes that of `root`."""
        return self._queue.start(
            "broadcast",
            order_number,
            announcement,
            shared_region_rounds.region_broadcast(self._slots, array, root),
            spin,
        )

    # -- the end ---------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Everything that cannot be completed with what the others have published fails with it, now and later. From
        any thread, also under the node's lock; whoever leads sees to it at once.
        """
        self._queue.fail(error)

    def close(self) -> None:
        """Unmap it; what is pending fails. Touches nobody else. Idempotent."""
        self._queue.close()
