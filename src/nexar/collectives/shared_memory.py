"""Collectives between ranks that share memory: what each copies and reduces in which round.

An operation is a generator. Each `yield` says: my part of this round is in my slot; go on when everybody's is. What the
arena promises in return (see arena): after the yield all slots of that parity hold still until this rank yields again,
and this rank's slot of the *other* parity is its own to write. So between two yields a rank reads round r and writes
round r + 1, and no byte is waited for twice.

Rank order: every reduction is folded in the order of ranks, whoever does it. So results are the same bits on all ranks,
at every size, in every run.

The number of rounds follows from the operation, the counts, the dtype and the number of ranks alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.operations import Reduction
from nexar.arrays.partition import Span, split
from nexar.arrays.reduce import finish, folder
from nexar.collectives.arena_slots import Slots, Views

SMALL_BYTES: Final = 64 << 10
"""Of what all ranks give in together: up to here each folds everything itself, in one round. Above it each folds its
share and they exchange the shares, in two.
"""

Row = NDArray[Any]
"""Flat and contiguous."""


class Rounds(NamedTuple):
    """An operation: so many yields, and what happens around them."""

    number: int
    body: Iterator[None]


def barrier() -> Rounds:
    """Nobody leaves before everybody has come."""
    return Rounds(1, iter((None,)))


# -- all_reduce and reduce -------------------------------------------------------------------------------------------


def small_bytes(slots: Slots) -> int:
    """Up to here an all_reduce has one round."""
    return min(SMALL_BYTES // slots.size, slots.slot_bytes)


def all_reduce(slots: Slots, array: Row, reduction: Reduction, out: Row | None) -> Rounds:
    """`out`, which may be `array`, becomes the reduction of all arrays. None: this rank does not want it."""
    if array.nbytes <= small_bytes(slots):
        return Rounds(1, _fold_everything(slots, array, reduction, out))
    chunks = -(-len(array) // slots.of(array.dtype).capacity)
    return Rounds(chunks + 1, _exchange_shares(slots, array, reduction, out))


def _fold_everything(slots: Slots, array: Row, reduction: Reduction, out: Row | None) -> Iterator[None]:
    count, parity = len(array), slots.parity
    given = slots.of(array.dtype).given[parity]
    given[slots.rank][:count] = array
    yield
    if out is not None:
        folder(reduction, array.dtype)(out, [each[:count] for each in given])
        finish(reduction, out, slots.size)


def _exchange_shares(slots: Slots, array: Row, reduction: Reduction, out: Row | None) -> Iterator[None]:
    """A pipeline: in each round a rank gives in chunk k and has worked out its share of chunk k - 1."""
    views, parity = slots.of(array.dtype), slots.parity
    before: _Chunk | None = None
    for start in range(0, len(array), views.capacity):
        chunk = _Chunk(slots, views, parity, array, start)
        chunk.give()
        if before is not None:
            before.work(reduction)
        yield
        if before is not None and out is not None:
            before.collect(out)
        before = chunk
        parity ^= 1
    assert before is not None
    before.work(reduction)
    yield
    if out is not None:
        before.collect(out)


class _Chunk:
    """What of the array goes through the slots at a time. A rank keeps its own share of it in its array."""

    __slots__ = ("_given", "_mine", "_rank", "_row", "_shares", "_size", "_start", "_worked")

    def __init__(self, slots: Slots, views: Views, parity: int, array: Row, start: int) -> None:
        self._rank, self._size, self._start = slots.rank, slots.size, start
        self._row = array[start : start + views.capacity]
        self._given = views.given[parity]
        self._worked = views.worked[parity ^ 1]  # one round later
        self._shares = split(len(self._row), slots.size)
        self._mine = self._shares[slots.rank]

    def give(self) -> None:
        """All but what only this rank needs."""
        mine, row, slot = self._mine, self._row, self._given[self._rank]
        if mine.start:
            slot[: mine.start] = row[: mine.start]
        if mine.stop < len(row):
            slot[mine.stop : len(row)] = row[mine.stop :]

    def work(self, reduction: Reduction) -> None:
        """My share of everybody's."""
        start, stop = self._mine
        inputs = [each[start:stop] for each in self._given]
        inputs[self._rank] = self._row[start:stop]
        worked = self._worked[self._rank][: stop - start]
        folder(reduction, worked.dtype)(worked, inputs)
        finish(reduction, worked, self._size)

    def collect(self, out: Row) -> None:
        """Everybody's share."""
        for (start, stop), worked in zip(self._shares, self._worked, strict=True):
            out[self._start + start : self._start + stop] = worked[: stop - start]


# -- pieces of an array for each rank --------------------------------------------------------------------------------


def reduce_scatter(slots: Slots, array: Row, out: Row, spans: Sequence[Span], reduction: Reduction) -> Rounds:
    """`out`, which may lie in `array`, becomes this rank's span of the reduction."""
    return Rounds(_tiles(spans, _piece(slots, array)), _reduce_pieces(slots, array, out, spans, reduction))


def _piece(slots: Slots, array: Row) -> int:
    """Elements for each rank at a time."""
    return slots.of(array.dtype).capacity // slots.size


def _reduce_pieces(slots: Slots, array: Row, out: Row, spans: Sequence[Span], reduction: Reduction) -> Iterator[None]:
    views, parity, rank, piece = slots.of(array.dtype), slots.parity, slots.rank, _piece(slots, array)
    fold = folder(reduction, array.dtype)
    mine = spans[rank]
    for tile in range(_tiles(spans, piece)):
        given = views.given[parity]
        for other, (start, stop) in enumerate(_tile(span, tile, piece) for span in spans):
            if other != rank:
                given[rank][other * piece : other * piece + stop - start] = array[start:stop]
        yield
        start, stop = _tile(mine, tile, piece)
        count = stop - start
        inputs = [each[rank * piece : rank * piece + count] for each in given]
        inputs[rank] = array[start:stop]
        into = out[start - mine.start : stop - mine.start]
        fold(into, inputs)
        finish(reduction, into, slots.size)
        parity ^= 1


def all_gather(slots: Slots, array: Row, out: Row, spans: Sequence[Span]) -> Rounds:
    """`out` becomes everybody's array, each in its span. `array` may be that span of `out`."""
    piece = slots.of(array.dtype).capacity
    return Rounds(_tiles(spans, piece), _gather_pieces(slots, array, out, spans, piece))


def _gather_pieces(slots: Slots, array: Row, out: Row, spans: Sequence[Span], piece: int) -> Iterator[None]:
    views, parity, rank = slots.of(array.dtype), slots.parity, slots.rank
    mine = spans[rank]
    if not np.may_share_memory(array, out):
        out[mine.start : mine.stop] = array
    for tile in range(_tiles(spans, piece)):
        given = views.given[parity]
        part = array[tile * piece : (tile + 1) * piece]
        given[rank][: len(part)] = part
        yield
        for other, span in enumerate(spans):
            if other != rank:
                start, stop = _tile(span, tile, piece)
                out[start:stop] = given[other][: stop - start]
        parity ^= 1


def broadcast(slots: Slots, array: Row, root: int) -> Rounds:
    """`array` becomes that of `root`."""
    piece = slots.of(array.dtype).capacity
    return Rounds(_tiles([Span(0, len(array))], piece), _broadcast_pieces(slots, array, root, piece))


def _broadcast_pieces(slots: Slots, array: Row, root: int, piece: int) -> Iterator[None]:
    views, parity = slots.of(array.dtype), slots.parity
    for start in range(0, len(array), piece) or (0,):
        part = array[start : start + piece]
        slot = views.given[parity][root][: len(part)]
        if slots.rank == root:
            slot[:] = part
            yield
        else:
            yield
            part[:] = slot
        parity ^= 1


def _tiles(spans: Sequence[Span], piece: int) -> int:
    """Rounds for the longest span; one at least, so that who calls for nothing still meets the others."""
    return max(1, *(-(-(stop - start) // piece) for start, stop in spans))


def _tile(span: Span, tile: int, piece: int) -> Span:
    start = min(span.start + tile * piece, span.stop)
    return Span(start, min(start + piece, span.stop))
