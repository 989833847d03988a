"""Schedules (pure lists of one rank's sends, receives and local work) and programs (with posting times).

Buffer 0 is the call's array, others are extra memory. In a step, sends read the memory as it was at the beginning;
receives take effect at the end, in order; then local operations run. Executors may overlap steps if the result is the
same. A tag is used once per sender and receiver, so messages match in any order.

Invariant: a copying receive may write its part any time after posting. So it is posted after the last earlier step that
accesses the part, and to scratch memory if its own step sends from there. A reducing receive always goes to scratch
memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from nexar.errors import InternalError


class Combine(IntEnum):
    """How incoming elements are combined; not every operation commutes."""

    COPY = 0
    """part := data"""
    BEFORE = 1
    """part := data ⊕ part"""
    AFTER = 2
    """part := part ⊕ data"""


class Range(NamedTuple):
    """Elements `start` (inclusive) to `stop` (exclusive) of a numbered buffer."""

    buffer: int
    start: int
    stop: int

    @property
    def count(self) -> int:  # type: ignore[override] # tuple.count() is not needed
        return self.stop - self.start


def overlap(one: Range, other: Range) -> bool:
    """Whether two non-empty ranges share an element."""
    return one.buffer == other.buffer and one.start < other.stop and other.start < one.stop


class SendStep(NamedTuple):
    """Send `part`, as it was when the step began."""

    peer: int
    part: Range
    tag: int


class RecvStep(NamedTuple):
    """Receive as many elements as `part` has."""

    peer: int
    part: Range
    tag: int
    how: Combine


class LocalCopy(NamedTuple):
    """Combine one part into another of the same length, without overlap."""

    into: Range
    source: Range
    how: Combine

    @property
    def sources(self) -> tuple[Range, ...]:
        return (self.source,)


class LocalFold(NamedTuple):
    """`into` := ((s0 ⊕ s1) ⊕ s2) …, at once, so that half types are rounded once. No source overlaps `into`."""

    into: Range
    sources: tuple[Range, ...]


class Step(NamedTuple):
    """One step of a schedule."""

    sends: tuple[SendStep, ...] = ()
    receives: tuple[RecvStep, ...] = ()
    then: tuple[LocalCopy | LocalFold, ...] = ()


class Cost(NamedTuple):
    """Cost of a schedule for its rank."""

    steps: int
    messages: int
    sent_bytes: int
    received_bytes: int


def schedule_cost(schedule: Iterable[Step], itemsize: int = 1) -> Cost:
    """Ignores steps without messages."""
    moving = [step for step in schedule if step.sends or step.receives]
    sends = [send for step in moving for send in step.sends]
    received = sum(receive.part.count for step in moving for receive in step.receives)
    return Cost(len(moving), len(sends), sum(send.part.count for send in sends) * itemsize, received * itemsize)


def without_empty(schedule: Iterable[Step]) -> Iterator[Step]:
    """Drop empty parts and steps. Both ends know that a message is empty."""
    for step in schedule:
        slim = Step(
            tuple(send for send in step.sends if send.part.count),
            tuple(receive for receive in step.receives if receive.part.count),
            tuple(work for work in step.then if work.into.count),
        )
        if any(slim):
            yield slim


def check_schedules(schedules: Sequence[Sequence[Step]], buffers: Sequence[Sequence[int]]) -> None:
    """Raises InternalError unless all ranks' schedules match and fit `buffers[rank]`: every send has a receive of the
    same length, no tag is reused, no rank sends to itself. Does not check for deadlocks.
    """
    sent: Counter[tuple[int, int, int, int]] = Counter()
    received: Counter[tuple[int, int, int, int]] = Counter()
    for rank, schedule in enumerate(schedules):
        for step in schedule:
            _check_parts(rank, step, buffers[rank])
            sent.update((rank, send.peer, send.tag, send.part.count) for send in step.sends)
            received.update((receive.peer, rank, receive.tag, receive.part.count) for receive in step.receives)
    if sent != received:
        raise InternalError(f"unmatched messages (sender, receiver, tag, count): {_difference(sent, received)}")
    uses = Counter(key[:3] for key in sent.elements())
    if any(times > 1 for times in uses.values()) or any(sender == receiver for sender, receiver, _ in uses):
        raise InternalError(f"tags used twice, or messages to oneself: {[use for use in uses if uses[use] > 1]}")


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
"""Steps that a receive is posted early: messages find their receive, and scratch memory stays in the cache."""


class PostedAt(NamedTuple):
    """One receive of a step."""

    step: int
    receive: RecvStep
    direct: bool
    """True: the data goes into its part, not into scratch memory."""


class Program(NamedTuple):
    """The steps of one rank with posting times."""

    steps: tuple[Step, ...]
    posts: tuple[tuple[PostedAt, ...], ...]
    """By step: receives to post when it begins."""
    due: tuple[tuple[PostedAt, ...], ...]
    """By step: receives to complete at its end."""


def compile_steps(steps: tuple[Step, ...]) -> Program:
    """Returns the program of these steps. Pure."""
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
