"""Nobody leaves before everybody has come.

Everybody to everybody.
"""

from nexar.arrays.views import split
from nexar.collectives.schedule import LocalFold, Range
from nexar.collectives.schedules import direct
from nexar.collectives.schedules.direct import NO_ELEMENTS, dissemination_barrier, two_phase_barrier


def test_messages_of_a_barrier_have_no_payload():
    for way in (dissemination_barrier, two_phase_barrier):
        for step in way(0, 5):
            assert {each.part for each in (*step.sends, *step.receives)} == {NO_ELEMENTS}


def test_distances_double():
    assert [step.sends[0].peer for step in dissemination_barrier(1, 6)] == [2, 3, 5]


def test_rank_0_releases_nobody_before_all_have_come():
    come, go = two_phase_barrier(0, 4)
    assert [each.peer for each in come.receives] == [each.peer for each in go.sends] == [1, 2, 3]


def test_contributions_are_folded_from_rank_0_up():
    (step,) = direct.direct_reduce_scatter(1, 3, split(30, 3))
    copy, fold = step.then
    assert fold == LocalFold(Range(0, 10, 20), (Range(1, 0, 10), Range(1, 10, 20), Range(1, 20, 30)))
    assert (copy.into, copy.source) == (Range(1, 10, 20), Range(0, 10, 20))
    assert {each.peer: each.part for each in step.receives} == {0: Range(1, 0, 10), 2: Range(1, 20, 30)}


def test_a_segment_is_reported_while_the_next_one_s_contributions_are_on_their_way():
    first, second, last = direct.direct_all_reduce(0, 2, 40, segment=10)
    assert first.then[-1].into == second.sends[-1].part
    assert len(second.sends) == len(second.receives) == 2
    assert not last.then


def test_only_the_root_of_a_reduction_gathers():
    (gives,) = direct.gather_fold_to(1, 3, 4, root=0)
    (takes,) = direct.gather_fold_to(0, 3, 4, root=0)
    assert not gives.receives
    assert len(takes.receives) == 2
    assert len(next(direct.gather_fold(1, 3, 4)).sends) == 2
