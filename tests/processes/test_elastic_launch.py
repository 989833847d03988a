"""Launchers and seeds of clusters that go on: ranks started again, hosts that come later, seeds started again."""

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.processes.launcher import await_files, await_gone
from tests.processes.nexar_command import Nexar, await_ticket

RANK = Path(__file__).with_name("elastic_rank.py")
ELASTIC = {"NEXAR_TRANSPORTS": "tls"}


@pytest.fixture
def start(tmp_path):
    """Start a command that has ended when the test has."""
    with ExitStack() as running:
        yield lambda *arguments, **more: running.enter_context(Nexar(*arguments, cwd=tmp_path, **{**ELASTIC, **more}))


def open_seed(start, folder, *arguments):
    path = folder / "ticket"
    path.unlink(missing_ok=True)
    seed = start("seed", "--size", 2, "--listen", "127.0.0.1:0", "--ticket-file", path, "--elastic", *arguments)
    return seed, await_ticket(path, seed)


def pid_of(folder, rank):
    (path,) = await_files(folder, f"pid*.rank{rank}", 1)
    return int(path.name.removeprefix("pid").partition(".")[0])


def stop(folder, *ran):
    (folder / "stop").touch()
    for each in ran:
        assert each.end() == 0, each.stderr


def test_a_rank_that_is_killed_is_started_again_and_joins(start, tmp_path):
    run = start("run", "-n", 2, "--elastic", "--min", 1, "--max", 2, "--max-restarts", 1, RANK)
    await_files(tmp_path, "size2.epoch1.*", 2)
    os.kill(pid_of(tmp_path, 1), signal.SIGKILL)
    await_files(tmp_path, "size2.epoch3.*", 2)
    stop(tmp_path, run)
    assert "nexar: rank 1 was killed by SIGKILL; started again, restart 1 of 1" in run.stderr
    assert "lost" not in run.stderr


@pytest.mark.full
def test_who_is_started_again_when_the_others_have_finished_is_lost_and_the_run_is_good(start, tmp_path):
    run = start("run", "-n", 2, "--elastic", "--max-restarts", 1, RANK, NEXAR_ELASTIC_MIN_WORLD_SIZE="1")
    await_files(tmp_path, "size2.epoch1.*", 2)
    (tmp_path / "stop").touch()
    os.kill(pid_of(tmp_path, 1), signal.SIGKILL)
    assert run.end() == 0, run.stderr


def test_a_host_may_come_later_and_is_refused_above_the_maximum(start, tmp_path):
    seed, ticket = open_seed(start, tmp_path, "--max", 3)
    first = start("run", "-n", 2, "--ticket", ticket, RANK)
    await_files(tmp_path, "size2.epoch1.*", 2)
    late = start("run", "-n", 1, "--ticket", ticket, RANK)
    await_files(tmp_path, "size3.epoch2.*", 3)
    too_many = start("run", "-n", 1, "--ticket", ticket, RANK)
    assert too_many.end() != 0
    assert "no more than 3 are allowed" in too_many.stderr
    stop(tmp_path, first, late)
    seed.process.send_signal(signal.SIGTERM)  # an elastic one runs until it is stopped
    seed.end()


def test_a_seed_that_was_killed_and_started_again_is_a_witness_as_before(start, tmp_path):
    seed, ticket = open_seed(start, tmp_path, "--state-dir", tmp_path / "state")
    run = start("run", "-n", 2, "--ticket", ticket, RANK)
    await_files(tmp_path, "size2.epoch1.*", 2)
    seed.process.kill()
    await_gone(seed.process.pid)
    seed, again = open_seed(start, tmp_path, "--state-dir", tmp_path / "state")
    assert again == ticket
    os.kill(pid_of(tmp_path, 1), signal.SIGKILL)
    await_files(tmp_path, "size1.epoch2.*", 1)  # with the seed's vote: one of two is no majority
    late = start("run", "-n", 1, "--ticket", ticket, RANK)
    await_files(tmp_path, "size2.epoch3.*", 2)
    stop(tmp_path, run, late)
    seed.process.send_signal(signal.SIGTERM)
    seed.end()


def test_a_rank_that_ends_without_ever_coming_is_not_waited_for(start, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nif os.environ['RANK'] == '1': sys.exit(0)\nimport nexar\nnexar.init()\n")
    run = start("run", "-n", 2, script, NEXAR_FORMATION_TIMEOUT_SECS="600")
    assert run.end() == 1
    assert "rank 1: it ended before the cluster had formed: ended with exit code 0" in run.stderr
