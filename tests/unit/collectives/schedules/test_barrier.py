"""Nobody leaves before everybody has come."""

from nexar.collectives.schedules.barrier import NOTHING, dissemination, two_phase


def test_messages_of_a_barrier_have_no_payload():
    for way in (dissemination, two_phase):
        for step in way(0, 5):
            assert {each.part for each in (*step.sends, *step.receives)} == {NOTHING}


def test_distances_double():
    assert [step.sends[0].peer for step in dissemination(1, 6)] == [2, 3, 5]


def test_rank_0_releases_nobody_before_all_have_come():
    come, go = two_phase(0, 4)
    assert [each.peer for each in come.receives] == [each.peer for each in go.sends] == [1, 2, 3]
