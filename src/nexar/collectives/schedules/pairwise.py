"""Every pair of ranks meets once, in n-1 rounds: in round k a rank gives to the one k above it, and takes from the one
k below. Nobody ever has two partners on one side, so no line is crowded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nexar.arrays.partition import Span
from nexar.collectives.schedule import How, Local, Receive, Send, Step
from nexar.collectives.schedules.blocks import part


def reduce_scatter(rank: int, size: int, spans: Sequence[Span]) -> Iterator[Step]:
    """Rank i ends with the reduction of block i, in place in buffer 0; the others stay as they were. Commutative."""
    for distance in range(1, size):
        above, below = (rank + distance) % size, (rank - distance) % size
        yield Step((Send(above, part(spans[above]), 0),), (Receive(below, part(spans[rank]), 0, How.LEFT),))


def all_to_all(rank: int, size: int, inputs: Sequence[Span], outputs: Sequence[Span]) -> Iterator[Step]:
    """Block i of `inputs`, in buffer 0, is for rank i; block i of `outputs`, in buffer 1, is from it."""
    yield Step(then=(Local(part(outputs[rank], 1), part(inputs[rank]), How.COPY),))
    for distance in range(1, size):
        above, below = (rank + distance) % size, (rank - distance) % size
        yield Step((Send(above, part(inputs[above]), 0),), (Receive(below, part(outputs[below], 1), 0, How.COPY),))
