"""Binomial trees whose every branch stands for neighbouring ranks: ceil(log2 n) levels, for any root and any world.

A run of ranks has a head. Cut in two, one half keeps it; the other half's head is its first rank, and the two heads
talk; then the same within each half. So two runs that meet are neighbours: a reduction keeps rank order whatever the
root, and what a head gathers lies in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nexar.arrays.partition import Span
from nexar.collectives.schedule import How, Receive, Send, Step
from nexar.collectives.schedules.blocks import receives, runs, sends, whole


class Branch(NamedTuple):
    """Where a head meets the head of the neighbouring run."""

    peer: int
    near: range
    """The ranks this one stands for here."""
    far: range
    """The ranks the peer stands for."""
    upward: bool
    """The peer is nearer to the root."""


def branches(rank: int, size: int, root: int) -> list[Branch]:
    """Of one rank, from the root outwards: first the one to its parent (the root has none), then its children's."""
    found, ranks, head = [], range(size), root
    while len(ranks) > 1:
        middle = ranks.start + (len(ranks) + 1) // 2
        near, far = range(ranks.start, middle), range(middle, ranks.stop)
        if rank >= middle:
            near, far = far, near
        if head in near:
            if rank == head:
                found.append(Branch(far.start, near, far, upward=False))
        else:
            if rank == near.start:
                found.append(Branch(head, near, far, upward=True))
            head = near.start
        ranks = near
    return found


def broadcast(rank: int, size: int, count: int, root: int) -> Iterator[Step]:
    """Buffer 0 of the root to buffer 0 of all."""
    everything = whole(count)
    for branch in branches(rank, size, root):
        if branch.upward:
            yield Step(receives=(Receive(branch.peer, everything, 0, How.COPY),))
        else:
            yield Step(sends=(Send(branch.peer, everything, 0),))


def reduce(rank: int, size: int, count: int, root: int) -> Iterator[Step]:
    """Buffer 0: the rank's own elements, and at the root then the reduction; elsewhere a partial one. Order is kept."""
    everything = whole(count)
    for branch in reversed(branches(rank, size, root)):
        if branch.upward:
            yield Step(sends=(Send(branch.peer, everything, 0),))
        else:
            how = How.LEFT if branch.far.start < branch.near.start else How.RIGHT
            yield Step(receives=(Receive(branch.peer, everything, 0, how),))


def gather(rank: int, size: int, spans: Sequence[Span], root: int) -> Iterator[Step]:
    """Buffer 0 has room for all blocks, on every rank, and its own in place; at the root it ends with all of them."""
    for branch in reversed(branches(rank, size, root)):
        if branch.upward:
            yield Step(tuple(sends(branch.peer, runs(spans, branch.near), 0)))
        else:
            yield Step((), tuple(receives(branch.peer, runs(spans, branch.far), How.COPY, 0)))


def scatter(rank: int, size: int, spans: Sequence[Span], root: int) -> Iterator[Step]:
    """Buffer 0 has room for all blocks, on every rank, and at the root has them; ends with the rank's own in place."""
    for branch in branches(rank, size, root):
        if branch.upward:
            yield Step((), tuple(receives(branch.peer, runs(spans, branch.near), How.COPY, 0)))
        else:
            yield Step(tuple(sends(branch.peer, runs(spans, branch.far), 0)))
