"""The flight recorder in real processes: on a timeout, and when somebody asks a program that hangs."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.processes.launcher import await_files
from tests.processes.nexar_command import Nexar

RANK = Path(__file__).with_name("hanging_rank.py")


def analyzed(directory: Path) -> tuple[int, list[dict[str, object]]]:
    """What `nexar trace analyze` says of it."""
    with Nexar("trace", "analyze", directory, "--json", cwd=directory) as ran:
        status = ran.end()
    return status, json.loads(ran.stdout)["findings"]


@pytest.mark.full
def test_a_timeout_leaves_dumps_of_all_ranks_that_name_the_line_in_which_the_missing_one_is(tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    with Nexar("run", "-n", 3, RANK, 1.0, cwd=tmp_path, NEXAR_DUMP_DIR="dumps") as ran:
        await_files(tmp_path, "outcome.*", 2)
        dumps = await_files(tmp_path / "dumps", "rank-*.json", 3)
        (tmp_path / "wait").unlink()
        assert ran.end() == 0, ran.stderr
    outcome = (tmp_path / "outcome.0").read_text()
    assert "missing all_reduce #1" in outcome
    assert "last finished all_reduce #0" in outcome
    assert "it is in user code for" in outcome
    assert str(tmp_path / "dumps" / "rank-0-") in outcome, "the error says where to look"
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in dumps)
    status, (finding,) = analyzed(tmp_path / "dumps")
    assert (status, finding["kind"], finding["ranks"]) == (1, "missing", [2])
    assert "its last finished call is all_reduce #0, it is in user code (hanging_rank.py:" in str(finding["text"])
    assert "ranks 0, 1 waited in all_reduce #1 until CollectiveTimeout" in str(finding["text"])


def test_a_program_that_hangs_can_be_asked_where_it_is_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    with Nexar("run", "-n", 3, RANK, 60.0, cwd=tmp_path) as ran:
        await_files(tmp_path, "ready.*", 3)
        status = 0
        while not status:  # the others may not have waited for long enough yet
            os.kill(ran.process.pid, signal.SIGUSR1)  # the launcher asks all its ranks
            await_files(tmp_path / "nexar-dumps", "rank-*.json", 3)
            status, findings = analyzed(tmp_path / "nexar-dumps")
        (tmp_path / "wait").unlink()
        assert ran.end() == 0, ran.stderr
    assert (status, findings[0]["kind"], findings[0]["ranks"]) == (1, "missing", [2])
    assert "it is in user code (hanging_rank.py:" in str(findings[0]["text"])
    assert [path.read_text() for path in sorted(tmp_path.glob("outcome.*"))] == ["3.0"] * 3, "asking did no harm"
