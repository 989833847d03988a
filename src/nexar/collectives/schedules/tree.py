"""Binomial trees whose every branch stands for neighbouring ranks: ceil(log2 n) levels, for any root and any world.

A run of ranks has a head. Cut in two, one half keeps it; the other half's head is its first rank, and the two heads
talk; then the same within each half. So two runs that meet are neighbours: a reduction keeps rank order whatever the
root, and what a head gathers lies in one piece.

One for all: the root talks to everybody itself. One step; the least there is to wait for in a small world.

Down a tree along the edges of a topology, in segments: nothing is relayed, and everybody passes on what it has while
more comes.

In a full mesh that is everybody's next hop: the root sends to all itself.

To or from one rank by way of all: large vectors move in shares, so that nobody has to send them whole many times.
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
    """Where a head meets the head of the neighbouring run."""

    peer: int
    near: range
    """The ranks this one stands for here."""
    far: range
    """The ranks the peer stands for."""
    upward: bool
    """The peer is nearer to the root."""


def subtrees(rank: int, size: int, root: int) -> list[Subtree]:
    """Of one rank, from the root outwards: first the one to its parent (the root has none), then its children's."""
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
    """Buffer 0 of the root to buffer 0 of all."""
    everything = whole(count)
    for branch in subtrees(rank, size, root):
        if branch.upward:
            yield Step(receives=(RecvStep(branch.peer, everything, 0, Combine.COPY),))
        else:
            yield Step(sends=(SendStep(branch.peer, everything, 0),))


def tree_reduce(rank: int, size: int, count: int, root: int) -> Iterator[Step]:
    """Buffer 0: the rank's own elements, and at the root then the reduction; elsewhere a partial one. Order is kept."""
    everything = whole(count)
    for branch in reversed(subtrees(rank, size, root)):
        if branch.upward:
            yield Step(sends=(SendStep(branch.peer, everything, 0),))
        else:
            how = Combine.BEFORE if branch.far.start < branch.near.start else Combine.AFTER
            yield Step(receives=(RecvStep(branch.peer, everything, 0, how),))


def tree_gather(rank: int, size: int, spans: Sequence[Span], root: int) -> Iterator[Step]:
    """Buffer 0 has room for all blocks, on every rank, and its own in place; at the root it ends with all of them."""
    for branch in reversed(subtrees(rank, size, root)):
        if branch.upward:
            yield Step(tuple(sends(branch.peer, runs(spans, branch.near), 0)))
        else:
            yield Step((), tuple(receives(branch.peer, runs(spans, branch.far), Combine.COPY, 0)))


def tree_scatter(rank: int, size: int, spans: Sequence[Span], root: int) -> Iterator[Step]:
    """Buffer 0 has room for all blocks, on every rank, and at the root has them; ends with the rank's own in place."""
    for branch in subtrees(rank, size, root):
        if branch.upward:
            yield Step((), tuple(receives(branch.peer, runs(spans, branch.near), Combine.COPY, 0)))
        else:
            yield Step(tuple(sends(branch.peer, runs(spans, branch.far), 0)))


def flat_broadcast(rank: int, size: int, count: int, root: int) -> Iterator[Step]:
    """Buffer 0 of the root to buffer 0 of all."""
    everything = whole(count)
    if rank == root:
        yield Step(sends=tuple(SendStep(peer, everything, 0) for peer in _other_ranks(root, size)))
    else:
        yield Step(receives=(RecvStep(root, everything, 0, Combine.COPY),))


def flat_reduce(rank: int, size: int, count: int, root: int) -> Iterator[Step]:
    """Buffer 0: the rank's own elements, and at the root then the reduction. Rank order is kept.

    The root grows outwards from itself: first those below it, downwards, then those above, upwards.
    """
    everything = whole(count)
    if rank == root:
        below = tuple(RecvStep(peer, everything, 0, Combine.BEFORE) for peer in reversed(range(root)))
        above = tuple(RecvStep(peer, everything, 0, Combine.AFTER) for peer in range(root + 1, size))
        yield Step(receives=below + above)
    else:
        yield Step(sends=(SendStep(root, everything, 0),))


def flat_gather(rank: int, size: int, spans: Sequence[Span], root: int, *, tag: int = 0) -> Iterator[Step]:
    """Buffer 0 has each rank's block in place; at the root it ends with all of them."""
    if rank == root:
        yield Step(
            receives=tuple(RecvStep(peer, part(spans[peer]), tag, Combine.COPY) for peer in _other_ranks(root, size))
        )
    else:
        yield Step(sends=(SendStep(root, part(spans[rank]), tag),))


def flat_scatter(rank: int, size: int, spans: Sequence[Span], root: int) -> Iterator[Step]:
    """Buffer 0 of the root has all blocks; each rank ends with its own in place."""
    if rank == root:
        yield Step(sends=tuple(SendStep(peer, part(spans[peer]), 0) for peer in _other_ranks(root, size)))
    else:
        yield Step(receives=(RecvStep(root, part(spans[rank]), 0, Combine.COPY),))


def _other_ranks(root: int, size: int) -> Iterator[int]:
    return ((root + distance) % size for distance in range(1, size))


def spanning_tree_broadcast(
    rank: int, size: int, count: int, root: int, topology: str, *, segment: int = 0
) -> Iterator[Step]:
    """Buffer 0 of the root to buffer 0 of all."""
    parent, below = parents(topology, size, root)[rank], children(topology, size, root)[rank]
    late = parent is not None
    for j, (coming, away) in enumerate(staggered(tiles(Span(0, count), segment), late)):
        sends = tuple(SendStep(child, part(away), j - late) for child in below) if away else ()
        receives = (RecvStep(parent, part(coming), j, Combine.COPY),) if coming and parent is not None else ()
        yield Step(sends, receives)


def scattered_broadcast(rank: int, size: int, count: int, root: int) -> Iterator[Step]:
    """Buffer 0 of the root to buffer 0 of all: scattered down a tree, then gathered round the ring."""
    spans = split(count, size)
    yield from tree_scatter(rank, size, spans, root)
    yield from ring.ring_all_gather(rank, size, spans, tag=size)


def scattered_reduce(rank: int, size: int, count: int, root: int) -> Iterator[Step]:
    """Buffer 0: the rank's own elements, and at the root then the reduction; elsewhere partial ones. Commutative."""
    spans = split(count, size)
    yield from ring.ring_reduce_scatter(rank, size, spans)
    yield from flat_gather(rank, size, spans, root, tag=size)


def scattered_fold(rank: int, size: int, count: int, root: int, *, segment: int = 0) -> Iterator[Step]:
    """As `reduce`, folded in rank order by the owner of each share. Buffer 1: as for direct.reduce_scatter."""
    spans = split(count, size)
    yield from direct.direct_reduce_scatter(rank, size, spans, segment=segment)
    yield from flat_gather(rank, size, spans, root, tag=most_tiles(spans, segment))
