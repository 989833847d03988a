"""Halving and doubling: few rounds and few bytes, for any number of ranks.

The ranks are cut into a lower and an upper half; each rank of one half has a partner in the other. Reducing, a rank
gives its partner all that concerns the partner's half, and only its own half is left to care for: then the same within
each half, until one rank is left. The sums over the halves are what they were over the whole, so nothing is lost.
Gathering is the same backwards.

Of an odd number the lower half has one more, whose second partner is the first of the upper half: no rank has to stand
aside, whatever the world. Reducing, each rank sends c·(n-1)/n elements in ceil(log2 n) rounds; gathering, it
receives as many, but of an odd number some send twice. What is combined comes from ranks here and there, so the
operation has to commute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nexar.arrays.partition import Span, split
from nexar.collectives.schedule import How, Step
from nexar.collectives.schedules import bruck
from nexar.collectives.schedules.blocks import receives, runs, sends


class Cut(NamedTuple):
    """One cut through the ranks, as one of them sees it."""

    near: range
    """The half it is in."""
    far: range
    given: tuple[int, ...]
    """Ranks of the far half that it gives to when reducing, and takes from when gathering."""
    taken: tuple[int, ...]
    """Ranks of the far half that it takes from when reducing, and gives to when gathering."""


def cuts(rank: int, size: int) -> list[Cut]:
    """From the whole world down to the rank itself."""
    found, ranks = [], range(size)
    while len(ranks) > 1:
        middle = ranks.start + (len(ranks) + 1) // 2
        lower, upper = range(ranks.start, middle), range(middle, ranks.stop)
        cut = _in_lower(rank, lower, upper) if rank < middle else _in_upper(rank, lower, upper)
        found.append(cut)
        ranks = cut.near
    return found


def _in_lower(rank: int, lower: range, upper: range) -> Cut:
    partner = rank + len(lower)
    if partner < upper.stop:
        return Cut(lower, upper, (partner,), (partner,))
    return Cut(lower, upper, (upper.start,), ())  # the odd one: nobody is left to give to it


def _in_upper(rank: int, lower: range, upper: range) -> Cut:
    partner = rank - len(lower)
    odd_one = (lower.stop - 1,) if len(lower) > len(upper) and rank == upper.start else ()
    return Cut(upper, lower, (partner,), (partner, *odd_one))


def reduce_scatter(rank: int, size: int, spans: Sequence[Span], *, tag: int = 0) -> Iterator[Step]:
    """Rank i ends with the reduction of block i, in place; the rest of buffer 0 holds partial results. Commutative."""
    for cut in cuts(rank, size):
        near, far = runs(spans, cut.near), runs(spans, cut.far)
        given = tuple(each for peer in cut.given for each in sends(peer, far, tag))
        yield Step(given, tuple(each for peer in cut.taken for each in receives(peer, near, _how(peer, rank), tag)))


def all_gather(rank: int, size: int, spans: Sequence[Span], *, tag: int = 0) -> Iterator[Step]:
    """Rank i begins with block i in its place in buffer 0; all end with all blocks."""
    for cut in reversed(cuts(rank, size)):
        near, far = runs(spans, cut.near), runs(spans, cut.far)
        told = tuple(each for peer in cut.taken for each in sends(peer, near, tag))
        yield Step(told, tuple(each for peer in cut.given for each in receives(peer, far, How.COPY, tag)))


def all_reduce(rank: int, size: int, count: int) -> Iterator[Step]:
    """Buffer 0 in place. Each element's result is made by one rank: all get the same bits. Commutative.

    Where the world is no power of two Bruck's way gathers: nobody sends twice there.
    """
    spans = split(count, size)
    yield from reduce_scatter(rank, size, spans)
    gather = bruck.all_gather if size & (size - 1) else all_gather
    yield from gather(rank, size, spans, tag=size)


def _how(peer: int, rank: int) -> How:
    return How.LEFT if peer < rank else How.RIGHT
