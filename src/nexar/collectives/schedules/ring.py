"""Schedules on a ring: ring, chain and pairwise exchange.

Ring: each rank sends the minimum, c·(n-1)/n elements per pass. Chunk i starts at rank i + 1 and is complete at rank i,
so the order differs by chunk and the operation must commute. Segment j depends only on segment j of the previous round,
so it is sent while later ones are reduced.

Chain: the last rank is done after s + n - 2 segment times (s segments), and no rank sends the vector twice.

Pairwise: in round k each rank sends to the rank k above and receives from the rank k below, so no rank has two senders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from nexar.arrays.views import Span, split
from nexar.collectives.schedule import Combine, LocalCopy, Range, RecvStep, SendStep, Step
from nexar.collectives.schedules.blocks import most_tiles, part, tiles


def ring_reduce_scatter(
    rank: int, size: int, spans: Sequence[Span], *, segment: int = 0, tag: int = 0
) -> Iterator[Step]:
    """Rank i ends with the reduction of block i; the rest is partial. Commutative only."""
    cut = [tiles(span, segment) for span in spans]
    return _ring_steps(rank, size, cut, first=rank - 1, how=Combine.BEFORE, tag=tag)


def ring_all_gather(rank: int, size: int, spans: Sequence[Span], *, segment: int = 0, tag: int = 0) -> Iterator[Step]:
    """Rank i begins with block i in buffer 0; all end with all."""
    cut = [tiles(span, segment) for span in spans]
    return _ring_steps(rank, size, cut, first=rank, how=Combine.COPY, tag=tag)


def ring_all_reduce(rank: int, size: int, count: int, *, segment: int = 0) -> Iterator[Step]:
    """All-reduce of buffer 0. Commutative only."""
    spans = split(count, size)
    yield from ring_reduce_scatter(rank, size, spans, segment=segment)
    tag = (size - 1) * most_tiles(spans, segment)
    yield from ring_all_gather(rank, size, spans, segment=segment, tag=tag)


def _ring_steps(
    rank: int, size: int, cut: Sequence[tuple[Span, ...]], *, first: int, how: Combine, tag: int
) -> Iterator[Step]:
    """Chunk `first` is sent first; a received chunk is sent in the next round."""
    most = max(map(len, cut))
    above, below = (rank + 1) % size, (rank - 1) % size
    for k in range(size - 1):
        away, coming = cut[(first - k) % size], cut[(first - k - 1) % size]
        for number, (out, into) in enumerate(zip_longest(away, coming), start=tag + k * most):
            sends = (SendStep(above, part(out), number),) if out else ()
            yield Step(sends, (RecvStep(below, part(into), number, how),) if into else ())


def chain_broadcast(rank: int, size: int, count: int, root: int, *, segment: int = 0) -> Iterator[Step]:
    """Buffer 0 of the root to all."""
    spans = tiles(Span(0, count), segment)
    position = (rank - root) % size
    below = (rank - 1) % size if position else None
    above = (rank + 1) % size if position < size - 1 else None
    return _chain_steps(below, above, spans, Combine.COPY)


def chain_scan(rank: int, size: int, count: int, *, segment: int = 0) -> Iterator[Step]:
    """Inclusive scan of buffer 0, as left fold."""
    spans = tiles(Span(0, count), segment)
    return _chain_steps(rank - 1 if rank else None, rank + 1 if rank < size - 1 else None, spans, Combine.BEFORE)


def chain_exclusive_scan(rank: int, size: int, count: int, *, segment: int = 0) -> Iterator[Step]:
    """Exclusive scan of buffer 0, as left fold; unchanged on rank 0. Buffer 1 is the inclusive scan to send."""
    spans = tiles(Span(0, count), segment)
    yield Step(then=(LocalCopy(Range(1, 0, count), Range(0, 0, count), Combine.COPY),))
    for j, (coming, away) in enumerate(staggered(spans, rank > 0)):
        sends = (SendStep(rank + 1, part(away, 1), j - (rank > 0)),) if away and rank < size - 1 else ()
        if coming and rank > 0:
            then = (LocalCopy(part(coming, 1), part(coming), Combine.BEFORE),)
            yield Step(sends, (RecvStep(rank - 1, part(coming), j, Combine.COPY),), then)
        else:
            yield Step(sends)


def _chain_steps(below: int | None, above: int | None, spans: Sequence[Span], how: Combine) -> Iterator[Step]:
    for j, (coming, away) in enumerate(staggered(spans, below is not None)):
        sends = (SendStep(above, part(away), j - (below is not None)),) if away and above is not None else ()
        receives = (RecvStep(below, part(coming), j, how),) if coming and below is not None else ()
        yield Step(sends, receives)


def staggered(spans: Sequence[Span], late: bool) -> Iterator[tuple[Span | None, Span | None]]:
    """Segments to receive and to send per step; a receiver sends one step later."""
    return zip_longest(spans, [None, *spans] if late else spans)


def pairwise_reduce_scatter(rank: int, size: int, spans: Sequence[Span]) -> Iterator[Step]:
    """Rank i ends with the reduction of block i; others are unchanged. Commutative only."""
    for distance in range(1, size):
        above, below = (rank + distance) % size, (rank - distance) % size
        yield Step((SendStep(above, part(spans[above]), 0),), (RecvStep(below, part(spans[rank]), 0, Combine.BEFORE),))


def pairwise_all_to_all(rank: int, size: int, blocks: Sequence[Span]) -> Iterator[Step]:
    """As direct_all_to_all."""
    yield Step(then=(LocalCopy(part(blocks[rank], 1), part(blocks[rank]), Combine.COPY),))
    for distance in range(1, size):
        above, below = (rank + distance) % size, (rank - distance) % size
        yield Step(
            (SendStep(above, part(blocks[above]), 0),), (RecvStep(below, part(blocks[below], 1), 0, Combine.COPY),)
        )
