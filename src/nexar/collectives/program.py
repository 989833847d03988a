"""A schedule, read once more for speed: from which step on each receive may be posted.

Law: a receive that copies lands in its part at any moment after it is posted. So it may be posted ahead of its step
only past the last step that reads or writes any of that part; within one step, a send of the same elements forces it
to land elsewhere first (*staged*). A receive that reduces always lands in scratch memory, so it may be posted at any
time; how far ahead is a matter of memory. Looking back over a few steps is enough: nothing is posted further ahead.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from nexar.collectives.schedule import How, Part, Receive, Step, overlap

AHEAD: Final = 4
"""Steps. Enough that a message never waits for its receive, and its scratch memory stays in the cache."""


class Due(NamedTuple):
    """One receive of a step."""

    step: int
    receive: Receive
    direct: bool
    """It lands in its part; else in scratch memory."""


class Program(NamedTuple):
    """The steps of one rank, and what to post when."""

    steps: tuple[Step, ...]
    posts: tuple[tuple[Due, ...], ...]
    """By step: the receives that may be posted from when it begins, its own and later ones."""
    due: tuple[tuple[Due, ...], ...]
    """By step: the receives that must have come when it ends."""


def compile_steps(steps: tuple[Step, ...]) -> Program:
    """Pure: the same steps give the same program."""
    posts: list[list[Due]] = [[] for _ in steps]
    due = []
    for index, step in enumerate(steps):
        ours = tuple(Due(index, receive, _is_direct(receive, step)) for receive in step.receives)
        for each in ours:
            posts[_earliest(each, steps)].append(each)
        due.append(ours)
    return Program(steps, tuple(map(tuple, posts)), tuple(due))


def _is_direct(receive: Receive, step: Step) -> bool:
    if receive.how is not How.COPY:
        return False
    shared = any(overlap(send.part, receive.part) for send in step.sends)
    return not shared and sum(overlap(other.part, receive.part) for other in step.receives) == 1


def _earliest(each: Due, steps: tuple[Step, ...]) -> int:
    first = max(0, each.step - AHEAD)
    if not each.direct:
        return first
    return next(
        (before + 1 for before in range(each.step - 1, first - 1, -1) if _touches(steps[before], each.receive.part)),
        first,
    )


def _touches(step: Step, part: Part) -> bool:
    return (
        any(overlap(send.part, part) for send in step.sends)
        or any(overlap(receive.part, part) for receive in step.receives)
        or any(overlap(other, part) for work in step.then for other in (work.into, *work.sources))
    )
