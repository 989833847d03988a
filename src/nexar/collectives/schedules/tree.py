"""Rooted schedules: binomial trees, flat, spanning trees of a topology, and scatter-based ones.

Binomial tree: a range of ranks is cut in two. One half keeps its head; the other's head is its first rank. The heads
communicate, so only neighbouring ranges meet: a reduction keeps rank order for any root, and gathered blocks are
contiguous. Spanning trees follow the topology, without relays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nexar.arrays.views import Span, split
from nexar.collectives.schedule import Combine, RecvStep, SendStep, Step
from nexar.collectives.schedules import direct, ring
from nexar.collectives.schedules.blocks import most_tiles, part, receives, runs, sends, tiles, whole
from nexar.collectives.schedules.ring import staggered
from nexar.topology import children, parents


class Subtree(NamedTuple):
    """A connection of a head to the head of the neighbouring range."""

    peer: int
    near: range
    """This head's ranks."""
    far: range
    """The peer's ranks."""
    upward: bool
    """The peer is nearer to the root."""


def subtrees(rank: int, size: int, root: int) -> list[Subtree]:
    """Connections from the root outwards: first to the parent, then to the children."""
    found, ranks, head = [], range(size), root
    while len(ranks) > 1:
        middle = ranks.start + (len(ranks) + 1) // 2
        near, far = range(ranks.start, middle), range(middle, ranks.stop)
        if rank >= middle:
            near, far = far, near
        if head in near:
            if rank == head:
                found.append(Subtree(far.start, near, far, upward=False))
        else:
            if rank == near.start:
                found.append(Subtree(head, near, far, upward=True))
            head = near.start
        ranks = near
    return found


def tree_broadcast(rank: int, size: int, count: int, root: int) -> Iterator[Step]:
    """Buffer 0 of the root to all."""
    everything = whole(count)
    for branch in subtrees(rank, size, root):
        if branch.upward:
            yield Step(receives=(RecvStep(branch.peer, everything, 0, Combine.COPY),))
        else:
            yield Step(sends=(SendStep(branch.peer, everything, 0),))


def tree_reduce(rank: int, size: int, count: int, root: int) -> Iterator[Step]:
    """Reduce buffer 0 to the root in rank order; partial elsewhere."""
    everything = whole(count)
    for branch in reversed(subtrees(rank, size, root)):
        if branch.upward:
            yield Step(sends=(SendStep(branch.peer, everything, 0),))
        else:
            how = Combine.BEFORE if branch.far.start < branch.near.start else Combine.AFTER
            yield Step(receives=(RecvStep(branch.peer, everything, 0, how),))


def tree_gather(rank: int, size: int, spans: Sequence[Span], root: int) -> Iterator[Step]:
    """Buffer 0 has room for all blocks and its own; the root ends with all."""
    for branch in reversed(subtrees(rank, size, root)):
        if branch.upward:
            yield Step(tuple(sends(branch.peer, runs(spans, branch.near), 0)))
        else:
            yield Step((), tuple(receives(branch.peer, runs(spans, branch.far), Combine.COPY, 0)))


def tree_scatter(rank: int, size: int, spans: Sequence[Span], root: int) -> Iterator[Step]:
    """Buffer 0 has room for all blocks; each rank ends with its own."""
    for branch in subtrees(rank, size, root):
        if branch.upward:
            yield Step((), tuple(receives(branch.peer, runs(spans, branch.near), Combine.COPY, 0)))
        else:
            yield Step(tuple(sends(branch.peer, runs(spans, branch.far), 0)))


def flat_broadcast(rank: int, size: int, count: int, root: int) -> Iterator[Step]:
    """Buffer 0 of the root to all."""
    everything = whole(count)
    if rank == root:
        yield Step(sends=tuple(SendStep(peer, everything, 0) for peer in _other_ranks(root, size)))
    else:
        yield Step(receives=(RecvStep(root, everything, 0, Combine.COPY),))


def flat_reduce(rank: int, size: int, count: int, root: int) -> Iterator[Step]:
    """Reduce buffer 0 to the root in rank order: first the ranks below it, downwards, then those above."""
    everything = whole(count)
    if rank == root:
        below = tuple(RecvStep(peer, everything, 0, Combine.BEFORE) for peer in reversed(range(root)))
        above = tuple(RecvStep(peer, everything, 0, Combine.AFTER) for peer in range(root + 1, size))
        yield Step(receives=below + above)
    else:
        yield Step(sends=(SendStep(root, everything, 0),))


def flat_gather(rank: int, size: int, spans: Sequence[Span], root: int, *, tag: int = 0) -> Iterator[Step]:
    """Buffer 0 has each rank's block; the root ends with all."""
    if rank == root:
        yield Step(
            receives=tuple(RecvStep(peer, part(spans[peer]), tag, Combine.COPY) for peer in _other_ranks(root, size))
        )
    else:
        yield Step(sends=(SendStep(root, part(spans[rank]), tag),))


def flat_scatter(rank: int, size: int, spans: Sequence[Span], root: int) -> Iterator[Step]:
    """Buffer 0 of the root has all blocks; each rank ends with its own."""
    if rank == root:
        yield Step(sends=tuple(SendStep(peer, part(spans[peer]), 0) for peer in _other_ranks(root, size)))
    else:
        yield Step(receives=(RecvStep(root, part(spans[rank]), 0, Combine.COPY),))


def _other_ranks(root: int, size: int) -> Iterator[int]:
    return ((root + distance) % size for distance in range(1, size))


def spanning_tree_broadcast(
    rank: int, size: int, count: int, root: int, topology: str, *, segment: int = 0
) -> Iterator[Step]:
    """Buffer 0 of the root to all."""
    parent, below = parents(topology, size, root)[rank], children(topology, size, root)[rank]
    late = parent is not None
    for j, (coming, away) in enumerate(staggered(tiles(Span(0, count), segment), late)):
        sends = tuple(SendStep(child, part(away), j - late) for child in below) if away else ()
        receives = (RecvStep(parent, part(coming), j, Combine.COPY),) if coming and parent is not None else ()
        yield Step(sends, receives)


def scattered_broadcast(rank: int, size: int, count: int, root: int) -> Iterator[Step]:
    """A tree scatter, then a ring all-gather."""
    spans = split(count, size)
    yield from tree_scatter(rank, size, spans, root)
    yield from ring.ring_all_gather(rank, size, spans, tag=size)


def scattered_reduce(rank: int, size: int, count: int, root: int) -> Iterator[Step]:
    """Reduce buffer 0 to the root; partial elsewhere. Commutative only."""
    spans = split(count, size)
    yield from ring.ring_reduce_scatter(rank, size, spans)
    yield from flat_gather(rank, size, spans, root, tag=size)


def scattered_fold(rank: int, size: int, count: int, root: int, *, segment: int = 0) -> Iterator[Step]:
    """Like `scattered_reduce`, folded in rank order. Buffer 1: as in direct_reduce_scatter."""
    spans = split(count, size)
    yield from direct.direct_reduce_scatter(rank, size, spans, segment=segment)
    yield from flat_gather(rank, size, spans, root, tag=most_tiles(spans, segment))
