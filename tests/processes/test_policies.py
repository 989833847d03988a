"""What follows the loss of a rank, as the policy says; and what the others learn of one that raised."""

import os
import signal
from pathlib import Path

from tests.processes.nexar_command import Nexar
from tests.processes.story import INTERVAL, RANK, Story, await_diaries, causes


def test_under_the_manual_policy_calls_raise_peer_lost_and_shrink_gives_the_next_communicator(tmp_path: Path) -> None:
    with Story(tmp_path, 4, recovery_policy="manual") as story:
        story.kill(1)
        story.await_sum([0, 2, 3])
        story.await_more([0, 2, 3])
        story.finish()
        for rank in (0, 2, 3):
            assert story.reported(rank, "raised", error="PeerLost"), story.describe()
            (change,) = story.reported(rank, "changed")
            assert (change["epoch"], change["ranks"]) == (2, [0, 2, 3])


def test_under_the_policy_abort_all_stop_with_the_reason(tmp_path: Path) -> None:
    with Story(tmp_path, 3, recovery_policy="abort") as story:
        story.kill(1)
        for rank in (0, 2):
            assert story.ranks[rank].end() == 1, story.describe()
            assert "PeerLost: lost rank 1 " in story.ranks[rank].stderr
            assert not story.reported(rank, "changed")


def test_under_the_policy_abort_the_launcher_ends_all_of_them(tmp_path: Path) -> None:
    with Nexar("run", "-n", 3, RANK, INTERVAL, cwd=tmp_path, NEXAR_RECOVERY_POLICY="abort") as running:
        diaries = await_diaries(tmp_path, 3, "right")
        os.kill(diaries[1][0]["pid"], signal.SIGKILL)
        assert running.end() != 0
    assert "rank 1 was killed by SIGKILL" in running.stderr
    assert not any(line["what"] == "changed" for lines in await_diaries(tmp_path, 3, "here").values() for line in lines)


def test_the_others_learn_the_traceback_of_a_rank_that_raised(tmp_path: Path) -> None:
    with Story(tmp_path, 3) as story:
        story.order(2, "fail")
        story.await_sum([0, 1])
        story.await_more([0, 1])
        story.finish([0, 1])
        assert story.ranks[2].end() == 1
        assert "ZeroDivisionError: ordered by the test" in story.ranks[2].stderr
        for rank in (0, 1):
            (change,) = story.reported(rank, "changed")
            cause = causes(change)[2]
            assert cause.startswith("it raised an exception and left:\nTraceback (most recent call last):")
            assert "do_fail" in cause
            assert cause.rstrip().endswith("ZeroDivisionError: ordered by the test")
