"""Every pair meets once."""

from nexar.collectives.schedules import pairwise
from nexar.collectives.schedules.blocks import equal


def test_everybody_is_met_once_each_way():
    blocks = equal(2, 6)
    steps = list(pairwise.all_to_all(1, 6, blocks, blocks))[1:]
    assert [step.sends[0].peer for step in steps] == [2, 3, 4, 5, 0]
    assert [step.receives[0].peer for step in steps] == [0, 5, 4, 3, 2]


def test_blocks_that_are_given_away_are_not_touched():
    blocks = equal(2, 6)
    assert {step.receives[0].part for step in pairwise.reduce_scatter(1, 6, blocks)} == {(0, 2, 4)}
