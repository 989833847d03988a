"""Schedules with ceil(log2 n) rounds: Bruck's all-gather, recursive doubling, halving and doubling.

Bruck: blocks stay in place, without a final rotation; a range that wraps around takes two messages.

Recursive doubling: a partial result covers neighbouring ranks, and both partners combine lower ⊕ upper. So rank order
is kept and both compute the same bits.

Halving: each rank sends its partner in the other half the elements of that half; then each half repeats this. An odd
lower half has one more rank, whose partner is the first of the upper half. The combined ranks are not neighbours, so
the operation must commute. Doubling is the reverse; for an odd number some ranks send twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nexar.arrays.views import Span, split
from nexar.collectives.schedule import Combine, LocalCopy, RecvStep, SendStep, Step
from nexar.collectives.schedules.blocks import receives, runs, sends, whole


def bruck_all_gather(rank: int, size: int, spans: Sequence[Span], *, tag: int = 0) -> Iterator[Step]:
    """Rank i begins with block i in buffer 0; all end with all."""
    held = 1
    while held < size:
        above, below = (rank + held) % size, (rank - held) % size
        passed = min(held, size - held)
        out = runs(spans, [(rank + i) % size for i in range(passed)])
        into = runs(spans, [(above + i) % size for i in range(passed)])
        yield Step(tuple(sends(below, out, tag)), tuple(receives(above, into, Combine.COPY, tag)))
        held += passed


def doubling_all_reduce(rank: int, size: int, count: int) -> Iterator[Step]:
    """All-reduce of buffer 0, in rank order, among a power of two of ranks. Each excess rank first sends its vector to
    the rank below and finally receives the result.
    """
    power = 1 << (size.bit_length() - 1)
    paired = 2 * (size - power)  # ranks below this number are paired; the even one represents both
    everything = whole(count)
    last = power.bit_length()  # the rounds use the tags 1..last-1
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
    position = rank // 2 if rank < paired else rank - paired // 2
    for k in range(power.bit_length() - 1):
        other = position ^ (1 << k)
        peer = other * 2 if other < paired // 2 else other + paired // 2
        how = Combine.BEFORE if peer < rank else Combine.AFTER
        yield Step((SendStep(peer, everything, k + 1),), (RecvStep(peer, everything, k + 1, how),))


def doubling_scan(rank: int, size: int, count: int) -> Iterator[Step]:
    """Inclusive scan of buffer 0, in rank order. After k rounds it covers 2^k ranks."""
    everything = whole(count)
    for k, distance in enumerate(_distances(size)):
        sends = (SendStep(rank + distance, everything, k),) if rank + distance < size else ()
        receives = (RecvStep(rank - distance, everything, k, Combine.BEFORE),) if rank >= distance else ()
        yield Step(sends, receives)


def doubling_exclusive_scan(rank: int, size: int, count: int) -> Iterator[Step]:
    """Exclusive scan of buffer 0; unchanged on rank 0. Buffer 1 is the inclusive scan to send, buffer 2 receives."""
    result, partial, arriving = whole(count), whole(count, 1), whole(count, 2)
    yield Step(then=(LocalCopy(partial, result, Combine.COPY),))
    for k, distance in enumerate(_distances(size)):
        sends = (SendStep(rank + distance, partial, k),) if rank + distance < size else ()
        if rank < distance:
            yield Step(sends)
            continue
        # buffer 0 holds our own elements until the first arrival
        first = Combine.COPY if distance == 1 else Combine.BEFORE
        then = (LocalCopy(result, arriving, first), LocalCopy(partial, arriving, Combine.BEFORE))
        yield Step(sends, (RecvStep(rank - distance, arriving, k, Combine.COPY),), then)


def _distances(size: int) -> Iterator[int]:
    distance = 1
    while distance < size:
        yield distance
        distance *= 2


class Halving(NamedTuple):
    """One cut through the ranks, as seen by one of them."""

    near: range
    """Its half."""
    far: range
    given: tuple[int, ...]
    """Ranks it sends to when reducing, receives from when gathering."""
    taken: tuple[int, ...]
    """Ranks it receives from when reducing, sends to when gathering."""


def halvings(rank: int, size: int) -> list[Halving]:
    """The cuts from the whole world down to the rank."""
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
    return Halving(lower, upper, (upper.start,), ())  # the excess rank has no partner that sends to it


def _in_upper(rank: int, lower: range, upper: range) -> Halving:
    partner = rank - len(lower)
    odd_one = (lower.stop - 1,) if len(lower) > len(upper) and rank == upper.start else ()
    return Halving(upper, lower, (partner,), (partner, *odd_one))


def halving_reduce_scatter(rank: int, size: int, spans: Sequence[Span], *, tag: int = 0) -> Iterator[Step]:
    """Rank i ends with the reduction of block i; the rest is partial. Commutative only."""
    for cut in halvings(rank, size):
        near, far = runs(spans, cut.near), runs(spans, cut.far)
        given = tuple(each for peer in cut.given for each in sends(peer, far, tag))
        yield Step(given, tuple(each for peer in cut.taken for each in receives(peer, near, _combine(peer, rank), tag)))


def doubling_all_gather(rank: int, size: int, spans: Sequence[Span], *, tag: int = 0) -> Iterator[Step]:
    """Rank i begins with block i in buffer 0; all end with all."""
    for cut in reversed(halvings(rank, size)):
        near, far = runs(spans, cut.near), runs(spans, cut.far)
        sent = tuple(each for peer in cut.taken for each in sends(peer, near, tag))
        yield Step(sent, tuple(each for peer in cut.given for each in receives(peer, far, Combine.COPY, tag)))


def halving_doubling_all_reduce(rank: int, size: int, count: int) -> Iterator[Step]:
    """All-reduce of buffer 0, bit-identical. Commutative only. Gathers by Bruck unless the size is a power of two."""
    spans = split(count, size)
    yield from halving_reduce_scatter(rank, size, spans)
    gather = bruck_all_gather if size & (size - 1) else doubling_all_gather
    yield from gather(rank, size, spans, tag=size)


def _combine(peer: int, rank: int) -> Combine:
    return Combine.BEFORE if peer < rank else Combine.AFTER
