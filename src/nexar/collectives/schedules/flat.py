"""One for all: the root talks to everybody itself. One step; the least there is to wait for in a small world."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nexar.arrays.partition import Span
from nexar.collectives.schedule import How, Receive, Send, Step
from nexar.collectives.schedules.blocks import part, whole


def broadcast(rank: int, size: int, count: int, root: int) -> Iterator[Step]:
    """Buffer 0 of the root to buffer 0 of all."""
    everything = whole(count)
    if rank == root:
        yield Step(sends=tuple(Send(peer, everything, 0) for peer in _others(root, size)))
    else:
        yield Step(receives=(Receive(root, everything, 0, How.COPY),))


def reduce(rank: int, size: int, count: int, root: int) -> Iterator[Step]:
    """Buffer 0: the rank's own elements, and at the root then the reduction. Rank order is kept.

    The root grows outwards from itself: first those below it, downwards, then those above, upwards.
    """
    everything = whole(count)
    if rank == root:
        below = tuple(Receive(peer, everything, 0, How.LEFT) for peer in reversed(range(root)))
        above = tuple(Receive(peer, everything, 0, How.RIGHT) for peer in range(root + 1, size))
        yield Step(receives=below + above)
    else:
        yield Step(sends=(Send(root, everything, 0),))


def gather(rank: int, size: int, spans: Sequence[Span], root: int, *, tag: int = 0) -> Iterator[Step]:
    """Buffer 0 has each rank's block in place; at the root it ends with all of them."""
    if rank == root:
        yield Step(receives=tuple(Receive(peer, part(spans[peer]), tag, How.COPY) for peer in _others(root, size)))
    else:
        yield Step(sends=(Send(root, part(spans[rank]), tag),))


def scatter(rank: int, size: int, spans: Sequence[Span], root: int) -> Iterator[Step]:
    """Buffer 0 of the root has all blocks; each rank ends with its own in place."""
    if rank == root:
        yield Step(sends=tuple(Send(peer, part(spans[peer]), 0) for peer in _others(root, size)))
    else:
        yield Step(receives=(Receive(root, part(spans[rank]), 0, How.COPY),))


def _others(root: int, size: int) -> Iterator[int]:
    return ((root + distance) % size for distance in range(1, size))
