"""To or from one rank by way of all: large vectors move in shares, so that nobody has to send them whole many times."""

from __future__ import annotations

from collections.abc import Iterator

from nexar.arrays.partition import split
from nexar.collectives.schedule import Step
from nexar.collectives.schedules import direct, flat, ring, tree
from nexar.collectives.schedules.blocks import most_tiles


def broadcast(rank: int, size: int, count: int, root: int) -> Iterator[Step]:
    """Buffer 0 of the root to buffer 0 of all: scattered down a tree, then gathered round the ring."""
    spans = split(count, size)
    yield from tree.scatter(rank, size, spans, root)
    yield from ring.all_gather(rank, size, spans, tag=size)


def reduce(rank: int, size: int, count: int, root: int) -> Iterator[Step]:
    """Buffer 0: the rank's own elements, and at the root then the reduction; elsewhere partial ones. Commutative."""
    spans = split(count, size)
    yield from ring.reduce_scatter(rank, size, spans)
    yield from flat.gather(rank, size, spans, root, tag=size)


def fold(rank: int, size: int, count: int, root: int, *, segment: int = 0) -> Iterator[Step]:
    """As `reduce`, folded in rank order by the owner of each share. Buffer 1: as for direct.reduce_scatter."""
    spans = split(count, size)
    yield from direct.reduce_scatter(rank, size, spans, segment=segment)
    yield from flat.gather(rank, size, spans, root, tag=most_tiles(spans, segment))
