"""Who the culprit is, when it is reported, when the others are stopped, and with which exit code the run ends."""

import signal

from nexar.launch.stop_policy import Escalation, RankFailure, ReportFailure, StopPolicy, StopRanks


def test_nothing_is_due_before_somebody_asks():
    escalation = Escalation()
    assert escalation.due(0.0) is None
    assert escalation.tick(1e9) is None
    assert not escalation.asked


def test_the_first_request_is_passed_on_and_killing_follows_after_the_grace():
    escalation = Escalation(grace=5, short_grace=1)
    assert escalation.ask(signal.SIGINT, 10.0) == signal.SIGINT
    assert escalation.due(11.0) == 4.0
    assert escalation.tick(14.9) is None
    assert escalation.tick(15.0) == signal.SIGKILL


def test_the_second_request_shortens_the_grace():
    escalation = Escalation(grace=5, short_grace=1)
    escalation.ask(signal.SIGINT, 10.0)
    assert escalation.ask(signal.SIGINT, 10.5) == signal.SIGTERM
    assert escalation.due(10.5) == 1.0


def test_a_late_second_request_does_not_lengthen_it():
    escalation = Escalation(grace=5, short_grace=1)
    escalation.ask(signal.SIGINT, 10.0)
    escalation.ask(signal.SIGINT, 14.5)
    assert escalation.due(14.5) == 0.5


def test_killing_happens_once():
    escalation = Escalation(grace=5, short_grace=1)
    escalation.ask(signal.SIGTERM, 0.0)
    assert escalation.tick(9.0) == signal.SIGKILL
    assert escalation.tick(9.0) is None
    assert escalation.due(9.0) is None


RAISED = RankFailure(2, "rank 2", "ended with exit code 1", 1)
KILLED = RankFailure(3, "rank 3", "was killed by SIGKILL", 137)
MISSED = RankFailure(0, "rank 0", "ended with exit code 1", 1, consequence=True)
REMOTE = RankFailure(7, "rank 7", "ended with exit code 3", 3, host="host-b")
REMOTE_MISSED = RankFailure(6, "rank 6", "ended with exit code 1", 1, consequence=True, host="host-b")


def policy(*, alone: bool = True) -> StopPolicy:
    return StopPolicy(alone=alone, grace=5.0, hold=2.0)


def test_a_run_without_failures_has_nothing_to_do() -> None:
    machine = policy(alone=False)
    assert machine.due(0.0) is None
    assert machine.is_settled(0.0)
    assert machine.culprit is None
    assert machine.finish() == []


def test_the_first_failure_is_reported_at_once_and_the_others_are_stopped_after_the_grace() -> None:
    machine = policy()
    assert machine.failed(RAISED, 10.0) == [ReportFailure(RAISED)]
    assert machine.tick(14.9) == []
    assert machine.due(14.0) == 1.0
    assert machine.tick(15.0) == [StopRanks()]
    assert machine.tick(16.0) == []
    assert machine.due(16.0) is None


def test_a_second_failure_changes_nothing() -> None:
    machine = policy()
    machine.failed(KILLED, 10.0)
    assert machine.failed(RAISED, 11.0) == []
    assert machine.culprit == KILLED
    assert machine.tick(15.0) == [StopRanks()]


def test_a_consequence_waits_for_its_cause() -> None:
    machine = policy()
    assert machine.failed(MISSED, 10.0) == []
    assert machine.failed(KILLED, 10.5) == [ReportFailure(KILLED)]
    assert machine.culprit == KILLED
    assert machine.tick(12.0) == []
    assert machine.tick(15.0) == [StopRanks()]  # since the first of them


def test_a_consequence_without_a_cause_is_reported_after_a_while() -> None:
    machine = policy()
    machine.failed(MISSED, 10.0)
    assert machine.due(10.0) == 2.0
    assert machine.tick(12.0) == [ReportFailure(MISSED)]
    assert machine.culprit == MISSED


def test_a_cause_that_comes_late_is_reported_too_and_counts() -> None:
    machine = policy()
    machine.failed(MISSED, 10.0)
    machine.tick(12.0)
    assert machine.failed(KILLED, 13.0) == [ReportFailure(KILLED)]
    assert machine.culprit == KILLED


def test_when_all_have_ended_a_consequence_waits_no_longer() -> None:
    machine = policy()
    machine.failed(MISSED, 10.0)
    assert machine.is_settled(10.0)
    assert machine.finish() == [ReportFailure(MISSED)]
    assert machine.finish() == []


def test_a_failure_on_another_host_stops_this_one_with_its_exit_code() -> None:
    machine = policy(alone=False)
    assert machine.chosen(REMOTE, 10.0) == [ReportFailure(REMOTE)]
    assert machine.tick(15.0) == [StopRanks()]
    assert machine.culprit == REMOTE


def test_of_two_failures_at_once_the_seed_chooses() -> None:
    machine = policy(alone=False)
    assert machine.failed(RAISED, 10.0) == [ReportFailure(RAISED)]
    assert not machine.is_settled(10.0)
    assert machine.chosen(REMOTE, 10.1) == [ReportFailure(REMOTE)]
    assert machine.is_settled(10.1)
    assert machine.culprit == REMOTE


def test_the_seed_confirms_a_failure_of_this_host() -> None:
    machine = policy(alone=False)
    machine.failed(RAISED, 10.0)
    echo = RankFailure(2, "rank 2", "ended with exit code 1", 1, host="host-a")
    assert machine.chosen(echo, 10.1) == []
    assert machine.is_settled(10.1)
    assert machine.culprit == RAISED


def test_a_seed_that_does_not_answer_is_not_waited_for() -> None:
    machine = policy(alone=False)
    machine.failed(RAISED, 10.0)
    assert not machine.is_settled(11.9)
    assert machine.is_settled(12.0)
    assert machine.culprit == RAISED


def test_a_consequence_elsewhere_waits_for_its_cause_here() -> None:
    machine = policy(alone=False)
    assert machine.chosen(REMOTE_MISSED, 10.0) == []
    assert machine.failed(RAISED, 10.5) == [ReportFailure(RAISED)]
    assert machine.culprit == RAISED


def test_a_cause_elsewhere_replaces_its_consequence_here() -> None:
    machine = policy(alone=False)
    machine.failed(MISSED, 10.0)
    assert machine.chosen(MISSED, 10.1) == []
    assert machine.chosen(REMOTE, 11.0) == [ReportFailure(REMOTE)]
    assert machine.culprit == REMOTE
