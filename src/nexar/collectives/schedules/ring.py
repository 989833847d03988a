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
    cut = [tiles(span, segment) for span in spans]
    return _pass_on(rank, size, cut, first=rank - 1, how=How.LEFT, tag=tag)


def all_gather(rank: int, size: int, spans: Sequence[Span], *, segment: int = 0, tag: int = 0) -> Iterator[Step]:
    """Rank i begins with block i in its place in buffer 0; all end with all blocks."""
    cut = [tiles(span, segment) for span in spans]
    return _pass_on(rank, size, cut, first=rank, how=How.COPY, tag=tag)


def all_reduce(rank: int, size: int, count: int, *, segment: int = 0) -> Iterator[Step]:
    """Buffer 0 in place: twice round the ring, to reduce and to tell. `segment` makes it a pipeline. Commutative."""
    spans = split(count, size)
    yield from reduce_scatter(rank, size, spans, segment=segment)
    tag = (size - 1) * most_tiles(spans, segment)
    yield from all_gather(rank, size, spans, segment=segment, tag=tag)


def _pass_on(
    rank: int, size: int, cut: Sequence[tuple[Span, ...]], *, first: int, how: How, tag: int
) -> Iterator[Step]:
    """Once round: chunk `first` leaves in the first round; what came in one leaves in the next."""
    most = max(map(len, cut))
    above, below = (rank + 1) % size, (rank - 1) % size
    for k in range(size - 1):
        away, coming = cut[(first - k) % size], cut[(first - k - 1) % size]
        for number, (out, into) in enumerate(zip_longest(away, coming), start=tag + k * most):
            sends = (Send(above, part(out), number),) if out else ()
            yield Step(sends, (Receive(below, part(into), number, how),) if into else ())
