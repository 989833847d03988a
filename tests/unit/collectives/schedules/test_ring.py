"""Round the ring."""

from nexar.arrays.partition import split
from nexar.collectives.schedule import How
from nexar.collectives.schedules import ring


def test_a_rank_talks_to_its_neighbours_only():
    steps = list(ring.all_reduce(2, 5, 50))
    assert {send.peer for step in steps for send in step.sends} == {3}
    assert {receive.peer for step in steps for receive in step.receives} == {1}


def test_the_last_share_to_arrive_is_its_own():
    *_, last = ring.reduce_scatter(3, 4, split(40, 4))
    assert last.receives[0].part[1:] == (30, 40)
    assert last.receives[0].how is How.LEFT


def test_a_segment_leaves_one_round_after_it_came_and_the_others_of_its_share_lie_between():
    steps = list(ring.all_reduce(0, 3, 90, segment=10))
    for came, leaves in zip(steps, steps[3:], strict=False):
        assert leaves.sends[0].part == came.receives[0].part
