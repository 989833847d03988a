"""Bruck's all-gather: with each round a rank holds twice as many blocks, its own and those of the ranks above it.

In round k it passes what it holds (of the last round: what is missing there) to the rank 2^k below: ceil(log2 n)
rounds for any world, and c·(n-1)/n elements sent. Blocks are kept where they belong, so there is nothing to turn round
at the end; a run that goes past the last rank is two messages.

Recursive doubling: with each round a rank knows of twice as many. Few rounds, whole vectors: for small ones.

What a rank holds always stands for neighbouring ranks, and two holdings are combined lower ⊕ upper on both sides: so
rank order is kept (the operation need not commute), and both partners compute the same bits.

Halving and doubling: few rounds and few bytes, for any number of ranks.

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

from nexar.arrays.views import Span, split
from nexar.collectives.schedule import Combine, LocalCopy, RecvStep, SendStep, Step
from nexar.collectives.schedules.blocks import receives, runs, sends, whole


def bruck_all_gather(rank: int, size: int, spans: Sequence[Span], *, tag: int = 0) -> Iterator[Step]:
    """Rank i begins with block i in its place in buffer 0; all end with all blocks."""
    held = 1
    while held < size:
        above, below = (rank + held) % size, (rank - held) % size
        passed = min(held, size - held)
        out = runs(spans, [(rank + i) % size for i in range(passed)])
        into = runs(spans, [(above + i) % size for i in range(passed)])
        yield Step(tuple(sends(below, out, tag)), tuple(receives(above, into, Combine.COPY, tag)))
        held += passed


def doubling_all_reduce(rank: int, size: int, count: int) -> Iterator[Step]:
    """Buffer 0 in place. Rank order is kept.

    Partners are found by flipping bits, so a power of two takes part; of the ranks in excess each gives its vector to
    the rank below it first (they stay neighbours, in order), and gets the result last.
    """
    power = 1 << (size.bit_length() - 1)
    paired = 2 * (size - power)  # ranks below this one go in twos; the even one speaks for both
    everything = whole(count)
    last = power.bit_length()  # rounds use the tags 1..last-1
    if rank < paired and rank % 2:
        yield Step(sends=(SendStep(rank - 1, everything, 0),))
        yield Step(receives=(RecvStep(rank - 1, everything, last, Combine.COPY),))
        return
    if rank < paired:
        yield Step(receives=(RecvStep(rank + 1, everything, 0, Combine.AFTER),))
    yield from _rounds(rank, paired, power, count)
    if rank < paired:
        yield Step(sends=(SendStep(rank + 1, everything, last),))


def _rounds(rank: int, paired: int, power: int, count: int) -> Iterator[Step]:
    everything = whole(count)
    seat = rank // 2 if rank < paired else rank - paired // 2
    for k in range(power.bit_length() - 1):
        other = seat ^ (1 << k)
        peer = other * 2 if other < paired // 2 else other + paired // 2
        how = Combine.BEFORE if peer < rank else Combine.AFTER
        yield Step((SendStep(peer, everything, k + 1),), (RecvStep(peer, everything, k + 1, how),))


def doubling_scan(rank: int, size: int, count: int) -> Iterator[Step]:
    """Buffer 0: the rank's own elements, then the reduction over ranks 0 up to it. Rank order is kept.

    After k rounds it covers the 2^k ranks that end here; those of the rank 2^k below are just what lies before them.
    """
    everything = whole(count)
    for k, distance in enumerate(_distances(size)):
        sends = (SendStep(rank + distance, everything, k),) if rank + distance < size else ()
        receives = (RecvStep(rank - distance, everything, k, Combine.BEFORE),) if rank >= distance else ()
        yield Step(sends, receives)


def doubling_exclusive_scan(rank: int, size: int, count: int) -> Iterator[Step]:
    """Buffer 0: the rank's own elements, then the reduction over the ranks below it; rank 0's is left as it was.

    Buffer 1 (`count`) is the scan that passes on, this rank included; buffer 2 (`count`) is what has just arrived.
    """
    result, partial, arriving = whole(count), whole(count, 1), whole(count, 2)
    yield Step(then=(LocalCopy(partial, result, Combine.COPY),))
    for k, distance in enumerate(_distances(size)):
        sends = (SendStep(rank + distance, partial, k),) if rank + distance < size else ()
        if rank < distance:
            yield Step(sends)
            continue
        first = Combine.COPY if distance == 1 else Combine.BEFORE  # buffer 0 holds our own until something comes
        then = (LocalCopy(result, arriving, first), LocalCopy(partial, arriving, Combine.BEFORE))
        yield Step(sends, (RecvStep(rank - distance, arriving, k, Combine.COPY),), then)


def _distances(size: int) -> Iterator[int]:
    distance = 1
    while distance < size:
        yield distance
        distance *= 2


class Halving(NamedTuple):
    """One cut through the ranks, as one of them sees it."""

    near: range
    """The half it is in."""
    far: range
    given: tuple[int, ...]
    """Ranks of the far half that it gives to when reducing, and takes from when gathering."""
    taken: tuple[int, ...]
    """Ranks of the far half that it takes from when reducing, and gives to when gathering."""


def halvings(rank: int, size: int) -> list[Halving]:
    """From the whole world down to the rank itself."""
    found, ranks = [], range(size)
    while len(ranks) > 1:
        middle = ranks.start + (len(ranks) + 1) // 2
        lower, upper = range(ranks.start, middle), range(middle, ranks.stop)
        cut = _in_lower(rank, lower, upper) if rank < middle else _in_upper(rank, lower, upper)
        found.append(cut)
        ranks = cut.near
    return found


def _in_lower(rank: int, lower: range, upper: range) -> Halving:
    partner = rank + len(lower)
    if partner < upper.stop:
        return Halving(lower, upper, (partner,), (partner,))
    return Halving(lower, upper, (upper.start,), ())  # the odd one: nobody is left to give to it


def _in_upper(rank: int, lower: range, upper: range) -> Halving:
    partner = rank - len(lower)
    odd_one = (lower.stop - 1,) if len(lower) > len(upper) and rank == upper.start else ()
    return Halving(upper, lower, (partner,), (partner, *odd_one))


def halving_reduce_scatter(rank: int, size: int, spans: Sequence[Span], *, tag: int = 0) -> Iterator[Step]:
    """Rank i ends with the reduction of block i, in place; the rest of buffer 0 holds partial results. Commutative."""
    for cut in halvings(rank, size):
        near, far = runs(spans, cut.near), runs(spans, cut.far)
        given = tuple(each for peer in cut.given for each in sends(peer, far, tag))
        yield Step(given, tuple(each for peer in cut.taken for each in receives(peer, near, _combine(peer, rank), tag)))


def doubling_all_gather(rank: int, size: int, spans: Sequence[Span], *, tag: int = 0) -> Iterator[Step]:
    """Rank i begins with block i in its place in buffer 0; all end with all blocks."""
    for cut in reversed(halvings(rank, size)):
        near, far = runs(spans, cut.near), runs(spans, cut.far)
        told = tuple(each for peer in cut.taken for each in sends(peer, near, tag))
        yield Step(told, tuple(each for peer in cut.given for each in receives(peer, far, Combine.COPY, tag)))


def halving_doubling_all_reduce(rank: int, size: int, count: int) -> Iterator[Step]:
    """Buffer 0 in place. Each element's result is made by one rank: all get the same bits. Commutative.

    Where the world is no power of two Bruck's way gathers: nobody sends twice there.
    """
    spans = split(count, size)
    yield from halving_reduce_scatter(rank, size, spans)
    gather = bruck_all_gather if size & (size - 1) else doubling_all_gather
    yield from gather(rank, size, spans, tag=size)


def _combine(peer: int, rank: int) -> Combine:
    return Combine.BEFORE if peer < rank else Combine.AFTER
