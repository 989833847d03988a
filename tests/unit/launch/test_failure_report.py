import io

import pytest

from nexar.launch.failure_report import FailureReport
from nexar.launch.output import Console
from nexar.launch.stop_policy import Failure

RAISED = Failure(2, "rank 2", "ended with exit code 1", 1)
MISSED = Failure(0, "rank 0", "ended with exit code 1", 1, consequence=True)


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
    late = Failure(1, "rank 1", "ended with exit code 1", 1)
    scene.report.keep(late, "Traceback:\nFormationTimeout\n", "FormationTimeout")
    scene.report.report(late)
    scene.report.keep(MISSED, "Traceback:\nFormationTimeout\n", "FormationTimeout")
    assert scene.lines[-1] == "nexar: rank 0 ended with exit code 1: FormationTimeout, as on rank 1"


def test_a_failure_on_another_host_is_named_with_the_host(scene: Scene) -> None:
    scene.report.report(Failure(7, "rank 7", "was killed by SIGKILL", 137, host="host-b"))
    assert scene.lines == ["nexar: rank 7 on host-b was killed by SIGKILL, the first to fail"]
