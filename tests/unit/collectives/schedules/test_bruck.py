"""Twice as many blocks with each round."""

from nexar.collectives.schedules.blocks import equal
from nexar.collectives.schedules.bruck import all_gather


def test_a_run_past_the_last_rank_is_two_messages():
    first, second, third = all_gather(5, 6, equal(10, 6))
    assert [each.part.count for each in first.sends] == [10]
    assert [each.part[1:] for each in second.sends] == [(50, 60), (0, 10)]
    assert sum(each.part.count for each in third.sends) == 20


def test_the_last_round_passes_only_what_is_missing():
    *_, last = all_gather(0, 5, equal(10, 5))
    assert sum(each.part.count for each in last.receives) == 10
