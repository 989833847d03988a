"""Round the ring: each rank talks to its two neighbours only, and everybody sends all the time.

In n-1 rounds every chunk travels once round the ring. Each rank sends c·(n-1)/n elements per pass: as few as can be.

Chunk i starts its way above rank i, takes up every rank's share in passing, and comes home to rank i whole. Its shares
are combined from the rank above its home round to its home: the order is turned by a different amount for each chunk,
so the operation has to commute. One rank only makes the result of each chunk: all get the same bits.

Cut into segments, a round is several steps: segment j of a round depends on segment j of the round before and on
nothing else, so it can leave while the segments behind it are still being reduced.

One after the other, in segments: while a rank passes one on, it already receives the next.

With s segments and n ranks the last one has everything after s + n - 2 segment times, and nobody sends more than the
vector once: for large ones nothing moves faster.

Every pair of ranks meets once, in n-1 rounds: in round k a rank gives to the one k above it, and takes from the one
k below. Nobody ever has two partners on one side, so no line is crowded.
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
    """Rank i ends with the reduction of block i, in place; the rest of buffer 0 holds partial results. Commutative."""
    cut = [tiles(span, segment) for span in spans]
    return _ring_steps(rank, size, cut, first=rank - 1, how=Combine.BEFORE, tag=tag)


def ring_all_gather(rank: int, size: int, spans: Sequence[Span], *, segment: int = 0, tag: int = 0) -> Iterator[Step]:
    """Rank i begins with block i in its place in buffer 0; all end with all blocks."""
    cut = [tiles(span, segment) for span in spans]
    return _ring_steps(rank, size, cut, first=rank, how=Combine.COPY, tag=tag)


def ring_all_reduce(rank: int, size: int, count: int, *, segment: int = 0) -> Iterator[Step]:
    """Buffer 0 in place: twice round the ring, to reduce and to tell. `segment` makes it a pipeline. Commutative."""
    spans = split(count, size)
    yield from ring_reduce_scatter(rank, size, spans, segment=segment)
    tag = (size - 1) * most_tiles(spans, segment)
    yield from ring_all_gather(rank, size, spans, segment=segment, tag=tag)


def _ring_steps(
    rank: int, size: int, cut: Sequence[tuple[Span, ...]], *, first: int, how: Combine, tag: int
) -> Iterator[Step]:
    """Once round: chunk `first` leaves in the first round; what came in one leaves in the next."""
    most = max(map(len, cut))
    above, below = (rank + 1) % size, (rank - 1) % size
    for k in range(size - 1):
        away, coming = cut[(first - k) % size], cut[(first - k - 1) % size]
        for number, (out, into) in enumerate(zip_longest(away, coming), start=tag + k * most):
            sends = (SendStep(above, part(out), number),) if out else ()
            yield Step(sends, (RecvStep(below, part(into), number, how),) if into else ())


def chain_broadcast(rank: int, size: int, count: int, root: int, *, segment: int = 0) -> Iterator[Step]:
    """Buffer 0 of the root to buffer 0 of all, upwards from the root and round."""
    spans = tiles(Span(0, count), segment)
    position = (rank - root) % size
    below = (rank - 1) % size if position else None
    above = (rank + 1) % size if position < size - 1 else None
    return _chain_steps(below, above, spans, Combine.COPY)


def chain_scan(rank: int, size: int, count: int, *, segment: int = 0) -> Iterator[Step]:
    """Buffer 0: the rank's own elements, then the left fold over ranks 0 up to it."""
    spans = tiles(Span(0, count), segment)
    return _chain_steps(rank - 1 if rank else None, rank + 1 if rank < size - 1 else None, spans, Combine.BEFORE)


def chain_exclusive_scan(rank: int, size: int, count: int, *, segment: int = 0) -> Iterator[Step]:
    """Buffer 0: the rank's own elements, then the left fold over the ranks below it; rank 0's is left as it was.

    Buffer 1 (`count`) is the scan with this rank's own, on its way to the next rank.
    """
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
    """Pairs of what comes and what goes in one step: who receives sends each segment one step later."""
    return zip_longest(spans, [None, *spans] if late else spans)


def pairwise_reduce_scatter(rank: int, size: int, spans: Sequence[Span]) -> Iterator[Step]:
    """Rank i ends with the reduction of block i, in place in buffer 0; the others stay as they were. Commutative."""
    for distance in range(1, size):
        above, below = (rank + distance) % size, (rank - distance) % size
        yield Step((SendStep(above, part(spans[above]), 0),), (RecvStep(below, part(spans[rank]), 0, Combine.BEFORE),))


def pairwise_all_to_all(rank: int, size: int, inputs: Sequence[Span], outputs: Sequence[Span]) -> Iterator[Step]:
    """Block i of `inputs`, in buffer 0, is for rank i; block i of `outputs`, in buffer 1, is from it."""
    yield Step(then=(LocalCopy(part(outputs[rank], 1), part(inputs[rank]), Combine.COPY),))
    for distance in range(1, size):
        above, below = (rank + distance) % size, (rank - distance) % size
        yield Step(
            (SendStep(above, part(inputs[above]), 0),), (RecvStep(below, part(outputs[below], 1), 0, Combine.COPY),)
        )
