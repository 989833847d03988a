"""Nobody leaves before everybody has come: messages without a payload."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from nexar.collectives.schedule import How, Part, Receive, Send, Step

NOTHING: Final = Part(0, 0, 0)


def dissemination(rank: int, size: int) -> Iterator[Step]:
    """In round k each rank tells the one 2^k above it, and hears from the one 2^k below it, round the ring.

    After ceil(log2 n) rounds everybody has heard from everybody, directly or through others.
    """
    distance, k = 1, 0
    while distance < size:
        above, below = (rank + distance) % size, (rank - distance) % size
        yield Step((Send(above, NOTHING, k),), (Receive(below, NOTHING, k, How.COPY),))
        distance, k = distance * 2, k + 1


def two_phase(rank: int, size: int) -> Iterator[Step]:
    """All tell rank 0, then rank 0 tells all: 2(n-1) messages, fewer than any other way in a small world."""
    if rank:
        yield Step(sends=(Send(0, NOTHING, 0),))
        yield Step(receives=(Receive(0, NOTHING, 1, How.COPY),))
        return
    others = range(1, size)
    yield Step(receives=tuple(Receive(peer, NOTHING, 0, How.COPY) for peer in others))
    yield Step(sends=tuple(Send(peer, NOTHING, 1) for peer in others))
