"""One after the other, in segments: while a rank passes one on, it already receives the next.

With s segments and n ranks the last one has everything after s + n - 2 segment times, and nobody sends more than the
vector once: for large ones nothing moves faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from nexar.arrays.partition import Span
from nexar.collectives.schedule import How, Local, Part, Receive, Send, Step
from nexar.collectives.schedules.blocks import part, tiles


def broadcast(rank: int, size: int, count: int, root: int, *, segment: int = 0) -> Iterator[Step]:
    """Buffer 0 of the root to buffer 0 of all, upwards from the root and round."""
    spans = tiles(Span(0, count), segment)
    position = (rank - root) % size
    below = (rank - 1) % size if position else None
    above = (rank + 1) % size if position < size - 1 else None
    return _pass_on(below, above, spans, How.COPY)


def scan(rank: int, size: int, count: int, *, segment: int = 0) -> Iterator[Step]:
    """Buffer 0: the rank's own elements, then the left fold over ranks 0 up to it."""
    spans = tiles(Span(0, count), segment)
    return _pass_on(rank - 1 if rank else None, rank + 1 if rank < size - 1 else None, spans, How.LEFT)


def exclusive_scan(rank: int, size: int, count: int, *, segment: int = 0) -> Iterator[Step]:
    """Buffer 0: the rank's own elements, then the left fold over the ranks below it; rank 0's is left as it was.

    Buffer 1 (`count`) is the scan with this rank's own, on its way to the next rank.
    """
    spans = tiles(Span(0, count), segment)
    yield Step(then=(Local(Part(1, 0, count), Part(0, 0, count), How.COPY),))
    for j, (coming, away) in enumerate(staggered(spans, rank > 0)):
        sends = (Send(rank + 1, part(away, 1), j - (rank > 0)),) if away and rank < size - 1 else ()
        if coming and rank > 0:
            then = (Local(part(coming, 1), part(coming), How.LEFT),)
            yield Step(sends, (Receive(rank - 1, part(coming), j, How.COPY),), then)
        else:
            yield Step(sends)


def _pass_on(below: int | None, above: int | None, spans: Sequence[Span], how: How) -> Iterator[Step]:
    for j, (coming, away) in enumerate(staggered(spans, below is not None)):
        sends = (Send(above, part(away), j - (below is not None)),) if away and above is not None else ()
        receives = (Receive(below, part(coming), j, how),) if coming and below is not None else ()
        yield Step(sends, receives)


def staggered(spans: Sequence[Span], late: bool) -> Iterator[tuple[Span | None, Span | None]]:
    """Pairs of what comes and what goes in one step: who receives sends each segment one step later."""
    return zip_longest(spans, [None, *spans] if late else spans)
