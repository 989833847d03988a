"""Round the ring: each rank talks to its two neighbours only, and everybody sends all the time.

In n-1 rounds every chunk travels once round the ring. Each rank sends c·(n-1)/n elements per pass: as few as can be.

Chunk i starts its way above rank i, takes up every rank's share in passing, and comes home to rank i whole. Its shares
are combined from the rank above its home round to its home: the order is turned by a different amount for each chunk,
so the operation has to commute. One rank only makes the result of each chunk: all get the same bits.

Cut into segments, a round is several steps: segment j of a round depends on segment j of the round before and on
nothing else, so it can leave while the segments behind it are still being reduced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from nexar.arrays.partition import Span, split
from nexar.collectives.schedule import How, Receive, Send, Step
from nexar.collectives.schedules.blocks import most_tiles, part, tiles


def reduce_scatter(rank: int, size: int, spans: Sequence[Span], *, segment: int = 0, tag: int = 0) -> Iterator[Step]:
    """Rank i ends with the reduction of block i, in place; the rest of buffer 0 holds partial results. Commutative."""
    ways, most = ((rank + 1) % size, (rank - 1) % size), most_tiles(spans, segment)
    for k in range(size - 1):
        away, coming = spans[(rank - k - 1) % size], spans[(rank - k - 2) % size]
        yield from _round(ways, tiles(away, segment), tiles(coming, segment), How.LEFT, tag + k * most)


def all_gather(rank: int, size: int, spans: Sequence[Span], *, segment: int = 0, tag: int = 0) -> Iterator[Step]:
    """Rank i begins with block i in its place in buffer 0; all end with all blocks."""
    ways, most = ((rank + 1) % size, (rank - 1) % size), most_tiles(spans, segment)
    for k in range(size - 1):
        away, coming = spans[(rank - k) % size], spans[(rank - k - 1) % size]
        yield from _round(ways, tiles(away, segment), tiles(coming, segment), How.COPY, tag + k * most)


def all_reduce(rank: int, size: int, count: int, *, segment: int = 0) -> Iterator[Step]:
    """Buffer 0 in place: twice round the ring, to reduce and to tell. `segment` makes it a pipeline. Commutative."""
    spans = split(count, size)
    yield from reduce_scatter(rank, size, spans, segment=segment)
    tag = (size - 1) * most_tiles(spans, segment)
    yield from all_gather(rank, size, spans, segment=segment, tag=tag)


def _round(ways: tuple[int, int], away: Sequence[Span], coming: Sequence[Span], how: How, tag: int) -> Iterator[Step]:
    above, below = ways
    for j, (out, into) in enumerate(zip_longest(away, coming)):
        sends = (Send(above, part(out), tag + j),) if out else ()
        receives = (Receive(below, part(into), tag + j, how),) if into else ()
        yield Step(sends, receives)
