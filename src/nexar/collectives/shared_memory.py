"""Collectives between ranks that share memory: what each copies and reduces in which round.

An operation is a generator. Each `yield` says: my part of this round is in my slot; go on when everybody's is. What the
arena promises in return (see arena): after the yield all slots of that parity are as everybody left them, and until
this rank yields again they belong, byte by byte, to whom the operation gives them; and this rank's slot of the *other*
parity is its own to write. So between two yields a rank deals with round r and prepares round r + 1.

Rank order: every reduction is folded in the order of ranks, whoever does it. So results are the same bits on all ranks,
at every size, in every run.

The number of rounds follows from the operation, the counts, the dtype and the number of ranks alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.operations import Reduction
from nexar.arrays.partition import Span
from nexar.collectives.arena_plans import Fold, Plans, TwoRounds, folding
from nexar.collectives.arena_slots import Slots

Row = NDArray[Any]
"""Flat and contiguous."""

Rounds = tuple[int, Iterator[None]]
"""An operation: so many yields, and what happens around them."""


def barrier() -> Rounds:
    """Nobody leaves before everybody has come."""
    return 1, iter((None,))


# -- all_reduce and reduce -------------------------------------------------------------------------------------------


def all_reduce(plans: Plans, array: Row, reduction: Reduction, out: Row | None, root: int | None = None) -> Rounds:
    """`out`, which may be `array`, becomes the reduction of all arrays. With a root only its does: others give None."""
    plan = plans.of(array, reduction)
    if plan is not None:
        return plan.rounds, plan.run(array, out, root)
    chunks = -(-len(array) // plans.slots.capacity(array.dtype))
    return chunks + 1, _reduce_chunks(plans.slots, array, reduction, out, root)


def _reduce_chunks(slots: Slots, array: Row, reduction: Reduction, out: Row | None, root: int | None) -> Iterator[None]:
    """A pipeline: in each round a rank gives in chunk k and works on its share of chunk k - 1."""
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


def reduce_scatter(slots: Slots, array: Row, out: Row, spans: Sequence[Span], fold: Fold) -> Rounds:
    """`out` becomes this rank's span of the reduction. It may lie in `array`; else its dtype is what `fold` writes."""
    return _tiles(spans, _piece(slots, array)), _reduce_pieces(slots, array, out, spans, fold)


def _piece(slots: Slots, array: Row) -> int:
    """Elements for each rank at a time."""
    return slots.capacity(array.dtype) // slots.size


def _reduce_pieces(slots: Slots, array: Row, out: Row, spans: Sequence[Span], fold: Fold) -> Iterator[None]:
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


def all_gather(slots: Slots, array: Row, out: Row, spans: Sequence[Span]) -> Rounds:
    """`out` becomes everybody's array, each in its span. `array` may be that span of `out`."""
    piece = slots.capacity(array.dtype)
    return _tiles(spans, piece), _gather_pieces(slots, array, out, spans, piece)


def _gather_pieces(slots: Slots, array: Row, out: Row, spans: Sequence[Span], piece: int) -> Iterator[None]:
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


def broadcast(slots: Slots, array: Row, root: int) -> Rounds:
    """`array` becomes that of `root`."""
    piece = slots.capacity(array.dtype)
    return _tiles([Span(0, len(array))], piece), _broadcast_pieces(slots, array, root, piece)


def _broadcast_pieces(slots: Slots, array: Row, root: int, piece: int) -> Iterator[None]:
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
    """Rounds for the longest span; one at least, so that who calls for nothing still meets the others."""
    return max(1, *(-(-(stop - start) // piece) for start, stop in spans))


def _tile(span: Span, tile: int, piece: int) -> Span:
    start = min(span.start + tile * piece, span.stop)
    return Span(start, min(start + piece, span.stop))
