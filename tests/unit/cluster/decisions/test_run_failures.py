"""Which failure stops a run on all hosts."""

from nexar.cluster.decisions.admission_events import Fail, Gone, Refuse, RunFailed, Tell
from nexar.wire.joining import RunFailed as Message
from tests.unit.cluster.decisions.door import a_door, every, only

CULPRIT = Message(1, "was killed by SIGKILL", 137, host="b")
CONSEQUENCE = Message(0, "ended with exit code 1", 1, consequence=True, host="a")


def two_launchers():
    door = a_door(2)
    door.reserve(51, 1)
    door.reserve(52, 1)
    return door


def told(actions):
    return [(tell.message, set(tell.connections)) for tell in every(actions, Tell)]


def test_a_failure_is_told_to_all_launchers() -> None:
    door = two_launchers()
    assert told(door.tell(RunFailed(52, CULPRIT))) == [(CULPRIT, {51, 52})]


def test_the_first_failure_stays_and_later_reporters_are_told_of_it() -> None:
    door = two_launchers()
    door.tell(RunFailed(52, CULPRIT))
    later = Message(0, "ended with exit code 3", 3, host="a")
    assert told(door.tell(RunFailed(51, later))) == [(CULPRIT, {51})]
    assert told(door.tell(RunFailed(51, CONSEQUENCE))) == [(CULPRIT, {51})]


def test_the_cause_replaces_its_consequence() -> None:
    door = two_launchers()
    assert told(door.tell(RunFailed(51, CONSEQUENCE))) == [(CONSEQUENCE, {51, 52})]
    assert told(door.tell(RunFailed(52, CULPRIT))) == [(CULPRIT, {51, 52})]


def test_it_is_told_after_the_cluster_has_formed_too() -> None:
    door = two_launchers()
    door.join(1, rank=0, launcher=51)
    door.join(2, rank=1, launcher=52)
    assert door.machine.membership is not None
    assert told(door.tell(RunFailed(52, CULPRIT))) == [(CULPRIT, {51, 52})]
    assert every(door.actions, Fail) == []


def test_only_launchers_report_failures() -> None:
    door = two_launchers()
    door.join(1, rank=0, launcher=51)
    assert "is no launcher" in only(door.tell(RunFailed(1, CULPRIT)), Refuse).reason


def test_a_launcher_reports_only_ranks_of_its_own() -> None:
    door = two_launchers()
    actions = door.tell(RunFailed(51, CULPRIT))
    assert only(actions, Refuse).reason == "it reported that rank 1 failed, which is not its child"
    assert told(actions) == []


def test_a_launcher_reports_only_ranks_of_its_own_after_the_cluster_has_formed_too() -> None:
    door = two_launchers()
    door.join(1, rank=0, launcher=51)
    door.join(2, rank=1, launcher=52)
    assert "is not its child" in only(door.tell(RunFailed(51, CULPRIT)), Refuse).reason
    assert told(door.tell(RunFailed(52, CULPRIT))) == [(CULPRIT, {52})]


def test_a_launcher_without_ranks_reports_none() -> None:
    door = a_door(1, elastic=True)
    door.reserve(51, 1)
    door.join(1, rank=0, launcher=51)
    door.reserve(52, 1)
    assert "is not its child" in only(door.tell(RunFailed(52, CONSEQUENCE)), Refuse).reason


def test_a_launcher_that_comes_back_is_told_again_and_may_still_report_its_ranks() -> None:
    door = two_launchers()
    door.join(1, rank=0, launcher=51)
    door.join(2, rank=1, launcher=52)
    door.tell(RunFailed(51, CONSEQUENCE))
    door.tell(Gone(52, "its line broke"))
    assert (CONSEQUENCE, {62}) in told(door.reserve(62, 1, 1, node=52))
    assert told(door.tell(RunFailed(62, CULPRIT))) == [(CULPRIT, {51, 62})]


def test_a_launcher_that_comes_late_is_told_too() -> None:
    door = a_door(2)
    door.reserve(51, 1)
    door.tell(RunFailed(51, CONSEQUENCE))
    assert told(door.reserve(52, 1)) == [(CONSEQUENCE, {52})]
