"""A rank fails, and the run stops: a real cluster, on one host and with a launcher for each of two."""

import re
import signal

import pytest

from tests.processes.launcher import await_files, script, without_notices
from tests.processes.nexar_command import Nexar, await_ticket

EVENT_TIMEOUT = 120.0
JOB = """
import nexar
with nexar.init() as comm:
    comm.barrier()
    Path(f"ready{rank}").touch()
    if rank == 1:
        %s
    %s
"""
CODES = [("raise ValueError('on purpose')", 1), ("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 128 + 9)]
BARRIER = "comm.barrier(); comm.barrier()"
HANG = "time.sleep(600)"


def run_here(folder, text, *options, **variables):
    with Nexar("run", "-n", 3, *options, script(folder, text), cwd=folder, **variables) as running:
        running.end(EVENT_TIMEOUT)
    return running


@pytest.mark.full
@pytest.mark.parametrize(("how", "code"), CODES)
def test_survivors_end_in_one_line_each(tmp_path, how, code):
    ran = run_here(tmp_path, JOB % (how, BARRIER))
    assert ran.process.returncode == code, ran.stderr
    assert "nexar: rank 1 " in ran.stderr
    assert ran.stderr.count("Traceback") == how.startswith("raise")
    assert ran.stderr.count("MembershipChanged, because rank 1 failed\n") == 2


@pytest.mark.full
def test_a_cluster_that_does_not_form_stops_the_run(tmp_path):
    text = "import nexar\nif rank == 1: raise ValueError('before init')\nif rank == 2: time.sleep(600)\nnexar.init()"
    ran = run_here(tmp_path, text)
    assert ran.process.returncode == 1
    assert "nexar: rank 1 ended with exit code 1, the first to fail:\nTraceback" in ran.stderr
    assert re.search("nexar: stopping .*rank 2: not ended", ran.stderr)  # a slow rank may be stopped with it


@pytest.mark.full
def test_ranks_that_wait_in_vain_for_one_that_never_joins_stop_the_run(tmp_path):
    text = "import nexar\nif rank == 2: time.sleep(600)\nnexar.init()"
    ran = run_here(tmp_path, text, NEXAR_FORMATION_TIMEOUT_SECS="3")
    assert ran.process.returncode == 1
    assert ", the first to fail:\nTraceback" in ran.stderr
    assert ran.stderr.count("Traceback") == 1
    assert re.search("nexar: stopping .*rank 2: not ended", ran.stderr)  # a slow rank may be stopped with it


@pytest.mark.full
def test_the_policy_abort_stops_the_run(tmp_path):
    ran = run_here(tmp_path, JOB % ("sys.exit(5)", HANG), NEXAR_RECOVERY_POLICY="abort")
    assert ran.process.returncode == 5
    assert "stopping rank 0, rank 2" in ran.stderr


# -- two launchers and a seed ----------------------------------------------------------------------------------------


def run_on_two_hosts(folder, text, *, interrupt=None):
    """The launcher of rank 0, then that of rank 1, both ended, and the seed. `interrupt`: a signal for the latter, when
    both ranks are ready.
    """
    path = script(folder, text)
    with Nexar("seed", "--size", 2, "--listen", "127.0.0.1:0", "--ticket-file", "ticket", cwd=folder) as seed:
        await_ticket(folder / "ticket", seed)
        command = ("run", "-n", 1, "--ticket-file", "ticket", "--first-rank")
        with (
            Nexar(*command, 0, path, cwd=folder, NEXAR_HOST_ID="a") as first,
            Nexar(*command, 1, path, cwd=folder, NEXAR_HOST_ID="b") as second,
        ):
            if interrupt is not None:
                await_files(folder, "ready*", 2)
                second.process.send_signal(interrupt)
            second.end(EVENT_TIMEOUT)
            first.end(EVENT_TIMEOUT)
        seed.end(EVENT_TIMEOUT)
    return first, second


@pytest.mark.parametrize("others", [BARRIER, pytest.param(HANG, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("how", "code"), [CODES[0], *(pytest.param(*each, marks=pytest.mark.full) for each in CODES[1:])]
)
def test_a_failure_on_one_host_stops_the_other_with_the_same_exit_code(tmp_path, how, code, others):
    first, second = run_on_two_hosts(tmp_path, JOB % (how, others))
    assert (first.process.returncode, second.process.returncode) == (code, code), first.stderr + second.stderr
    assert "nexar: rank 1 on " in first.stderr
    assert "nexar: rank 1 " in second.stderr
    assert "Traceback" not in first.stderr
    if others == HANG:
        assert "stopping rank 0" in first.stderr


def test_a_failure_before_the_cluster_has_formed_stops_the_other_host(tmp_path):
    """A launcher that comes later is refused by the seed, and says why."""
    text = "Path(f'started{rank}').touch()\n"
    text += "if rank == 1:\n    while not Path('started0').exists(): time.sleep(0.01)\n    sys.exit(4)\n"
    text += "import nexar\nnexar.init()"
    first, second = run_on_two_hosts(tmp_path, text)
    assert (first.process.returncode, second.process.returncode) == (4, 4), first.stderr + second.stderr
    assert "nexar: rank 1 on " in first.stderr


@pytest.mark.full
@pytest.mark.parametrize("others", ["while True: comm.barrier()", HANG])
def test_a_launcher_that_is_interrupted_stops_the_other_host_too(tmp_path, others):
    first, second = run_on_two_hosts(tmp_path, JOB % ("pass", others), interrupt=signal.SIGINT)
    assert (first.process.returncode, second.process.returncode) == (130, 130), first.stderr + second.stderr
    assert without_notices(second.stderr) == "nexar: SIGINT: stopping all ranks; they have 5 s to end\n"
    assert ": its launcher got SIGINT, the first to fail\n" in first.stderr
    assert "Traceback" not in first.stderr
