import signal

import pytest

from nexar.launch.verdict import Ending, judge, signal_name


def test_all_well_is_zero():
    assert judge([Ending(0, 0), Ending(1, 0)]).exit_code == 0


def test_ranks_that_failed_are_lost_and_the_run_is_good_if_the_rest_ended_well():
    verdict = judge([Ending(0, 0), Ending(2, 3), Ending(1, 1)])
    assert (verdict.exit_code, verdict.failed) == (0, None)
    assert [ending.rank for ending in verdict.lost] == [2, 1]


def test_the_first_rank_that_failed_decides_if_a_survivor_did_not_end_well():
    victim = Ending(0, 1, blames_another=True)
    verdict = judge([victim, Ending(3, 0), Ending(2, 3), Ending(1, 1)])
    assert (verdict.exit_code, verdict.failed.rank) == (3, 2)
    assert [ending.rank for ending in verdict.lost] == [1]


def test_a_rank_that_only_missed_another_does_not_decide_unless_nobody_else_failed():
    victim = Ending(0, 1, blames_another=True)
    assert judge([victim, Ending(2, 3)]).failed.rank == 2
    assert judge([victim, Ending(1, 0)]).failed is victim


def test_a_killed_rank_decides_if_a_survivor_failed_because_it_missed_it():
    verdict = judge([Ending(0, 1, blames_another=True), Ending(1, -9), Ending(2, 0)])
    assert (verdict.exit_code, verdict.failed.rank, verdict.lost) == (128 + 9, 1, ())


def test_a_killed_rank_is_lost_and_the_run_is_good_if_the_rest_ended_well():
    verdict = judge([Ending(1, -9), Ending(0, 0)])
    assert (verdict.exit_code, verdict.failed) == (0, None)
    assert [ending.rank for ending in verdict.lost] == [1]


def test_a_run_in_which_nobody_ended_well_has_the_exit_code_of_the_first_that_was_lost():
    assert judge([Ending(1, -9), Ending(0, 4)]).exit_code == 128 + 9
    assert judge([Ending(0, 4), Ending(1, -9)]).exit_code == 4


def test_a_run_in_which_everybody_was_killed_is_not_good():
    assert judge([Ending(0, -11), Ending(1, -9)]).exit_code == 128 + 11


def test_of_a_rank_that_was_started_again_the_last_end_counts():
    assert judge([Ending(1, -9, replaced=True), Ending(0, 0), Ending(1, 0, name="rank 1 restart 1")]).exit_code == 0
    last = Ending(1, 5, name="rank 1 restart 1", given_up=True)
    verdict = judge([Ending(1, 4, replaced=True), Ending(0, 0), last])
    assert (verdict.exit_code, verdict.failed.who, verdict.lost) == (5, "rank 1 restart 1", ())


def test_used_up_restarts_fail_the_run_after_a_signal_as_after_an_exit_code():
    killed = Ending(1, -9, name="rank 1 restart 1", given_up=True)
    verdict = judge([Ending(1, -9, replaced=True), Ending(0, 0), killed])
    assert (verdict.exit_code, verdict.failed, verdict.lost) == (128 + 9, killed, ())


def test_who_came_too_late_is_lost_and_no_failure():
    late = Ending(1, 1, came_too_late=True)
    assert judge([Ending(0, 0), late]).exit_code == 0
    assert judge([Ending(0, 0), late]).lost == (late,)
    assert judge([late]).exit_code == 1


def test_an_interrupted_run_ends_like_a_program_that_was_interrupted():
    endings = [Ending(0, 1, stopped=True), Ending(1, -2, stopped=True)]
    verdict = judge(endings, interrupted=signal.SIGINT)
    assert (verdict.exit_code, verdict.failed, verdict.lost) == (130, None, ())


def test_a_loss_before_the_interruption_is_still_told():
    verdict = judge([Ending(0, 5), Ending(1, -2, stopped=True)], interrupted=signal.SIGINT)
    assert (verdict.exit_code, verdict.lost[0].rank) == (130, 0)


@pytest.mark.parametrize(
    ("code", "words"), [(3, "ended with exit code 3"), (-9, "was killed by SIGKILL"), (-50, "was killed by signal 50")]
)
def test_an_ending_in_words(code, words):
    assert str(Ending(0, code)) == words


def test_signals_have_names():
    assert signal_name(11) == "SIGSEGV"
