"""Everybody to everybody, in one step each way: the shortest way, and the one whose order is plain.

Whoever reduces here first has everybody's own contribution, and folds them from rank 0 up: ((x0 ⊕ x1) ⊕ x2) … The
order is the same for every element whatever the world's hosts, so the result is the same in every run and on every way
that folds so: this is what `deterministic=True` means, and what an operation that does not commute may ask for. It
costs memory for everybody's contributions, no more bytes than a ring does (`gather_fold`: n times as many, in one
step), and n-1 messages at once.

Nobody leaves before everybody has come: messages without a payload.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from nexar.arrays.views import Span, split
from nexar.collectives.schedule import Combine, LocalCopy, LocalFold, Range, RecvStep, SendStep, Step
from nexar.collectives.schedules.blocks import part, tiles, whole


def direct_all_gather(rank: int, size: int, spans: Sequence[Span]) -> Iterator[Step]:
    """Rank i begins with block i in its place in buffer 0; all end with all blocks."""
    sends = tuple(SendStep(peer, part(spans[rank]), 0) for peer in _others(rank, size))
    yield Step(sends, tuple(RecvStep(peer, part(spans[peer]), 0, Combine.COPY) for peer in _others(rank, size)))


def direct_all_to_all(rank: int, size: int, inputs: Sequence[Span], outputs: Sequence[Span]) -> Iterator[Step]:
    """Block i of `inputs`, in buffer 0, is for rank i; block i of `outputs`, in buffer 1, is from it."""
    sends = tuple(SendStep(peer, part(inputs[peer]), 0) for peer in _others(rank, size))
    receives = tuple(RecvStep(peer, part(outputs[peer], 1), 0, Combine.COPY) for peer in _others(rank, size))
    yield Step(sends, receives, (LocalCopy(part(outputs[rank], 1), part(inputs[rank]), Combine.COPY),))


def gather_fold(rank: int, size: int, count: int) -> Iterator[Step]:
    """All-reduce of buffer 0 in place: everybody gets everything, and folds it. Buffer 1: everybody's (size·count)."""
    sends = tuple(SendStep(peer, whole(count), 0) for peer in _others(rank, size))
    yield Step(sends, *_take(rank, size, [(Span(0, count),)] * size, 0))


def gather_fold_to(rank: int, size: int, count: int, root: int) -> Iterator[Step]:
    """Reduce buffer 0 to the root, which folds everybody's. Buffer 1, at the root: everybody's (size·count)."""
    if rank == root:
        yield Step((), *_take(rank, size, [(Span(0, count),)] * size, 0))
    else:
        yield Step(sends=(SendStep(root, whole(count), 0),))


def direct_reduce_scatter(rank: int, size: int, spans: Sequence[Span], *, segment: int = 0) -> Iterator[Step]:
    """Rank i ends with the fold of block i, in place in buffer 0; the other blocks stay as they were.

    Buffer 1: everybody's contributions to this rank's block (size · its count).
    """
    cut = [tiles(span, segment) for span in spans]
    for j in range(max(map(len, cut))):
        yield Step(_give(rank, size, cut, j), *_take(rank, size, cut, j))


def direct_all_reduce(rank: int, size: int, count: int, *, segment: int = 0) -> Iterator[Step]:
    """Buffer 0 in place: rank i folds share i, and tells everybody. Buffer 1: as for reduce_scatter.

    With segments, each one is told while the next one's contributions are on their way.
    """
    cut = [tiles(span, segment) for span in split(count, size)]
    most = max(map(len, cut))
    for j in range(most + 1):
        told = tuple(
            SendStep(peer, part(tile), most + j) for tile in _at(cut[rank], j - 1) for peer in _others(rank, size)
        )
        heard = tuple(
            RecvStep(peer, part(tile), most + j, Combine.COPY)
            for peer in _others(rank, size)
            for tile in _at(cut[peer], j - 1)
        )
        receives, then = _take(rank, size, cut, j)
        yield Step(_give(rank, size, cut, j) + told, receives + heard, then)


_Cut = Sequence[tuple[Span, ...]]  # everybody's block, in segments


def _give(rank: int, size: int, cut: _Cut, j: int) -> tuple[SendStep, ...]:
    """This rank's contributions to segment j of everybody's block."""
    return tuple(SendStep(peer, part(tile), j) for peer in _others(rank, size) for tile in _at(cut[peer], j))


def _take(rank: int, size: int, cut: _Cut, j: int) -> tuple[tuple[RecvStep, ...], tuple[LocalCopy | LocalFold, ...]]:
    """Everybody's contributions to segment j of this rank's block, a row of buffer 1 for each, and their fold."""
    mine = cut[rank]
    if j >= len(mine):
        return (), ()
    width, offset = mine[-1].stop - mine[0].start, mine[j].start - mine[0].start
    starts = (peer * width + offset for peer in range(size))
    rows = tuple(Range(1, start, start + mine[j].count) for start in starts)
    receives = tuple(RecvStep(peer, rows[peer], j, Combine.COPY) for peer in _others(rank, size))
    return receives, (LocalCopy(rows[rank], part(mine[j]), Combine.COPY), LocalFold(part(mine[j]), rows))


def _at(mine: tuple[Span, ...], j: int) -> tuple[Span, ...]:
    """Segment j, if there are so many."""
    return mine[j : j + 1] if j >= 0 else ()


def _others(rank: int, size: int) -> Iterator[int]:
    """Everybody begins with the rank above: so not all of them crowd upon rank 0."""
    return ((rank + distance) % size for distance in range(1, size))


NO_ELEMENTS: Final = Range(0, 0, 0)


def dissemination_barrier(rank: int, size: int) -> Iterator[Step]:
    """In round k each rank tells the one 2^k above it, and hears from the one 2^k below it, round the ring.

    After ceil(log2 n) rounds everybody has heard from everybody, directly or through others.
    """
    distance, k = 1, 0
    while distance < size:
        above, below = (rank + distance) % size, (rank - distance) % size
        yield Step((SendStep(above, NO_ELEMENTS, k),), (RecvStep(below, NO_ELEMENTS, k, Combine.COPY),))
        distance, k = distance * 2, k + 1


def two_phase_barrier(rank: int, size: int) -> Iterator[Step]:
    """All tell rank 0, then rank 0 tells all: 2(n-1) messages, fewer than any other way in a small world."""
    if rank:
        yield Step(sends=(SendStep(0, NO_ELEMENTS, 0),))
        yield Step(receives=(RecvStep(0, NO_ELEMENTS, 1, Combine.COPY),))
        return
    others = range(1, size)
    yield Step(receives=tuple(RecvStep(peer, NO_ELEMENTS, 0, Combine.COPY) for peer in others))
    yield Step(sends=tuple(SendStep(peer, NO_ELEMENTS, 1) for peer in others))
