"""Bruck's all-gather: with each round a rank holds twice as many blocks, its own and those of the ranks above it.

In round k it passes what it holds (of the last round: what is missing there) to the rank 2^k below: ceil(log2 n)
rounds for any world, and c·(n-1)/n elements sent. Blocks are kept where they belong, so there is nothing to turn round
at the end; a run that goes past the last rank is two messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nexar.arrays.partition import Span
from nexar.collectives.schedule import How, Step
from nexar.collectives.schedules.blocks import receives, runs, sends


def all_gather(rank: int, size: int, spans: Sequence[Span], *, tag: int = 0) -> Iterator[Step]:
    """Rank i begins with block i in its place in buffer 0; all end with all blocks."""
    held = 1
    while held < size:
        above, below = (rank + held) % size, (rank - held) % size
        passed = min(held, size - held)
        out = runs(spans, [(rank + i) % size for i in range(passed)])
        into = runs(spans, [(above + i) % size for i in range(passed)])
        yield Step(tuple(sends(below, out, tag)), tuple(receives(above, into, How.COPY, tag)))
        held += passed
