"""What moves where: the vocabulary in which every collective is written down before a byte moves.

A schedule is what one rank does, step by step. Buffers are numbered: 0 is the array of the call, 1 and above are extra
memory. One step means: its sends read memory as it was when the step began; its receives take effect at its end, in
order; then come its local works, in order. Who runs it may post receives early and keep sends in flight across steps,
as long as nobody can tell the difference.

A tag is used once from one sender to one receiver within a schedule, so messages find their receives in whatever order
they arrive. All ranks make their schedules from the same facts, and from nothing else: so they fit together without a
word between them.

A schedule, read once more for speed: from which step on each receive may be posted.

Law: a receive that copies lands in its part at any moment after it is posted. So it may be posted ahead of its step
only past the last step that reads or writes any of that part; within one step, a send of the same elements forces it
to land elsewhere first (*staged*). A receive that reduces always lands in scratch memory, so it may be posted at any
time; how far ahead is a matter of memory. Looking back over a few steps is enough: nothing is posted further ahead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from nexar.errors import InternalError


class Combine(IntEnum):
    """What is done with elements that come to a part. Left and right matter: not every operation commutes."""

    COPY = 0
    """part := data"""
    BEFORE = 1
    """part := data ⊕ part"""
    AFTER = 2
    """part := part ⊕ data"""


class Range(NamedTuple):
    """Elements `start` up to, not including, `stop`, of a numbered buffer."""

    buffer: int
    start: int
    stop: int

    @property
    def count(self) -> int:  # type: ignore[override]  # a part has no use for a tuple's count()
        """How many elements."""
        return self.stop - self.start


def overlap(one: Range, other: Range) -> bool:
    """Do they share an element? For parts that have any."""
    return one.buffer == other.buffer and one.start < other.stop and other.start < one.stop


class SendStep(NamedTuple):
    """`part`, as it was when the step began, to rank `peer`."""

    peer: int
    part: Range
    tag: int


class RecvStep(NamedTuple):
    """As many elements as `part` has, from rank `peer`."""

    peer: int
    part: Range
    tag: int
    how: Combine


class LocalCopy(NamedTuple):
    """From one part of this rank's memory to another of the same length, which does not overlap it."""

    into: Range
    source: Range
    how: Combine

    @property
    def sources(self) -> tuple[Range, ...]:
        """As a Fold has them."""
        return (self.source,)


class LocalFold(NamedTuple):
    """`into` := ((s0 ⊕ s1) ⊕ s2) …: a left fold over `sources`, in one go, so that half types are rounded once.

    That is more than a row of Locals, which round each time: a deterministic result is the same on every way, and the
    way through shared memory folds so. `into` overlaps none of the sources.
    """

    into: Range
    sources: tuple[Range, ...]


class Step(NamedTuple):
    """See the module."""

    sends: tuple[SendStep, ...] = ()
    receives: tuple[RecvStep, ...] = ()
    then: tuple[LocalCopy | LocalFold, ...] = ()


class Cost(NamedTuple):
    """What a schedule takes from its rank. Nothing that stays within the rank counts as sent."""

    steps: int
    messages: int
    sent_bytes: int
    received_bytes: int


def schedule_cost(schedule: Iterable[Step], itemsize: int = 1) -> Cost:
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


def check_schedules(schedules: Sequence[Sequence[Step]], buffers: Sequence[Sequence[int]]) -> None:
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


def _parts(step: Step) -> Iterator[Range]:
    yield from (send.part for send in step.sends)
    yield from (receive.part for receive in step.receives)
    yield from (part for pair in _pairs(step) for part in pair)


def _pairs(step: Step) -> Iterator[tuple[Range, Range]]:
    for work in step.then:
        yield from ((work.into, source) for source in work.sources)


def _difference(sent: Counter[tuple[int, int, int, int]], received: Counter[tuple[int, int, int, int]]) -> str:
    return f"sent only {sorted(sent - received)[:4]}, awaited only {sorted(received - sent)[:4]}"


AHEAD: Final = 4
"""Steps. Enough that a message never waits for its receive, and its scratch memory stays in the cache."""


class PostedAt(NamedTuple):
    """One receive of a step."""

    step: int
    receive: RecvStep
    direct: bool
    """It lands in its part; else in scratch memory."""


class Program(NamedTuple):
    """The steps of one rank, and what to post when."""

    steps: tuple[Step, ...]
    posts: tuple[tuple[PostedAt, ...], ...]
    """By step: the receives that may be posted from when it begins, its own and later ones."""
    due: tuple[tuple[PostedAt, ...], ...]
    """By step: the receives that must have come when it ends."""


def compile_steps(steps: tuple[Step, ...]) -> Program:
    """Pure: the same steps give the same program."""
    posts: list[list[PostedAt]] = [[] for _ in steps]
    due = []
    for index, step in enumerate(steps):
        ours = tuple(PostedAt(index, receive, _is_direct(receive, step)) for receive in step.receives)
        for each in ours:
            posts[_earliest(each, steps)].append(each)
        due.append(ours)
    return Program(steps, tuple(map(tuple, posts)), tuple(due))


def _is_direct(receive: RecvStep, step: Step) -> bool:
    if receive.how is not Combine.COPY:
        return False
    shared = any(overlap(send.part, receive.part) for send in step.sends)
    return not shared and sum(overlap(other.part, receive.part) for other in step.receives) == 1


def _earliest(each: PostedAt, steps: tuple[Step, ...]) -> int:
    first = max(0, each.step - AHEAD)
    if not each.direct:
        return first
    return next(
        (before + 1 for before in range(each.step - 1, first - 1, -1) if _touches(steps[before], each.receive.part)),
        first,
    )


def _touches(step: Step, part: Range) -> bool:
    return (
        any(overlap(send.part, part) for send in step.sends)
        or any(overlap(receive.part, part) for receive in step.receives)
        or any(overlap(other, part) for work in step.then for other in (work.into, *work.sources))
    )
