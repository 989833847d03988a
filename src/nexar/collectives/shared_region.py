"""The shared region: collectives of the ranks of one host through shared memory.

Rounds. A rank publishes round r when its part is in its slot and it has read all it needs of round r - 1. It continues
when all others have published r. So no rank is more than one round ahead, and one of two alternating slots is always
free to write.

Order. Operations run one at a time by order number. All ranks reserve the numbers in the order of calls.

Aborts. A rank marks an aborted operation, then moves its round counter to the operation's end. The others see both and
abort too. They may still read this rank's slot, so the next operation waits until all have reached that end.

Region lock. Its holder, the driver or a spinning caller, advances the operation at the head. Both only try the lock;
`cancel`, `awaited` and `close` wait for it. It is taken before the node's lock.

Waking. After publishing, a rank wakes those that have published the same round; others check before they sleep. Fences
ensure that one of the two sees the other (see transport.shm.ring).
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
_INLINE_ROUNDS: Final = 3  # longer operations are driven, so that transports do not wait for them


class RegionPeers(Protocol):
    """Names ranks and makes errors. Called with the region lock: must not call back.

    A protocol because communicator/, a higher layer, implements it.
    """

    def awaited(self, index: int) -> AwaitedPeer: ...

    def aborted(self, index: int, operation: str) -> BaseException: ...

    def differs(self, index: int, theirs: Fingerprint, mine: PublishedCall) -> BaseException: ...


class RegionQueue:
    """The posted operations, advanced by the driver."""

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
        self._base = 0  # the round before the operation that runs inline
        self._head = 1  # current order number; guarded by the region lock
        # by order number; any thread adds, the holder of the region lock removes
        self._posted: dict[int, RegionOperation] = {}
        self._ended: BaseException | None = None  # why nothing can be waited for; written once
        self._differs = False  # the others' rounds are meaningless after a mismatch; guarded by the region lock
        self._unfork = progress.when_forked(self._release)
        progress.add_poller(self)

    def start(
        self, label: str, order_number: int, announcement: PublishedCall | None, rounds: Rounds, spin: bool
    ) -> Operation:
        """`spin`: run it at once as far as possible without sleeping."""
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
        operation = RegionOperation(self, "skipped", order_number, None, (rounds, iter(())))
        operation.done = True
        self._post(operation)
        self._progress.wake()  # the current lock holder may have missed it

    def _post(self, operation: RegionOperation) -> None:
        self._posted[operation.order_number] = operation
        self._progress.run_inline(self.poll)

    # -- with the region lock -----------------------------------------------------------------------------

    def _run(
        self, label: str, order_number: int, announcement: PublishedCall | None, rounds: Rounds
    ) -> Operation | None:
        """Run it by spinning; the queue continues the rest. None: not its turn. Small calls need no object."""
        if not self._region_lock.acquire(False):
            return None
        try:
            if self._head != order_number or self._ended is not None or not self._round_sync.settled:
                return None
            try:
                if not self._run_rounds(order_number, announcement, rounds[1]):
                    return self._leave_to_queue(label, order_number, announcement, rounds)
            except BaseException as error:  # noqa: BLE001 - as in _step
                operation = self._leave_to_queue(label, order_number, announcement, rounds)
                self._fail(operation, error)
                return operation
            self._head = order_number + 1
            return FINISHED
        finally:
            self._region_lock.release()

    def _run_rounds(self, order_number: int, announcement: PublishedCall | None, body: Iterator[None]) -> bool:
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
            announcement = None  # compared once
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

    def _step(self, operation: RegionOperation) -> bool:
        """True: the operation has ended."""
        try:
            if self._round_sync.step(operation):
                self._leave(operation, None)
            else:
                operation.moved = monotonic()
        except BaseException as error:  # noqa: BLE001 - for example of a user's function: it becomes the operation's error
            self._fail(operation, error)
        return operation.done

    def _fail(self, operation: RegionOperation, error: BaseException) -> None:
        if isinstance(error, RankAborted):
            self._abort_too(operation, error.index)
        elif isinstance(error, FingerprintDiffers):
            theirs = self.records.taken(self.records.all[error.index], operation.order_number)
            self._disagree(operation, error.index, theirs)
        else:
            self._abort(operation, error)

    def _abort_too(self, operation: RegionOperation, index: int) -> None:
        """Abort as that rank did; fail with a mismatch if the announcements show one."""
        found = self._announced_difference(operation)
        if found is None:
            self._abort(operation, self._members.aborted(index, operation.name))
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

    def _abort(self, operation: RegionOperation, error: BaseException) -> None:
        operation.close()
        self._round_sync.abort(operation)
        self._leave(operation, error)

    def _disagree(self, operation: RegionOperation, index: int, theirs: Fingerprint) -> None:
        """No abort mark: the others must see the mismatch."""
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

    # -- called by the driver ----------------------------------------------------------------------------

    @property
    def spins(self) -> bool:
        return bool(self._posted)

    def poll(self) -> bool:
        """Also called by posting threads."""
        if not self._posted or not self._region_lock.acquire(False):
            return False
        try:
            return self._advance()
        finally:
            self._region_lock.release()

    def _advance(self) -> bool:
        """Published rounds of lost peers count: advance first, then fail the rest."""
        happened = False
        while (operation := self._posted.get(self._head)) is not None and not (self.closed or self._differs):
            if operation.done:  # cancelled before its turn
                self._abort(operation, Cancelled())
            elif not self._advance_one(operation):
                break
            happened = True
        if self._ended is not None:
            return self._fail_all(self._ended) or happened
        return happened

    def _advance_one(self, operation: RegionOperation) -> bool:
        moved = not operation.begun
        if moved:
            self._round_sync.begin(operation)
        while self._round_sync.reached(operation.wants):
            moved = True
            if self._step(operation):
                return True
        aborted_rank = self._round_sync.aborted_rank(operation.order_number)  # then waiting for the others is useless
        if aborted_rank is not None:
            self._fail(operation, RankAborted(aborted_rank))
            return True
        return moved

    def prepare_sleep(self) -> bool:
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
        if self.closed:
            self._progress.check()
            raise copy(self._ended) if self._ended is not None else UsageError(_CLOSED)

    def awaited(self, operation: RegionOperation) -> AwaitedPeer:
        head = self._posted.get(self._head) or operation
        with self._region_lock:
            missing = None if self.closed else self._round_sync.missing(max(head.wants, head.base + 1))
        return AwaitedPeer() if missing is None else self._members.awaited(missing)

    def cancel(self, operation: RegionOperation) -> None:
        """On return nothing accesses its arrays."""
        with self._region_lock:
            if operation.done:
                return
            if operation.begun and not self.closed:
                self._abort(operation, Cancelled(operation=operation.name))
            else:  # it keeps its order number until its turn
                operation.close()
                with operation.lock:
                    operation.finish(Cancelled(operation=operation.name))
        self._progress.wake()  # the driver continues with the next

    def fail(self, error: BaseException) -> None:
        self._ended = self._ended or error
        self._progress.wake()

    def close(self) -> None:
        if self.closed:
            return
        self._unfork()
        self._progress.remove_poller(self)
        with self._region_lock:
            self._ended = self._ended or UsageError(_CLOSED)
            self._fail_all(self._ended)
            self._release()
        self._progress.wake()

    def _release(self) -> None:
        """Also called in a forked child."""
        self.closed = True
        self.plans.release()
        self.slots.release()
        self.records.release()
        self._memory.close()


Row = NDArray[Any]
"""Flat and contiguous."""


class SharedRegion:
    """One rank's access to the region. Any thread may wait for operations. Close it before the node."""

    def __init__(
        self,
        progress: Progress,
        memory: RegionMemory,
        rank: int,
        members: RegionPeers,
        wake_calls: Sequence[Callable[[], None]],
    ) -> None:
        """`wake_calls` wake each rank's sleeping process. The region closes the memory."""
        self.rank = rank
        self.size = memory.geometry.size
        self._queue = RegionQueue(progress, memory, rank, members, wake_calls)
        self._slots = self._queue.slots
        self._records = self._queue.records
        self._plans = self._queue.plans
        self._reserved = 1

    # -- order numbers and announcements -----------------------------------------------------------------

    def reserve(self, count: int = 1) -> int:
        """Return the first of `count` consecutive order numbers, each to be used or skipped. Callers serialise this."""
        order_number = self._reserved
        self._reserved += count
        return order_number

    def skip(self, order_number: int, rounds: int) -> None:
        """Take no part in an operation; the others see an abort."""
        self._queue.skip(order_number, rounds)

    def announce(self, sequence: int, fingerprint: Fingerprint) -> None:
        """This rank has reached a collective. UsageError if closed."""
        self._queue.check()
        self._records.announce(sequence, fingerprint)

    def disagreement(self, sequence: int) -> tuple[int, Fingerprint] | None:
        """A rank whose announcement differs, and its fingerprint. Only the last eight collectives are kept."""
        return None if self._queue.closed else self._records.disagreement(sequence)

    def arrivals(self, sequence: int) -> list[int | None]:
        return [None] * self.size if self._queue.closed else self._records.arrivals(sequence)

    # -- operations ------------------------------------------------------------------------------------

    def barrier(self, order_number: int, *, announcement: PublishedCall | None = None, spin: bool = False) -> Operation:
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
        """`out` (default: `array`) becomes the reduction in rank order."""
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
        """`fold` replaces the reduction if `out` has another dtype or other hosts take part."""
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
        return self._queue.start(
            "broadcast",
            order_number,
            announcement,
            shared_region_rounds.region_broadcast(self._slots, array, root),
            spin,
        )

    # -- end ---------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Fail everything that cannot be completed. Any thread, also with the node's lock."""
        self._queue.fail(error)

    def close(self) -> None:
        """Idempotent."""
        self._queue.close()
