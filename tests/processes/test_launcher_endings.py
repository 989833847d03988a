"""How a run ends: exit codes, tracebacks, losses, signals, and nothing left behind."""

import os
import signal

import pytest

from tests.processes.launcher import Launch, await_files, await_gone, launch, script

WAIT = "Path(f'pid{rank}').write_text(str(os.getpid()))\nPath(f'ready{rank}').touch()\ntime.sleep(600)\n"
DEAF = "for number in (2, 15): signal.signal(number, signal.SIG_IGN)\n"


def pids(folder, count):
    await_files(folder, "ready*", count)
    return [int(path.read_text()) for path in folder.glob("pid*")]


# -- exit codes ------------------------------------------------------------------------------------------------------


def test_the_rank_that_raised_is_shown_last_and_whole(tmp_path):
    text = "def inner():\n    raise ValueError('on purpose')\nif rank == 2: inner()\nprint('fine')"
    ran = launch("run", "-n", 4, script(tmp_path, text), cwd=tmp_path)
    assert ran.process.returncode == 1
    last = ran.stderr.splitlines()
    begin = last.index("nexar: rank 2 ended with exit code 1, the first to fail:")
    assert last[begin + 1] == "Traceback (most recent call last):"
    assert any("in inner" in line for line in last[begin:])
    assert last[-1] == "ValueError: on purpose"
    assert ran.stdout.count("fine") == 3


def test_the_exit_code_of_the_first_failing_rank_is_returned(tmp_path):
    text = (
        "if rank == 1: Path('failed').touch(); sys.exit(7)\n"
        "deadline = time.monotonic() + 20\n"
        "while not Path('failed').exists() and time.monotonic() < deadline: time.sleep(0.01)\n"
        "time.sleep(0.3); sys.exit(3)"
    )
    ran = launch("run", "-n", 2, script(tmp_path, text), cwd=tmp_path)
    assert ran.process.returncode == 7
    assert "nexar: rank 1 ended with exit code 7" in ran.stderr


def test_a_killed_rank_is_lost_and_the_others_go_on(tmp_path):
    text = "if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(0.3); print('went on')"
    ran = launch("run", "-n", 3, "--on-failure", "continue", script(tmp_path, text), cwd=tmp_path)
    assert ran.process.returncode == 0
    assert ran.stdout.count("went on") == 2
    assert ran.stderr == "nexar: warning: rank 1 was killed by SIGKILL and is lost\n"


def test_a_run_without_survivors_is_not_good(tmp_path):
    ran = launch("run", "-n", 2, script(tmp_path, "os.kill(os.getpid(), 11)"), cwd=tmp_path)
    assert ran.process.returncode == 128 + 11


def test_every_death_is_reported_with_its_cause(tmp_path):
    text = "if rank == 0: raise ValueError('on purpose')\nif rank == 1: os.kill(os.getpid(), 9)"
    launch("run", "-n", 3, script(tmp_path, text), cwd=tmp_path, TEST_REPORTS=str(tmp_path / "reports"))
    reports = (tmp_path / "reports").read_text()
    assert "0: ended with exit code 1\nTraceback" in reports
    assert "ValueError: on purpose" in reports
    assert "1: was killed by SIGKILL" in reports
    assert "2 (well): ended with exit code 0" in reports  # no death, but it will never come


@pytest.mark.full
def test_the_policy_abort_stops_all(tmp_path):
    text = f"if rank == 1:\n    sys.exit(5) if os.environ['HOW'] == 'exit' else os.kill(os.getpid(), 9)\n{WAIT}"
    for how, code in (("exit", 5), ("kill", 128 + 9)):
        ran = launch("run", "-n", 3, script(tmp_path, text), cwd=tmp_path, HOW=how, NEXAR_RECOVERY_POLICY="abort")
        assert ran.process.returncode == code


# -- starting again --------------------------------------------------------------------------------------------------

ELASTIC = ("run", "-n", 2, "--elastic", "--max-restarts", 2)
AGAIN = """
import os, sys, time
from pathlib import Path

place = os.environ["LOCAL_RANK"]
life = len(list(Path(".").glob(f"life{place}.*")))
Path(f"life{place}.{life}").touch()
joins = "NEXAR_JOINER" in os.environ and "RANK" not in os.environ
print("life", life, "joins", joins, flush=True)

def stay():
    deadline = time.monotonic() + 20
    while not Path("done").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    sys.exit(0)

"""


def again(folder, text, *options, **variables):
    path = folder / "again.py"
    path.write_text(AGAIN + text)
    return launch(*(options or ELASTIC), path, cwd=folder, **variables)


def test_a_rank_that_dies_is_started_again_as_a_joiner_whose_end_counts(tmp_path):
    text = "if place == '0': stay()\n"
    text += "elif life == 0: os.kill(os.getpid(), 9)\nelif life == 1: sys.exit(3)\nelse: Path('done').touch()"
    reports = tmp_path / "reports"
    ran = again(tmp_path, text, TEST_FORMED="1", TEST_REPORTS=str(reports))
    assert ran.process.returncode == 0, ran.stderr
    assert "[rank 1] life 0 joins False" in ran.stdout
    assert "[rank 1 restart 1] life 1 joins True" in ran.stdout
    assert "[rank 1 restart 2] life 2 joins True" in ran.stdout
    assert ran.stderr == (
        "nexar: rank 1 was killed by SIGKILL; started again, restart 1 of 2\n"
        "nexar: rank 1 restart 1 ended with exit code 3; started again, restart 2 of 2\n"
    )
    assert reports.read_text().splitlines()[0] == "1: was killed by SIGKILL"


def test_before_the_cluster_has_formed_it_is_started_with_its_rank_and_not_missed(tmp_path):
    reports = tmp_path / "reports"
    ran = again(tmp_path, "if life == 0 and place == '1': sys.exit(3)", TEST_REPORTS=str(reports))
    assert ran.process.returncode == 0
    assert "[rank 1 restart 1] life 1 joins False" in ran.stdout
    assert "exit code 3" not in reports.read_text()


def test_when_the_restarts_are_used_up_the_last_end_decides(tmp_path):
    ran = again(tmp_path, "if place == '1': sys.exit(5)")
    assert ran.process.returncode == 5
    assert len(list(tmp_path.glob("life1.*"))) == 3
    assert "nexar: rank 1 restart 2 ended with exit code 5" in ran.stderr


def test_the_last_one_is_not_started_again_for_nobody_could_let_it_in(tmp_path):
    ran = again(tmp_path, "os.kill(os.getpid(), 9)", "run", "-n", 1, "--elastic", "--max-restarts", 2, TEST_FORMED="1")
    assert ran.process.returncode == 128 + 9
    assert len(list(tmp_path.glob("life0.*"))) == 1


def test_who_came_too_late_to_be_let_in_is_lost_and_no_failure(tmp_path):
    """The other rank is gone, and the launcher knows it, before this one is refused: else it would be tried again."""
    text = "if place == '0': Path('draft').write_text(str(os.getpid())), Path('draft').rename('other'), stay()\n"
    text += "if life == 0: os.kill(os.getpid(), 9)\nPath('done').touch()\n"
    text += "while not Path('other').exists() or Path('/proc', Path('other').read_text()).exists(): time.sleep(0.01)\n"
    text += "from nexar.launch.exit_report import report_at_exit\nreport_at_exit()\nfrom nexar import JoinRefused\n"
    text += "raise JoinRefused(reason='full', code='nobody_left')"
    ran = again(tmp_path, text, TEST_FORMED="1")
    assert ran.process.returncode == 0, ran.stderr
    assert "nexar: warning: rank 1 restart 1 came too late" in ran.stderr


def test_restarts_need_an_elastic_cluster(tmp_path):
    ran = again(tmp_path, "", "run", "-n", 2, "--max-restarts", 2)
    assert ran.process.returncode == 2
    assert "give --elastic too" in ran.stderr


# -- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_every_rank_and_ends_the_run(tmp_path, number):
    text = f"signal.signal({int(number)}, lambda *_: (Path(f'heard{{rank}}').touch(), sys.exit(0)))\n{WAIT}"
    with Launch("run", "-n", 2, script(tmp_path, text), cwd=tmp_path) as running:
        pids(tmp_path, 2)
        running.process.send_signal(number)
        assert running.end() == 128 + number
    assert len(list(tmp_path.glob("heard*"))) == 2


def test_the_second_interrupt_ends_ranks_that_do_not_listen(tmp_path):
    with Launch("run", "-n", 2, script(tmp_path, DEAF + WAIT), cwd=tmp_path) as running:
        deaf = pids(tmp_path, 2)
        running.process.send_signal(signal.SIGINT)
        running.process.send_signal(signal.SIGTERM)
        assert running.end() in {128 + signal.SIGINT, 128 + signal.SIGTERM}
    for pid in deaf:
        await_gone(pid)


# -- nothing is left -------------------------------------------------------------------------------------------------


def test_nothing_is_left_after_the_launcher_was_killed(tmp_path):
    text = f"if os.fork() == 0:\n    rank += 10\n{DEAF}{WAIT}"
    with Launch("run", "-n", 2, script(tmp_path, text), cwd=tmp_path) as running:
        left = pids(tmp_path, 4)
        children = _children(running.process.pid)
        assert len(children) == 3  # two ranks and the guard
        os.kill(running.process.pid, signal.SIGKILL)
        running.process.wait(30)
        for pid in {*left, *children}:
            await_gone(pid)


def test_what_a_rank_forked_ends_with_it(tmp_path):
    text = f"if os.fork() == 0:\n    rank += 10\n    {'; '.join(WAIT.splitlines())}\nPath('parent').touch()\n"
    text += "deadline = time.monotonic() + 20\nwhile not Path('ready10').exists() and time.monotonic() < deadline: pass"
    ran = launch("run", "-n", 1, script(tmp_path, text), cwd=tmp_path)
    assert ran.process.returncode == 0
    await_gone(int((tmp_path / "pid10").read_text()))


def _children(pid):
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(child) for child in file.read().split()]
