"""Down a tree along the edges of a topology, in segments: nothing is relayed, and everybody passes on what it has while
more comes.

In a full mesh that is everybody's next hop: the root sends to all itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from nexar.arrays.partition import Span
from nexar.collectives.schedule import How, Receive, Send, Step
from nexar.collectives.schedules.blocks import part, tiles
from nexar.collectives.schedules.chain import staggered
from nexar.topology.trees import children, parents


def broadcast(rank: int, size: int, count: int, root: int, topology: str, *, segment: int = 0) -> Iterator[Step]:
    """Buffer 0 of the root to buffer 0 of all."""
    parent, below = parents(topology, size, root)[rank], children(topology, size, root)[rank]
    late = parent is not None
    for j, (coming, away) in enumerate(staggered(tiles(Span(0, count), segment), late)):
        sends = tuple(Send(child, part(away), j - late) for child in below) if away else ()
        receives = (Receive(parent, part(coming), j, How.COPY),) if coming and parent is not None else ()
        yield Step(sends, receives)
