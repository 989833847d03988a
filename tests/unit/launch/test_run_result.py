import io
import signal

import pytest

from nexar.launch.output import Console
from nexar.launch.run_result import FailureReport, RankExit, run_result, signal_name
from nexar.launch.stop_policy import RankFailure

RAISED = RankFailure(2, "rank 2", "ended with exit code 1", 1)
MISSED = RankFailure(0, "rank 0", "ended with exit code 1", 1, consequence=True)


class Scene:
    def __init__(self) -> None:
        self.output = io.BytesIO()
        self.report = FailureReport(Console({"stdout": io.BytesIO(), "stderr": self.output}))

    @property
    def lines(self) -> list[str]:
        return self.output.getvalue().decode().splitlines()


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_the_culprit_is_written_with_its_traceback(scene: Scene) -> None:
    scene.report.keep(RAISED, "Traceback:\nValueError\n", "ValueError")
    scene.report.report(RAISED)
    assert scene.lines == ["nexar: rank 2 ended with exit code 1, the first to fail:", "Traceback:", "ValueError"]


def test_what_follows_from_it_is_one_line_after_the_report(scene: Scene) -> None:
    scene.report.keep(MISSED, "Traceback:\nMembershipChanged\n", "MembershipChanged")
    assert scene.lines == []
    scene.report.keep(RAISED, "", "ValueError")
    scene.report.report(RAISED)
    folded = "nexar: rank 0 ended with exit code 1: MembershipChanged, because rank 2 failed"
    assert scene.lines == ["nexar: rank 2 ended with exit code 1, the first to fail", folded]


def test_the_same_exception_on_another_rank_is_not_its_consequence(scene: Scene) -> None:
    late = RankFailure(1, "rank 1", "ended with exit code 1", 1)
    scene.report.keep(late, "Traceback:\nFormationTimeout\n", "FormationTimeout")
    scene.report.report(late)
    scene.report.keep(MISSED, "Traceback:\nFormationTimeout\n", "FormationTimeout")
    assert scene.lines[-1] == "nexar: rank 0 ended with exit code 1: FormationTimeout, as on rank 1"


def test_a_failure_on_another_host_is_named_with_the_host(scene: Scene) -> None:
    scene.report.report(RankFailure(7, "rank 7", "was killed by SIGKILL", 137, host="host-b"))
    assert scene.lines == ["nexar: rank 7 on host-b was killed by SIGKILL, the first to fail"]


def test_all_well_is_zero():
    assert run_result([RankExit(0, 0), RankExit(1, 0)]).exit_code == 0


def test_ranks_that_failed_are_lost_and_the_run_is_good_if_the_rest_ended_well():
    verdict = run_result([RankExit(0, 0), RankExit(2, 3), RankExit(1, 1)])
    assert (verdict.exit_code, verdict.failed) == (0, None)
    assert [ending.rank for ending in verdict.lost] == [2, 1]


def test_the_first_rank_that_failed_decides_if_a_survivor_did_not_end_well():
    victim = RankExit(0, 1, blames_another=True)
    verdict = run_result([victim, RankExit(3, 0), RankExit(2, 3), RankExit(1, 1)])
    assert (verdict.exit_code, verdict.failed.rank) == (3, 2)
    assert [ending.rank for ending in verdict.lost] == [1]


def test_a_rank_that_only_missed_another_does_not_decide_unless_nobody_else_failed():
    victim = RankExit(0, 1, blames_another=True)
    assert run_result([victim, RankExit(2, 3)]).failed.rank == 2
    assert run_result([victim, RankExit(1, 0)]).failed is victim


def test_a_killed_rank_decides_if_a_survivor_failed_because_it_missed_it():
    verdict = run_result([RankExit(0, 1, blames_another=True), RankExit(1, -9), RankExit(2, 0)])
    assert (verdict.exit_code, verdict.failed.rank, verdict.lost) == (128 + 9, 1, ())


def test_a_killed_rank_is_lost_and_the_run_is_good_if_the_rest_ended_well():
    verdict = run_result([RankExit(1, -9), RankExit(0, 0)])
    assert (verdict.exit_code, verdict.failed) == (0, None)
    assert [ending.rank for ending in verdict.lost] == [1]


def test_a_run_in_which_nobody_ended_well_has_the_exit_code_of_the_first_that_was_lost():
    assert run_result([RankExit(1, -9), RankExit(0, 4)]).exit_code == 128 + 9
    assert run_result([RankExit(0, 4), RankExit(1, -9)]).exit_code == 4


def test_a_run_in_which_everybody_was_killed_is_not_good():
    assert run_result([RankExit(0, -11), RankExit(1, -9)]).exit_code == 128 + 11


def test_of_a_rank_that_was_started_again_the_last_end_counts():
    assert (
        run_result([RankExit(1, -9, replaced=True), RankExit(0, 0), RankExit(1, 0, name="rank 1 restart 1")]).exit_code
        == 0
    )
    last = RankExit(1, 5, name="rank 1 restart 1", given_up=True)
    verdict = run_result([RankExit(1, 4, replaced=True), RankExit(0, 0), last])
    assert (verdict.exit_code, verdict.failed.who, verdict.lost) == (5, "rank 1 restart 1", ())


def test_used_up_restarts_fail_the_run_after_a_signal_as_after_an_exit_code():
    killed = RankExit(1, -9, name="rank 1 restart 1", given_up=True)
    verdict = run_result([RankExit(1, -9, replaced=True), RankExit(0, 0), killed])
    assert (verdict.exit_code, verdict.failed, verdict.lost) == (128 + 9, killed, ())


def test_who_came_too_late_is_lost_and_no_failure():
    late = RankExit(1, 1, came_too_late=True)
    assert run_result([RankExit(0, 0), late]).exit_code == 0
    assert run_result([RankExit(0, 0), late]).lost == (late,)
    assert run_result([late]).exit_code == 1


def test_an_interrupted_run_ends_like_a_program_that_was_interrupted():
    endings = [RankExit(0, 1, stopped=True), RankExit(1, -2, stopped=True)]
    verdict = run_result(endings, interrupted=signal.SIGINT)
    assert (verdict.exit_code, verdict.failed, verdict.lost) == (130, None, ())


def test_a_loss_before_the_interruption_is_still_reported():
    verdict = run_result([RankExit(0, 5), RankExit(1, -2, stopped=True)], interrupted=signal.SIGINT)
    assert (verdict.exit_code, verdict.lost[0].rank) == (130, 0)


@pytest.mark.parametrize(
    ("code", "words"), [(3, "ended with exit code 3"), (-9, "was killed by SIGKILL"), (-50, "was killed by signal 50")]
)
def test_an_ending_as_text(code, words):
    assert str(RankExit(0, code)) == words


def test_signals_have_names():
    assert signal_name(11) == "SIGSEGV"
