"""What moves where: the vocabulary in which every collective is written down before a byte moves.

A schedule is what one rank does, step by step. Buffers are numbered: 0 is the array of the call, 1 and above are extra
memory. One step means: its sends read memory as it was when the step began; its receives take effect at its end, in
order; then come its local works, in order. Who runs it may post receives early and keep sends in flight across steps,
as long as nobody can tell the difference.

A tag is used once from one sender to one receiver within a schedule, so messages find their receives in whatever order
they arrive. All ranks make their schedules from the same facts, and from nothing else: so they fit together without a
word between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from nexar.errors import InternalError


class How(IntEnum):
    """What is done with elements that come to a part. Left and right matter: not every operation commutes."""

    COPY = 0
    """part := data"""
    LEFT = 1
    """part := data ⊕ part"""
    RIGHT = 2
    """part := part ⊕ data"""


class Part(NamedTuple):
    """Elements `start` up to, not including, `stop`, of a numbered buffer."""

    buffer: int
    start: int
    stop: int

    @property
    def count(self) -> int:  # type: ignore[override]  # a part has no use for a tuple's count()
        """How many elements."""
        return self.stop - self.start


def overlap(one: Part, other: Part) -> bool:
    """Do they share an element? For parts that have any."""
    return one.buffer == other.buffer and one.start < other.stop and other.start < one.stop


class Send(NamedTuple):
    """`part`, as it was when the step began, to rank `peer`."""

    peer: int
    part: Part
    tag: int


class Receive(NamedTuple):
    """As many elements as `part` has, from rank `peer`."""

    peer: int
    part: Part
    tag: int
    how: How


class Local(NamedTuple):
    """From one part of this rank's memory to another of the same length, which does not overlap it."""

    into: Part
    source: Part
    how: How

    @property
    def sources(self) -> tuple[Part, ...]:
        """As a Fold has them."""
        return (self.source,)


class Fold(NamedTuple):
    """`into` := ((s0 ⊕ s1) ⊕ s2) …: a left fold over `sources`, in one go, so that half types are rounded once.

    That is more than a row of Locals, which round each time: a deterministic result is the same on every way, and the
    way through shared memory folds so. `into` overlaps none of the sources.
    """

    into: Part
    sources: tuple[Part, ...]


class Step(NamedTuple):
    """See the module."""

    sends: tuple[Send, ...] = ()
    receives: tuple[Receive, ...] = ()
    then: tuple[Local | Fold, ...] = ()


class Cost(NamedTuple):
    """What a schedule takes from its rank. Nothing that stays within the rank counts as sent."""

    steps: int
    messages: int
    sent_bytes: int
    received_bytes: int


def cost(schedule: Iterable[Step], itemsize: int = 1) -> Cost:
    """Of one rank. Steps that neither send nor receive are not counted."""
    moving = [step for step in schedule if step.sends or step.receives]
    sends = [send for step in moving for send in step.sends]
    received = sum(receive.part.count for step in moving for receive in step.receives)
    return Cost(len(moving), len(sends), sum(send.part.count for send in sends) * itemsize, received * itemsize)


def without_empty(schedule: Iterable[Step]) -> Iterator[Step]:
    """The same without parts of no elements and steps of no work. Both ends of a message see alike that it is empty."""
    for step in schedule:
        slim = Step(
            tuple(send for send in step.sends if send.part.count),
            tuple(receive for receive in step.receives if receive.part.count),
            tuple(work for work in step.then if work.into.count),
        )
        if any(slim):
            yield slim


def check(schedules: Sequence[Sequence[Step]], buffers: Sequence[Sequence[int]]) -> None:
    """InternalError unless the schedules of all ranks fit together, and into `buffers[rank]`, their lengths.

    Every send has its receive of the same length, no tag is used twice between two ranks, nobody sends to itself,
    every part lies within its buffer. That it also ends is for the one who runs it to see.
    """
    sent: Counter[tuple[int, int, int, int]] = Counter()
    received: Counter[tuple[int, int, int, int]] = Counter()
    for rank, schedule in enumerate(schedules):
        for step in schedule:
            _check_parts(rank, step, buffers[rank])
            sent.update((rank, send.peer, send.tag, send.part.count) for send in step.sends)
            received.update((receive.peer, rank, receive.tag, receive.part.count) for receive in step.receives)
    if sent != received:
        raise InternalError(
            f"messages (sender, receiver, tag, count) without their other end: {_difference(sent, received)}"
        )
    ways = Counter(key[:3] for key in sent.elements())
    if any(times > 1 for times in ways.values()) or any(sender == receiver for sender, receiver, _ in ways):
        raise InternalError(f"tags used twice, or messages to oneself: {[way for way in ways if ways[way] > 1]}")


def _check_parts(rank: int, step: Step, lengths: Sequence[int]) -> None:
    for part in _parts(step):
        if not 0 <= part.buffer < len(lengths) or not 0 <= part.start <= part.stop <= lengths[part.buffer]:
            raise InternalError(f"{part} of rank {rank} lies outside its buffers of {list(lengths)} elements")
    for into, source in _pairs(step):
        if into.count != source.count or overlap(into, source):
            raise InternalError(f"rank {rank} takes {into} from {source}, of another length or overlapping")


def _parts(step: Step) -> Iterator[Part]:
    yield from (send.part for send in step.sends)
    yield from (receive.part for receive in step.receives)
    yield from (part for pair in _pairs(step) for part in pair)


def _pairs(step: Step) -> Iterator[tuple[Part, Part]]:
    for work in step.then:
        yield from ((work.into, source) for source in work.sources)


def _difference(sent: Counter[tuple[int, int, int, int]], received: Counter[tuple[int, int, int, int]]) -> str:
    return f"sent only {sorted(sent - received)[:4]}, awaited only {sorted(received - sent)[:4]}"
