"""The vocabulary of schedules: what fits together, and what it costs."""

import pytest

from nexar.collectives.schedule import (
    Cost,
    Fold,
    How,
    Local,
    Part,
    Receive,
    Send,
    Step,
    check,
    cost,
    without_empty,
)
from nexar.errors import InternalError

HERE = Part(0, 0, 4)
SENDS = Step(sends=(Send(1, HERE, 0),))
RECEIVES = Step(receives=(Receive(0, HERE, 0, How.COPY),))


def test_a_send_and_its_receive_fit_together():
    check([[SENDS], [RECEIVES]], [[4], [4]])


@pytest.mark.parametrize(
    ("schedules", "said"),
    [
        ([[SENDS], []], "sent only"),
        ([[], [RECEIVES]], "awaited only"),
        ([[SENDS], [Step(receives=(Receive(0, Part(0, 0, 3), 0, How.COPY),))]], "without their other end"),
        ([[SENDS, SENDS], [RECEIVES, RECEIVES]], "twice"),
        ([[Step((Send(0, HERE, 0),), (Receive(0, HERE, 0, How.COPY),))], []], "to oneself"),
        ([[Step(then=(Local(Part(0, 0, 5), Part(0, 0, 5), How.COPY),))], []], "outside its buffers"),
        ([[Step(then=(Local(Part(1, 0, 0), Part(1, 0, 0), How.COPY),))], []], "outside its buffers"),
        ([[Step(then=(Local(Part(0, 0, 2), Part(0, 1, 3), How.LEFT),))], []], "overlapping"),
        ([[Step(then=(Fold(Part(0, 0, 1), (Part(0, 1, 3),)),))], []], "another length"),
    ],
)
def test_what_does_not_fit_is_named(schedules, said):
    with pytest.raises(InternalError, match=said):
        check(schedules, [[4], [4]])


def test_the_cost_counts_what_moves_between_ranks_and_nothing_else():
    inside = Step(then=(Local(Part(0, 0, 2), Part(0, 2, 4), How.RIGHT),))
    assert cost([SENDS, inside, RECEIVES], itemsize=8) == Cost(2, 1, 32, 32)


def test_empty_parts_and_steps_without_work_are_left_out():
    empty = Part(0, 4, 4)
    work = (Local(empty, empty, How.COPY), Fold(Part(0, 0, 1), (Part(0, 1, 2),)))
    full = Step((Send(1, empty, 0), Send(1, HERE, 1)), (Receive(1, empty, 0, How.LEFT),), work)
    assert list(without_empty([Step(), full, Step(sends=(Send(1, empty, 2),))])) == [
        Step((Send(1, HERE, 1),), (), work[1:])
    ]
