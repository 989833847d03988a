"""The supervisor of one host, with real ranks and a seed that is played."""

import io
import sys

from nexar.launch.event_sources import Mailbox
from nexar.launch.output import Console
from nexar.launch.plan import RankPlan
from nexar.launch.stop_policy import RankFailure
from nexar.launch.supervisor import Supervisor, SupervisorOptions

CONSEQUENCE = RankFailure(1, "rank 1", "ended with exit code 1", 1, consequence=True, host="b")
CULPRIT = RankFailure(2, "rank 2", "ended with exit code 3", 3, host="c")


class Cluster:
    """Takes reports, and passes none on."""

    formed = True

    def report(self, *_, **__):
        pass

    def report_failure(self, *_, **__):
        pass


class Said(io.BytesIO):
    """Standard error. When the ranks of this host are stopped, the seed chooses the culprit."""

    def __init__(self, failures):
        super().__init__()
        self._failures = failures

    def write(self, text):
        if b"stopping rank 0" in bytes(text):
            self._failures.put(CULPRIT)
        return super().write(text)


def test_the_culprit_counts_that_the_seed_chooses_after_the_ranks_of_this_host_were_stopped():
    plan = RankPlan(0, 0, (sys.executable, "-c", "import time; time.sleep(600)"), {})
    with Mailbox() as failures:
        failures.put(CONSEQUENCE)
        said = Said(failures)
        supervisor = Supervisor(
            [plan],
            SupervisorOptions(shown=frozenset({0}), grace=0.05),
            console=Console({"stdout": io.BytesIO(), "stderr": said}),
            cluster=Cluster(),
            mark="test",
            failures=failures,
            alone=False,
            stops=True,
        )
        assert supervisor.run().exit_code == CULPRIT.code
    assert b"nexar: rank 2 on c ended with exit code 3, the first to fail\n" in said.getvalue()
