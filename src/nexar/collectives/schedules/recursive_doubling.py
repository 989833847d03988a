"""Recursive doubling: with each round a rank knows of twice as many. Few rounds, whole vectors: for small ones.

What a rank holds always stands for neighbouring ranks, and two holdings are combined lower ⊕ upper on both sides: so
rank order is kept (the operation need not commute), and both partners compute the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

from nexar.collectives.schedule import How, Local, Receive, Send, Step
from nexar.collectives.schedules.blocks import whole


def all_reduce(rank: int, size: int, count: int) -> Iterator[Step]:
    """Buffer 0 in place. Rank order is kept.

    Partners are found by flipping bits, so a power of two takes part; of the ranks in excess each gives its vector to
    the rank below it first (they stay neighbours, in order), and gets the result last.
    """
    power = 1 << (size.bit_length() - 1)
    paired = 2 * (size - power)  # ranks below this one go in twos; the even one speaks for both
    everything = whole(count)
    last = power.bit_length()  # rounds use the tags 1..last-1
    if rank < paired and rank % 2:
        yield Step(sends=(Send(rank - 1, everything, 0),))
        yield Step(receives=(Receive(rank - 1, everything, last, How.COPY),))
        return
    if rank < paired:
        yield Step(receives=(Receive(rank + 1, everything, 0, How.RIGHT),))
    yield from _rounds(rank, paired, power, count)
    if rank < paired:
        yield Step(sends=(Send(rank + 1, everything, last),))


def _rounds(rank: int, paired: int, power: int, count: int) -> Iterator[Step]:
    everything = whole(count)
    seat = rank // 2 if rank < paired else rank - paired // 2
    for k in range(power.bit_length() - 1):
        other = seat ^ (1 << k)
        peer = other * 2 if other < paired // 2 else other + paired // 2
        how = How.LEFT if peer < rank else How.RIGHT
        yield Step((Send(peer, everything, k + 1),), (Receive(peer, everything, k + 1, how),))


def scan(rank: int, size: int, count: int) -> Iterator[Step]:
    """Buffer 0: the rank's own elements, then the reduction over ranks 0 up to it. Rank order is kept.

    After k rounds it covers the 2^k ranks that end here; those of the rank 2^k below are just what lies before them.
    """
    everything = whole(count)
    for k, distance in enumerate(_distances(size)):
        sends = (Send(rank + distance, everything, k),) if rank + distance < size else ()
        receives = (Receive(rank - distance, everything, k, How.LEFT),) if rank >= distance else ()
        yield Step(sends, receives)


def exclusive_scan(rank: int, size: int, count: int) -> Iterator[Step]:
    """Buffer 0: the rank's own elements, then the reduction over the ranks below it; rank 0's is left as it was.

    Buffer 1 (`count`) is the scan that passes on, this rank included; buffer 2 (`count`) is what has just arrived.
    """
    result, partial, arriving = whole(count), whole(count, 1), whole(count, 2)
    yield Step(then=(Local(partial, result, How.COPY),))
    for k, distance in enumerate(_distances(size)):
        sends = (Send(rank + distance, partial, k),) if rank + distance < size else ()
        if rank < distance:
            yield Step(sends)
            continue
        first = How.COPY if distance == 1 else How.LEFT  # buffer 0 holds our own until something comes
        then = (Local(result, arriving, first), Local(partial, arriving, How.LEFT))
        yield Step(sends, (Receive(rank - distance, arriving, k, How.COPY),), then)


def _distances(size: int) -> Iterator[int]:
    distance = 1
    while distance < size:
        yield distance
        distance *= 2
