"""The vocabulary of schedules: what fits together, and what it costs."""

import pytest

from nexar.collectives.schedule import (
    AHEAD,
    Combine,
    Cost,
    LocalCopy,
    LocalFold,
    Range,
    RecvStep,
    SendStep,
    Step,
    check_schedules,
    compile_steps,
    overlap,
    schedule_cost,
    without_empty,
)
from nexar.errors import InternalError


def part(start: int, stop: int, buffer: int = 0) -> Range:
    return Range(buffer, start, stop)


def receive(where: Range, how: Combine = Combine.COPY, tag: int = 0) -> RecvStep:
    return RecvStep(1, where, tag, how)


def posted_at(steps: tuple[Step, ...], index: int) -> int:
    """When the only receive of step `index` is posted."""
    program = compile_steps(steps)
    (due,) = program.due[index]
    return next(step for step, posts in enumerate(program.posts) if due in posts)


def test_parts_overlap_if_they_share_an_element() -> None:
    assert overlap(part(0, 4), part(3, 5))
    assert not overlap(part(0, 4), part(4, 5))
    assert not overlap(part(0, 4), part(0, 4, buffer=1))


def test_a_receive_is_posted_a_few_steps_ahead_and_no_further() -> None:
    steps = (*(Step() for _ in range(9)), Step(receives=(receive(part(0, 4)),)))
    assert posted_at(steps, 9) == 9 - AHEAD


def test_what_copies_waits_for_the_last_step_that_touches_its_part() -> None:
    reading = Step(sends=(SendStep(1, part(0, 4), 0),))
    writing = Step(receives=(receive(part(3, 9), tag=1),))
    working = Step(then=(LocalCopy(part(8, 9, 1), part(1, 2), Combine.COPY),))
    last = Step(receives=(receive(part(0, 4)),))
    for before in (reading, writing, working):
        assert posted_at((Step(), before, Step(), last), 3) == 2
    elsewhere = Step(sends=(SendStep(1, part(4, 8), 0),))
    assert posted_at((Step(), elsewhere, Step(), last), 3) == 0


def test_what_reduces_lands_elsewhere_and_is_posted_early_whatever_happens_to_its_part() -> None:
    steps = (Step(), Step(sends=(SendStep(1, part(0, 4), 0),)), Step(receives=(receive(part(0, 4), Combine.BEFORE),)))
    (due,) = compile_steps(steps).due[2]
    assert not due.direct
    assert posted_at(steps, 2) == 0


def test_what_copies_over_what_the_same_step_sends_or_receives_lands_elsewhere() -> None:
    both = Step(sends=(SendStep(1, part(0, 4), 0),), receives=(receive(part(2, 6)),))
    twice = Step(receives=(receive(part(0, 4)), receive(part(2, 6), tag=1)))
    apart = Step(sends=(SendStep(1, part(0, 4), 0),), receives=(receive(part(4, 6)),))
    directs = [[due.direct for due in compile_steps((step,)).due[0]] for step in (both, twice, apart)]
    assert directs == [[False], [False, False], [True]]


HERE = Range(0, 0, 4)
SENDS = Step(sends=(SendStep(1, HERE, 0),))
RECEIVES = Step(receives=(RecvStep(0, HERE, 0, Combine.COPY),))


def test_a_send_and_its_receive_fit_together():
    check_schedules([[SENDS], [RECEIVES]], [[4], [4]])


@pytest.mark.parametrize(
    ("schedules", "said"),
    [
        ([[SENDS], []], "sent only"),
        ([[], [RECEIVES]], "awaited only"),
        ([[SENDS], [Step(receives=(RecvStep(0, Range(0, 0, 3), 0, Combine.COPY),))]], "unmatched messages"),
        ([[SENDS, SENDS], [RECEIVES, RECEIVES]], "twice"),
        ([[Step((SendStep(0, HERE, 0),), (RecvStep(0, HERE, 0, Combine.COPY),))], []], "to oneself"),
        ([[Step(then=(LocalCopy(Range(0, 0, 5), Range(0, 0, 5), Combine.COPY),))], []], "outside its buffers"),
        ([[Step(then=(LocalCopy(Range(1, 0, 0), Range(1, 0, 0), Combine.COPY),))], []], "outside its buffers"),
        ([[Step(then=(LocalCopy(Range(0, 0, 2), Range(0, 1, 3), Combine.BEFORE),))], []], "overlapping"),
        ([[Step(then=(LocalFold(Range(0, 0, 1), (Range(0, 1, 3),)),))], []], "another length"),
    ],
)
def test_what_does_not_fit_is_named(schedules, said):
    with pytest.raises(InternalError, match=said):
        check_schedules(schedules, [[4], [4]])


def test_the_cost_counts_what_moves_between_ranks_and_nothing_else():
    inside = Step(then=(LocalCopy(Range(0, 0, 2), Range(0, 2, 4), Combine.AFTER),))
    assert schedule_cost([SENDS, inside, RECEIVES], itemsize=8) == Cost(2, 1, 32, 32)


def test_empty_parts_and_steps_without_work_are_left_out():
    empty = Range(0, 4, 4)
    work = (LocalCopy(empty, empty, Combine.COPY), LocalFold(Range(0, 0, 1), (Range(0, 1, 2),)))
    full = Step((SendStep(1, empty, 0), SendStep(1, HERE, 1)), (RecvStep(1, empty, 0, Combine.BEFORE),), work)
    assert list(without_empty([Step(), full, Step(sends=(SendStep(1, empty, 2),))])) == [
        Step((SendStep(1, HERE, 1),), (), work[1:])
    ]
