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
    ran = launch("run", "-n", 3, script(tmp_path, text), cwd=tmp_path)
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
    assert "2: " not in reports  # it ended well, which is no death


def test_the_policy_abort_stops_all(tmp_path):
    text = f"if rank == 1:\n    sys.exit(5) if os.environ['HOW'] == 'exit' else os.kill(os.getpid(), 9)\n{WAIT}"
    for how, code in (("exit", 5), ("kill", 128 + 9)):
        ran = launch("run", "-n", 3, script(tmp_path, text), cwd=tmp_path, HOW=how, NEXAR_RECOVERY_POLICY="abort")
        assert ran.process.returncode == code


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
