"""One after the other, in segments.

Every pair meets once.

Round the ring.
"""

from nexar.arrays.views import split
from nexar.collectives.schedule import Combine
from nexar.collectives.schedules import ring
from nexar.collectives.schedules.blocks import equal


def test_a_rank_passes_a_segment_on_while_it_receives_the_next():
    first, *middle, last = ring.chain_broadcast(2, 4, 50, root=0, segment=10)
    assert not first.sends
    assert not last.receives
    for before, step in zip([first, *middle], middle, strict=False):
        assert step.sends[0].part == before.receives[0].part
        assert step.receives[0].part.start == step.sends[0].part.stop


def test_the_chain_goes_up_from_the_root_and_round():
    assert next(ring.chain_broadcast(0, 4, 5, root=3)).receives[0].peer == 3
    assert not any(step.sends for step in ring.chain_broadcast(2, 4, 5, root=3))


def test_what_an_exclusive_scan_passes_on_has_the_rank_s_own_in_it():
    _, first, second, *_ = ring.chain_exclusive_scan(1, 3, 20, segment=10)
    assert first.then[0].into == second.sends[0].part


def test_everybody_is_met_once_each_way():
    blocks = equal(2, 6)
    steps = list(ring.pairwise_all_to_all(1, 6, blocks))[1:]
    assert [step.sends[0].peer for step in steps] == [2, 3, 4, 5, 0]
    assert [step.receives[0].peer for step in steps] == [0, 5, 4, 3, 2]


def test_blocks_that_are_given_away_are_not_touched():
    blocks = equal(2, 6)
    assert {step.receives[0].part for step in ring.pairwise_reduce_scatter(1, 6, blocks)} == {(0, 2, 4)}


def test_a_rank_talks_to_its_neighbours_only():
    steps = list(ring.ring_all_reduce(2, 5, 50))
    assert {send.peer for step in steps for send in step.sends} == {3}
    assert {receive.peer for step in steps for receive in step.receives} == {1}


def test_the_last_share_to_arrive_is_its_own():
    *_, last = ring.ring_reduce_scatter(3, 4, split(40, 4))
    assert last.receives[0].part[1:] == (30, 40)
    assert last.receives[0].how is Combine.BEFORE


def test_a_segment_leaves_one_round_after_it_came_and_the_others_of_its_share_lie_between():
    steps = list(ring.ring_all_reduce(0, 3, 90, segment=10))
    for came, leaves in zip(steps, steps[3:], strict=False):
        assert leaves.sends[0].part == came.receives[0].part
