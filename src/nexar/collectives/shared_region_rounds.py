"""Collectives in a shared region, and their round synchronisation.

An operation is a generator. At each `yield`, this rank's part of the round is in its slot; the generator continues when
all parts are. Then this rank may read all slots of that parity and write its slot of the other. Folds are in rank
order, so results are bit-identical on all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.operators import Reduction
from nexar.arrays.views import Span
from nexar.collectives.shared_region_layout import (
    ABORTED_UP_TO,
    Fold,
    PublishedCall,
    RegionPlans,
    RegionRecords,
    RegionSlots,
    TwoRounds,
    folding,
)
from nexar.errors import InternalError
from nexar.links.operation import Operation
from nexar.links.process_hooks import interrupts
from nexar.transport.shm.ring import fence
from nexar.types import AwaitedPeer

if TYPE_CHECKING:
    from nexar.collectives.shared_region import RegionQueue

Row = NDArray[Any]
"""Flat and contiguous."""

Rounds = tuple[int, Iterator[None]]
"""Number of yields, and the operation."""


def region_barrier() -> Rounds:
    """No rank leaves before all have arrived."""
    return 1, iter((None,))


# -- all_reduce and reduce -------------------------------------------------------------------------------------------


def region_all_reduce(
    plans: RegionPlans, array: Row, reduction: Reduction, out: Row | None, root: int | None = None
) -> Rounds:
    """`out` may be `array`. With a root, others pass None."""
    plan = plans.of(array, reduction)
    if plan is not None:
        return plan.rounds, plan.run(array, out, root)
    chunks = -(-len(array) // plans.slots.capacity(array.dtype))
    return chunks + 1, _reduce_chunks(plans.slots, array, reduction, out, root)


def _reduce_chunks(
    slots: RegionSlots, array: Row, reduction: Reduction, out: Row | None, root: int | None
) -> Iterator[None]:
    """In each round a rank writes chunk k and reduces its share of chunk k - 1."""
    capacity, parity = slots.capacity(array.dtype), slots.parity
    fold = folding(slots.size, array.dtype, reduction)
    whole = TwoRounds(slots, capacity, array.dtype, fold)
    before: tuple[TwoRounds, slice] | None = None
    for start in range(0, len(array), capacity):
        chunk = slice(start, min(start + capacity, len(array)))
        count = chunk.stop - start
        plan = whole if count == capacity else TwoRounds(slots, count, array.dtype, fold)
        plan.give(parity, array[chunk])
        if before is not None:
            before[0].work(parity ^ 1, array[before[1]], _part(out, before[1]), root)
        yield
        if before is not None and out is not None:
            before[0].collect(parity ^ 1, out[before[1]])
        before = plan, chunk
        parity ^= 1
    assert before is not None
    before[0].work(parity ^ 1, array[before[1]], _part(out, before[1]), root)
    yield
    if out is not None:
        before[0].collect(parity ^ 1, out[before[1]])


def _part(out: Row | None, chunk: slice) -> Row | None:
    return None if out is None else out[chunk]


# -- pieces of an array for each rank --------------------------------------------------------------------------------


def region_reduce_scatter(slots: RegionSlots, array: Row, out: Row, spans: Sequence[Span], fold: Fold) -> Rounds:
    """`out` may be part of `array`."""
    return _tiles(spans, _piece(slots, array)), _reduce_pieces(slots, array, out, spans, fold)


def _piece(slots: RegionSlots, array: Row) -> int:
    return slots.capacity(array.dtype) // slots.size


def _reduce_pieces(slots: RegionSlots, array: Row, out: Row, spans: Sequence[Span], fold: Fold) -> Iterator[None]:
    rows, parity, rank, piece = slots.of(array.dtype), slots.parity, slots.rank, _piece(slots, array)
    mine = spans[rank]
    for tile in range(_tiles(spans, piece)):
        given = rows[parity]
        for other, (start, stop) in enumerate(_tile(span, tile, piece) for span in spans):
            if other != rank:
                given[rank][other * piece : other * piece + stop - start] = array[start:stop]
        yield
        start, stop = _tile(mine, tile, piece)
        count = stop - start
        inputs = [each[rank * piece : rank * piece + count] for each in given]
        inputs[rank] = array[start:stop]
        fold(out[start - mine.start : stop - mine.start], inputs)
        parity ^= 1


def region_all_gather(slots: RegionSlots, array: Row, out: Row, spans: Sequence[Span]) -> Rounds:
    """`array` may be a span of `out`."""
    piece = slots.capacity(array.dtype)
    return _tiles(spans, piece), _gather_pieces(slots, array, out, spans, piece)


def _gather_pieces(slots: RegionSlots, array: Row, out: Row, spans: Sequence[Span], piece: int) -> Iterator[None]:
    rows, parity, rank = slots.of(array.dtype), slots.parity, slots.rank
    mine = spans[rank]
    if not np.may_share_memory(array, out):
        out[mine.start : mine.stop] = array
    for tile in range(_tiles(spans, piece)):
        given = rows[parity]
        part = array[tile * piece : (tile + 1) * piece]
        given[rank][: len(part)] = part
        yield
        for other, span in enumerate(spans):
            if other != rank:
                start, stop = _tile(span, tile, piece)
                out[start:stop] = given[other][: stop - start]
        parity ^= 1


def region_broadcast(slots: RegionSlots, array: Row, root: int) -> Rounds:
    """`array` becomes the root's."""
    piece = slots.capacity(array.dtype)
    return _tiles([Span(0, len(array))], piece), _broadcast_pieces(slots, array, root, piece)


def _broadcast_pieces(slots: RegionSlots, array: Row, root: int, piece: int) -> Iterator[None]:
    rows, parity = slots.of(array.dtype), slots.parity
    for start in range(0, len(array), piece) or (0,):
        part = array[start : start + piece]
        slot = rows[parity][root][: len(part)]
        if slots.rank == root:
            slot[:] = part
            yield
        else:
            yield
            part[:] = slot
        parity ^= 1


def _tiles(spans: Sequence[Span], piece: int) -> int:
    """Number of rounds; at least one, so that empty calls synchronise."""
    return max(1, *(-(-(stop - start) // piece) for start, stop in spans))


def _tile(span: Span, tile: int, piece: int) -> Span:
    start = min(span.start + tile * piece, span.stop)
    return Span(start, min(start + piece, span.stop))


class RegionOperation(Operation):
    """A posted operation. The region lock guards it."""

    __slots__ = (
        "_label",
        "_owner",
        "announcement",
        "base",
        "begun",
        "body",
        "moved",
        "order_number",
        "rounds",
        "wants",
    )

    def __init__(
        self,
        owner: RegionQueue,
        label: str,
        order_number: int,
        announcement: PublishedCall | None,
        rounds: Rounds,
    ) -> None:
        super().__init__(owner.lock)
        self._owner = owner
        self._label = label
        self.order_number = order_number
        self.announcement = announcement
        self.rounds, self.body = rounds
        self.begun = False
        self.wants = 0  # all ranks must have published this round before it continues
        self.base = 0  # the last round before its first
        self.moved = 0.0  # when it last published a round

    @property
    def name(self) -> str:
        return self._label

    def close(self) -> None:
        self.body = iter(())

    def last_moved(self) -> float:
        return self.moved

    def awaited(self) -> AwaitedPeer:
        return self._owner.awaited(self)

    def cancel(self) -> None:
        self._owner.cancel(self)


_LONG_YIELD: Final = 100e-6  # seconds; a yield that took longer shows that others need this core
_MAX_CHECKS: Final = 128  # before the first yield: some microseconds
_MIN_CHECKS: Final = 4
_CHECKS_BETWEEN_YIELDS: Final = 8  # before each further yield
_FEW_YIELDS: Final = 2


class RankAborted(Exception):
    """A rank aborted the operation."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


class FingerprintDiffers(Exception):
    """A rank has another fingerprint."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


class RoundSync:
    """Round synchronisation, guarded by the region lock."""

    def __init__(self, records: RegionRecords, slots: RegionSlots, wake_calls: Sequence[Callable[[], None]]) -> None:
        self._records = records
        self._words = records.words
        self._others = records.others
        self._wake_calls = tuple((word, wake_calls[records.index(word)]) for word in records.others)
        self._slots = slots
        self.round = 0  # published by this rank
        self.settled = True  # no rank can still read what this rank wrote before
        self._checks_before_yield = _MAX_CHECKS

    def begin(self, operation: RegionOperation) -> None:
        """The first step waits until all have reached the end of the previous operation."""
        operation.begun = True
        operation.wants = operation.base = self.round

    def reached(self, wanted: int) -> bool:
        words = self._words
        for word in self._others:  # noqa: SIM110 - a generator costs more than the loop
            if words[word] < wanted:
                return False
        return True

    def missing(self, wanted: int) -> int | None:
        behind = (self._records.index(word) for word in self._others if self._words[word] < wanted)
        return next(behind, None)

    def aborted_rank(self, order_number: int) -> int | None:
        for word in self._others:
            if self._records.has_aborted(word, order_number):
                return self._records.index(word)
        return None

    def waits(self, operation: RegionOperation) -> bool:
        return not self.reached(operation.wants) and self.aborted_rank(operation.order_number) is None

    def spin(self, wanted: int, longest: float, ended: Callable[[], bool]) -> bool:
        """Whether all published the round within `longest` seconds. If one or two yields helped, a peer may need this
        core: the next spin yields earlier. If none was needed, later.
        """
        words, checks, limit, yields, last, until = self._words, 0, self._checks_before_yield, 0, 0.0, 0.0
        for word in self._others:
            while words[word] < wanted:
                checks += 1
                if checks < limit:
                    continue
                now = monotonic()
                if not yields:
                    until = now + longest
                elif now >= until or now - last > _LONG_YIELD or interrupts.pending or ended():
                    return False
                last = now
                os.sched_yield()
                yields += 1
                checks = limit - _CHECKS_BETWEEN_YIELDS
        if not yields:
            self._checks_before_yield = min(limit + 1, _MAX_CHECKS)
        elif yields <= _FEW_YIELDS:
            self._checks_before_yield = max(limit // 2, _MIN_CHECKS)
        return True

    def step(self, operation: RegionOperation) -> bool:
        """Returns whether it was the last step. Raises RankAborted, FingerprintDiffers, and errors of a user's
        function.
        """
        if self.round != operation.base:
            self.check(operation.order_number, operation.announcement if self.round == operation.base + 1 else None)
        else:
            self.settled = True
            self._slots.parity = (self.round + 1) & 1
            # not before: others may still read the entry of two order numbers ago
            if operation.announcement is not None:
                self._records.take(operation.order_number, operation.announcement[1])
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

    def abort(self, operation: RegionOperation) -> None:
        if not operation.begun:
            self.begin(operation)
        self._records.mark_aborted(operation.order_number)
        self.settled = False
        self.round = self._words[self._records.mine] = operation.base + operation.rounds
        fence()
        for _, wake_peer in self._wake_calls:
            wake_peer()

    def check(self, order_number: int, announcement: PublishedCall | None) -> None:
        """Raises RankAborted, and FingerprintDiffers if `announcement` is given."""
        records, words = self._records, self._words
        for word in self._others:
            if words[word + ABORTED_UP_TO] >= order_number and records.has_aborted(word, order_number):
                raise RankAborted(records.index(word))
            if announcement is not None and records.differs(word, order_number):
                raise FingerprintDiffers(records.index(word))

    def publish(self, number: int) -> None:
        """Also wakes ranks that wait for the round."""
        words = self._words
        self.round = words[self._records.mine] = number
        fence()
        for word, wake_peer in self._wake_calls:
            if words[word] >= number:
                wake_peer()
