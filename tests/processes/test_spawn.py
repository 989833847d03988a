"""nexar.spawn with real processes: results, the first failure, nobody left."""

import os
import signal
import subprocess
import sys

import pytest

from nexar import Config, PeerLost, RemoteError, UsageError
from nexar.launch.spawn import spawn
from tests.processes import spawn_tasks, stand_ins
from tests.processes.launcher import await_files, await_gone


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch):
    monkeypatch.setitem(sys.modules, "nexar.cluster.seed", stand_ins.SEED)
    monkeypatch.setenv("SPAWN_STAND_INS", "yes")


def test_results_come_back_by_rank():
    results = spawn(spawn_tasks.place, 3)
    assert [(rank, size) for rank, size, _ in results] == [(0, 3), (1, 3), (2, 3)]
    assert len({pid for *_, pid in results} | {os.getpid()}) == 4


def test_the_first_failure_is_raised_with_its_traceback_and_the_others_are_stopped():
    with pytest.raises(RemoteError, match="ValueError: on purpose") as caught:
        spawn(spawn_tasks.fail_on_rank_1, 2)
    assert (caught.value.rank, caught.value.function) == (1, "fail_on_rank_1")
    assert "in fail_on_rank_1" in caught.value.traceback


def test_settings_are_those_of_init():
    config = Config(barrier_timeout=7.0, rpc_timeout=8.0)
    assert spawn(spawn_tasks.timeouts, 1, config, rpc_timeout=9.0) == [(7.0, 9.0)]


@pytest.mark.parametrize(
    ("fn", "words"),
    [(spawn_tasks.die_on_rank_1, "rank 1.*SIGKILL"), (spawn_tasks.exit_at_once, "ended with exit code 4")],
)
def test_a_rank_that_dies_is_named(fn, words):
    with pytest.raises(PeerLost, match=words):
        spawn(fn, 2)


def test_a_result_that_cannot_be_sent_is_a_failure_of_its_rank():
    with pytest.raises(RemoteError, match=r"pickle|local object"):  # as each Python says it
        spawn(spawn_tasks.return_what_cannot_be_sent, 1)


def test_a_lambda_is_refused():
    with pytest.raises(UsageError, match="not a lambda"):
        spawn(lambda _: None, 2)


def test_what_cannot_be_called_is_refused():
    with pytest.raises(UsageError, match="function"):
        spawn(None, 2)


@pytest.mark.parametrize("n", [0, -1, "2", 1.5, None])
def test_no_processes_are_refused(n):
    with pytest.raises(UsageError, match="1 or more"):
        spawn(spawn_tasks.place, n)


def run(folder, text):
    head = (
        "import sys\nfrom tests.processes import stand_ins, spawn_tasks\nstand_ins.take_places()\n"
        "from nexar.launch.spawn import spawn\n"
    )
    (folder / "main.py").write_text(head + text)
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "SPAWN_FOLDER": str(folder)}
    command = [sys.executable, str(folder / "main.py")]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_call_outside_of_main_is_explained(tmp_path):
    _, errors = run(tmp_path, "spawn(spawn_tasks.place, 1)\n").communicate(timeout=50)
    assert 'Is the call of spawn below `if __name__ == "__main__":`?' in errors


def test_nobody_is_left_when_the_parent_is_killed(tmp_path):
    process = run(tmp_path, "if __name__ == '__main__': spawn(spawn_tasks.say_and_wait, 2)\n")
    pids = [int(path.read_text()) for path in await_files(tmp_path, "pid*", 2)]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=50)
    for pid in pids:
        await_gone(pid)
