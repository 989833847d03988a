"""Everybody to everybody."""

from nexar.arrays.partition import split
from nexar.collectives.schedule import Fold, Part
from nexar.collectives.schedules import direct


def test_contributions_are_folded_from_rank_0_up():
    (step,) = direct.reduce_scatter(1, 3, split(30, 3))
    copy, fold = step.then
    assert fold == Fold(Part(0, 10, 20), (Part(1, 0, 10), Part(1, 10, 20), Part(1, 20, 30)))
    assert (copy.into, copy.source) == (Part(1, 10, 20), Part(0, 10, 20))
    assert {each.peer: each.part for each in step.receives} == {0: Part(1, 0, 10), 2: Part(1, 20, 30)}


def test_a_segment_is_told_while_the_next_one_s_contributions_are_on_their_way():
    first, second, last = direct.all_reduce(0, 2, 40, segment=10)
    assert first.then[-1].into == second.sends[-1].part
    assert len(second.sends) == len(second.receives) == 2
    assert not last.then


def test_only_the_root_of_a_reduction_gathers():
    (gives,) = direct.gather_fold_to(1, 3, 4, root=0)
    (takes,) = direct.gather_fold_to(0, 3, 4, root=0)
    assert not gives.receives
    assert len(takes.receives) == 2
    assert len(next(direct.gather_fold(1, 3, 4)).sends) == 2
