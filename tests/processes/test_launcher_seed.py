"""The seed that rank 0 starts: it opens, it outlives rank 0 once the cluster has formed, and not before."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nexar import Config, OperationTimeout, UsageError
from nexar.launch import init, seed_process
from nexar.launch.entry import ByFile, BySeedOfRankZero, ByTicket, ByToken
from nexar.launch.seed_process import SeedProcess
from tests.processes import stand_ins
from tests.processes.launcher import await_gone

TOKEN = "5f1d7c0a93be48e2a6d4c8f07b3e9a15"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(seed_process, "_MODULE", "tests.processes.stand_ins")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("STAND_IN_FOLDER", str(tmp_path))
    return tmp_path


def open_seed(listen="127.0.0.1:0", timeout=20.0):
    return SeedProcess(2, listen, Config(formation_timeout=20.0), timeout)


def test_the_seed_stays_when_the_cluster_has_formed_and_ends_when_it_is_empty(folder):
    with open_seed() as seed:
        assert (seed.ticket, seed.address) == (stand_ins.TICKET, "127.0.0.1:4000")
        assert os.getsid(seed.pid) != os.getsid(0)
        (folder / "formed").touch()
    os.kill(seed.pid, 0)  # it is there
    (folder / "empty").touch()
    await_gone(seed.pid)


def test_the_seed_is_no_child_of_rank_0_which_need_not_know_when_it_ends(folder):
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    before = children.read_text().split()
    with open_seed() as seed:
        (folder / "formed").touch()
    assert children.read_text().split() == before
    (folder / "empty").touch()
    await_gone(seed.pid)


def test_the_seed_is_ended_by_the_failure_of_rank_0():
    with pytest.raises(ZeroDivisionError), open_seed() as seed:
        raise ZeroDivisionError
    await_gone(seed.pid)


def test_the_seed_ends_with_a_rank_0_that_was_killed_before_the_cluster_has_formed():
    program = (
        "from nexar.config import Config\n"
        "from nexar.launch import seed_process\n"
        "import os\n"
        "seed_process._MODULE = 'tests.processes.stand_ins'\n"
        "seed = seed_process.SeedProcess(2, '127.0.0.1:0', Config(), 20.0)\n"
        "print(seed.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    await_gone(int(ran.stdout))


def test_a_seed_that_cannot_open_says_why():
    with pytest.raises(UsageError, match="port 1 is taken"):
        open_seed(":1")


def test_a_seed_that_says_nothing_is_ended_at_the_deadline(monkeypatch):
    monkeypatch.setattr(seed_process, "_MODULE", "timeit")  # any program that takes a while to say nothing of use
    with pytest.raises((OperationTimeout, UsageError)):
        open_seed(timeout=0.01)


def test_a_seed_that_ends_at_once_is_noticed(monkeypatch, capfd):
    monkeypatch.setattr(seed_process, "_MODULE", "no_such_module_at_all")
    with pytest.raises(UsageError, match="ended at once"):
        open_seed()
    assert "no_such_module_at_all" in capfd.readouterr().err


# -- seeds -----------------------------------------------------------------------------------------------------------


def test_the_ranks_of_one_host_get_the_ticket_of_the_seed_that_rank_0_opened(folder):
    taken = []

    def other():
        with init.open_entry(ByFile("name", 2, False), Config()) as invitation:
            taken.append(invitation)

    thread = threading.Thread(target=other)
    thread.start()
    with init.open_entry(ByFile("name", 2, True), Config()) as invitation:
        thread.join(20)
        (folder / "formed").touch()
        (folder / "empty").touch()
    assert taken == [invitation]
    assert list(folder.glob("nexar-*/*")) == []


@pytest.mark.parametrize("opens", [True, False])
def test_ranks_of_several_hosts_meet_by_token(folder, opens):
    for name in ("formed", "empty"):
        (folder / name).touch()
    with init.open_entry(BySeedOfRankZero(TOKEN, "node1", 29501, 4, opens), Config()) as invitation:
        assert invitation.addresses == ("node1:29501",)


def test_a_ticket_and_a_token_need_nobody_to_open():
    with init.open_entry(ByTicket(stand_ins.TICKET), Config()) as invitation:
        assert invitation.addresses == ("127.0.0.1:4000",)
    with init.open_entry(ByToken(TOKEN, "a:1"), Config()) as invitation:
        assert invitation.addresses == ("a:1",)
