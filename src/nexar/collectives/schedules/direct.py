"""Direct schedules, in which every rank communicates with every other in one step; and barriers.

A reducing rank folds all contributions from rank 0 up: ((x0 ⊕ x1) ⊕ x2) …. So the result is the same for any placement,
as `deterministic=True` requires.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from nexar.arrays.views import Span, split
from nexar.collectives.schedule import Combine, LocalCopy, LocalFold, Range, RecvStep, SendStep, Step
from nexar.collectives.schedules.blocks import part, tiles, whole


def direct_all_gather(rank: int, size: int, spans: Sequence[Span]) -> Iterator[Step]:
    """Rank i begins with block i in buffer 0; all end with all."""
    sends = tuple(SendStep(peer, part(spans[rank]), 0) for peer in _others(rank, size))
    yield Step(sends, tuple(RecvStep(peer, part(spans[peer]), 0, Combine.COPY) for peer in _others(rank, size)))


def direct_all_to_all(rank: int, size: int, blocks: Sequence[Span]) -> Iterator[Step]:
    """Block i of buffer 0 goes to rank i; block i of buffer 1 comes from it."""
    sends = tuple(SendStep(peer, part(blocks[peer]), 0) for peer in _others(rank, size))
    receives = tuple(RecvStep(peer, part(blocks[peer], 1), 0, Combine.COPY) for peer in _others(rank, size))
    yield Step(sends, receives, (LocalCopy(part(blocks[rank], 1), part(blocks[rank]), Combine.COPY),))


def gather_fold(rank: int, size: int, count: int) -> Iterator[Step]:
    """All-reduce of buffer 0: every rank folds everything. Buffer 1: size·count."""
    sends = tuple(SendStep(peer, whole(count), 0) for peer in _others(rank, size))
    yield Step(sends, *_fold_segment(rank, size, [(Span(0, count),)] * size, 0))


def gather_fold_to(rank: int, size: int, count: int, root: int) -> Iterator[Step]:
    """Reduce buffer 0 to the root. Buffer 1, at the root: size·count."""
    if rank == root:
        yield Step((), *_fold_segment(rank, size, [(Span(0, count),)] * size, 0))
    else:
        yield Step(sends=(SendStep(root, whole(count), 0),))


def direct_reduce_scatter(rank: int, size: int, spans: Sequence[Span], *, segment: int = 0) -> Iterator[Step]:
    """Rank i ends with the fold of block i; other blocks are unchanged. Buffer 1: size · its count."""
    cut = [tiles(span, segment) for span in spans]
    for j in range(max(map(len, cut))):
        yield Step(_contributions(rank, size, cut, j), *_fold_segment(rank, size, cut, j))


def direct_all_reduce(rank: int, size: int, count: int, *, segment: int = 0) -> Iterator[Step]:
    """All-reduce of buffer 0: rank i folds share i and sends it to all. Buffer 1: as in direct_reduce_scatter."""
    cut = [tiles(span, segment) for span in split(count, size)]
    most = max(map(len, cut))
    for j in range(most + 1):
        sent_results = tuple(
            SendStep(peer, part(tile), most + j) for tile in _at(cut[rank], j - 1) for peer in _others(rank, size)
        )
        received_results = tuple(
            RecvStep(peer, part(tile), most + j, Combine.COPY)
            for peer in _others(rank, size)
            for tile in _at(cut[peer], j - 1)
        )
        receives, then = _fold_segment(rank, size, cut, j)
        yield Step(_contributions(rank, size, cut, j) + sent_results, receives + received_results, then)


_Cut = Sequence[tuple[Span, ...]]  # the block of each rank, in segments


def _contributions(rank: int, size: int, cut: _Cut, j: int) -> tuple[SendStep, ...]:
    return tuple(SendStep(peer, part(tile), j) for peer in _others(rank, size) for tile in _at(cut[peer], j))


def _fold_segment(
    rank: int, size: int, cut: _Cut, j: int
) -> tuple[tuple[RecvStep, ...], tuple[LocalCopy | LocalFold, ...]]:
    mine = cut[rank]
    if j >= len(mine):
        return (), ()
    width, offset = mine[-1].stop - mine[0].start, mine[j].start - mine[0].start
    starts = (peer * width + offset for peer in range(size))
    rows = tuple(Range(1, start, start + mine[j].count) for start in starts)
    receives = tuple(RecvStep(peer, rows[peer], j, Combine.COPY) for peer in _others(rank, size))
    return receives, (LocalCopy(rows[rank], part(mine[j]), Combine.COPY), LocalFold(part(mine[j]), rows))


def _at(mine: tuple[Span, ...], j: int) -> tuple[Span, ...]:
    return mine[j : j + 1] if j >= 0 else ()


def _others(rank: int, size: int) -> Iterator[int]:
    """From the next rank on, so that not all start with rank 0."""
    return ((rank + distance) % size for distance in range(1, size))


NO_ELEMENTS: Final = Range(0, 0, 0)


def dissemination_barrier(rank: int, size: int) -> Iterator[Step]:
    """In round k each rank sends 2^k ranks up and receives from 2^k below."""
    distance, k = 1, 0
    while distance < size:
        above, below = (rank + distance) % size, (rank - distance) % size
        yield Step((SendStep(above, NO_ELEMENTS, k),), (RecvStep(below, NO_ELEMENTS, k, Combine.COPY),))
        distance, k = distance * 2, k + 1


def two_phase_barrier(rank: int, size: int) -> Iterator[Step]:
    """To rank 0, then back: fewest messages in a small world."""
    if rank:
        yield Step(sends=(SendStep(0, NO_ELEMENTS, 0),))
        yield Step(receives=(RecvStep(0, NO_ELEMENTS, 1, Combine.COPY),))
        return
    others = range(1, size)
    yield Step(receives=tuple(RecvStep(peer, NO_ELEMENTS, 0, Combine.COPY) for peer in others))
    yield Step(sends=tuple(SendStep(peer, NO_ELEMENTS, 1) for peer in others))
