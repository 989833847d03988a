"""`nexar run --on-failure`: what the failure of one rank means for the others, and what the user sees of it."""

import signal
import time

import pytest

from tests.processes.launcher import EVENT_TIMEOUT, Launch, await_files, launch, script, without_notices
from tests.processes.nexar_command import Nexar

UNTIL = "while not Path('reported').exists(): time.sleep(0.01)\n"
SLEEP = "Path(f'ready{rank}').touch()\ntime.sleep(600)\n"
JOINED = "from nexar.launch.exit_report import report_at_exit\nreport_at_exit()\n"  # nexar.init() does that
MISSING = f"{JOINED}from nexar import PeerLost\nraise PeerLost(rank=1, cause='it is gone')\n"


def report_of(running):
    """The first line that the launcher itself writes: a wait for an event, not for time to pass."""
    deadline = time.monotonic() + EVENT_TIMEOUT
    while time.monotonic() < deadline:
        line = running.process.stderr.readline()
        assert line, "the launcher has ended without a report"
        if line.startswith("nexar: "):
            return line
    raise AssertionError("no report")


# -- stop ------------------------------------------------------------------------------------------------------------

FAILURES = [
    ("raise ValueError('on purpose')", 1, "ended with exit code 1"),
    ("sys.exit(3)", 3, "ended with exit code 3"),
    ("os.kill(os.getpid(), signal.SIGKILL)", 128 + 9, "was killed by SIGKILL"),
]


@pytest.mark.parametrize(("how", "code", "words"), FAILURES)
def test_a_failure_is_reported_while_the_other_ranks_still_run(tmp_path, how, code, words):
    """They end by themselves once it was, and are not stopped."""
    with Launch("run", "-n", 3, script(tmp_path, f"if rank == 1: {how}\n{UNTIL}"), cwd=tmp_path) as running:
        assert report_of(running).startswith(f"nexar: rank 1 {words}, the first to fail")
        (tmp_path / "reported").touch()
        assert running.end() == code
    assert "stopping" not in running.stderr


@pytest.mark.parametrize("deaf", ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"])
def test_ranks_that_do_not_end_by_themselves_are_stopped(tmp_path, deaf):
    text = "if rank == 1:\n    while len(list(Path().glob('ready*'))) < 2: time.sleep(0.01)\n    sys.exit(3)\n"
    text += deaf + SLEEP
    ran = launch("run", "-n", 3, script(tmp_path, text), cwd=tmp_path)
    assert ran.process.returncode == 3
    assert "nexar: stopping rank 0, rank 2: not ended 5 s after the failure\n" in ran.stderr


def test_the_traceback_is_shown_once_and_those_that_follow_from_it_not_at_all(tmp_path):
    text = f"if rank == 1: raise ValueError('on purpose')\n{MISSING}"
    ran = launch("run", "-n", 3, script(tmp_path, text), cwd=tmp_path)
    assert ran.process.returncode == 1
    assert ran.stderr.count("Traceback") == 1
    assert ran.stderr.count("ValueError: on purpose") == 1
    folded = [line for line in ran.stderr.splitlines() if "because rank 1 failed" in line]
    assert sorted(folded) == [
        f"nexar: rank {rank} ended with exit code 1: PeerLost, because rank 1 failed" for rank in (0, 2)
    ]


def test_a_rank_that_misses_another_is_not_blamed_though_it_ends_first(tmp_path):
    text = "if rank == 1:\n    while not Path('missed').exists(): time.sleep(0.01)\n    sys.exit(7)\n"
    text += f"import atexit\natexit.register(Path('missed').touch)\n{MISSING}"
    ran = launch("run", "-n", 2, script(tmp_path, text), cwd=tmp_path)
    assert ran.process.returncode == 7
    assert "nexar: rank 1 ended with exit code 7, the first to fail\n" in ran.stderr
    assert "nexar: rank 0 ended with exit code 1: PeerLost, because rank 1 failed\n" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_consequence_is_one_line_though_its_process_takes_long_to_end(tmp_path):
    """Longer than a traceback is kept back of a process that may go on."""
    text = "if rank == 1:\n    while not Path('missed').exists(): time.sleep(0.01)\n    sys.exit(7)\n"
    text += "import atexit\natexit.register(Path('missed').touch)\natexit.register(time.sleep, 3)\n"
    ran = launch("run", "-n", 2, script(tmp_path, f"{text}{MISSING}"), cwd=tmp_path)
    assert ran.process.returncode == 7
    assert "nexar: rank 0 ended with exit code 1: PeerLost, because rank 1 failed\n" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_what_a_rank_writes_does_not_decide_whether_it_is_blamed(tmp_path):
    """It only looks as if it had failed because another rank was gone: it is reported at once, and its code counts."""
    looks = 'Traceback (most recent call last):\\n  File "x", line 1\\nnexar.errors.peers.PeerLost: lost rank 0\\n'
    text = f"if rank == 1:\n    sys.stderr.write('{looks}')\n    sys.exit(3)\n{UNTIL}sys.exit(7)\n"
    with Launch("run", "-n", 2, script(tmp_path, text), cwd=tmp_path) as running:
        assert report_of(running).startswith("nexar: rank 1 ended with exit code 3, the first to fail")
        (tmp_path / "reported").touch()
        assert running.end() == 3


def test_an_error_that_is_derived_from_ours_is_a_consequence_too(tmp_path):
    text = "if rank == 1:\n    while not Path('missed').exists(): time.sleep(0.01)\n    sys.exit(7)\n"
    text += f"import atexit\natexit.register(Path('missed').touch)\n{JOINED}"
    text += "import nexar\nclass Mine(nexar.PeerLost): pass\nraise Mine(rank=1, cause='it is gone')\n"
    ran = launch("run", "-n", 2, script(tmp_path, text), cwd=tmp_path)
    assert ran.process.returncode == 7
    assert "nexar: rank 0 ended with exit code 1: Mine, because rank 1 failed\n" in ran.stderr


def test_a_rank_that_misses_another_is_reported_whole_if_nobody_else_failed(tmp_path):
    ran = launch("run", "-n", 2, script(tmp_path, f"if rank == 1: sys.exit(0)\n{MISSING}"), cwd=tmp_path)
    assert ran.process.returncode == 1
    assert "nexar: rank 0 ended with exit code 1, the first to fail:\nTraceback" in ran.stderr


def test_a_rank_whose_output_is_not_shown_is_reported_with_its_traceback(tmp_path):
    ran = launch("run", "-n", 2, "--local-ranks-filter", "0", script(tmp_path, "if rank: 1 / 0"), cwd=tmp_path)
    assert "nexar: rank 1 ended with exit code 1, the first to fail:\nTraceback" in ran.stderr


@pytest.mark.parametrize(
    "keep",
    ["import threading; threading.Thread(target=time.sleep, args=(600,)).start()", "atexit.register(time.sleep, 600)"],
)
def test_a_rank_that_raised_is_reported_though_its_process_goes_on(tmp_path, keep):
    text = f"import atexit\n{JOINED}if rank == 1:\n    {keep}\n    raise ValueError('on purpose')\n{UNTIL}"
    with Launch("run", "-n", 3, script(tmp_path, text), cwd=tmp_path) as running:
        assert report_of(running) == "nexar: rank 1 raised ValueError, the first to fail:\n"
        assert running.process.stderr.readline() == "Traceback (most recent call last):\n"
        (tmp_path / "reported").touch()
        assert running.end() == 1
    assert "nexar: stopping rank 1: not ended 5 s after the failure\n" in running.stderr


def test_a_rank_that_raised_first_is_blamed_though_it_ends_last(tmp_path):
    """The other one does not say why it ends: it may have found out that the first is gone."""
    text = "import atexit\ndef wait():\n    while not Path('reported').exists(): time.sleep(0.01)\n"
    text += "if rank == 1:\n    atexit.register(wait)\n    atexit.register(Path('told').touch)\n"
    text += f"{JOINED}if rank == 1: raise ValueError('on purpose')\n"
    text += "while not Path('told').exists(): time.sleep(0.01)\nos._exit(5)\n"
    with Launch("run", "-n", 2, script(tmp_path, text), cwd=tmp_path) as running:
        assert report_of(running) == "nexar: rank 1 raised ValueError, the first to fail:\n"
        (tmp_path / "reported").touch()
        assert running.end() == 1


def test_a_traceback_that_a_rank_survives_is_shown_while_it_runs(tmp_path):
    text = "import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()\n"
    with Launch("run", "-n", 1, script(tmp_path, text + UNTIL), cwd=tmp_path) as running:
        assert running.process.stderr.readline() == "[rank 0] Traceback (most recent call last):\n"
        (tmp_path / "reported").touch()
        assert running.end() == 0


# -- continue --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [("--on-failure", "continue"), ("--elastic",)])
@pytest.mark.parametrize(("how", "code", "words"), FAILURES)
def test_survivors_go_on_and_the_run_is_good(tmp_path, options, how, code, words):
    text = f"if rank == 1: {how}\ntime.sleep(0.3); print('went on')"
    ran = launch("run", "-n", 3, *options, script(tmp_path, text), cwd=tmp_path)
    assert ran.process.returncode == 0, ran.stderr
    assert ran.stdout.count("went on") == 2
    assert f"nexar: warning: rank 1 {words} and is lost\n" in ran.stderr


def test_survivors_that_do_not_end_well_fail_the_run_with_the_code_of_the_culprit(tmp_path):
    text = f"if rank == 1: sys.exit(3)\n{MISSING}"
    ran = launch("run", "-n", 3, "--on-failure", "continue", script(tmp_path, text), cwd=tmp_path)
    assert ran.process.returncode == 3


def test_the_policy_abort_stops_an_elastic_run_too(tmp_path):
    text = f"if rank == 1: sys.exit(5)\n{SLEEP}"
    ran = launch("run", "-n", 2, "--elastic", script(tmp_path, text), cwd=tmp_path, NEXAR_RECOVERY_POLICY="abort")
    assert ran.process.returncode == 5
    assert "stopping rank 0" in ran.stderr


@pytest.mark.parametrize(
    ("value", "policy", "words"), [("maybe", "automatic", "stop or continue"), ("continue", "abort", "policy=abort")]
)
def test_what_cannot_be_is_refused(tmp_path, value, policy, words):
    command = ("run", "-n", 2, "--on-failure", value, script(tmp_path, ""))
    ran = launch(*command, cwd=tmp_path, NEXAR_RECOVERY_POLICY=policy)
    assert ran.process.returncode == 2
    assert "--on-failure" in ran.stderr
    assert words in ran.stderr.lower()


# -- interrupts ------------------------------------------------------------------------------------------------------


def test_an_interrupt_is_one_line_and_no_traceback(tmp_path):
    with Launch("run", "-n", 3, script(tmp_path, SLEEP), cwd=tmp_path) as running:
        await_files(tmp_path, "ready*", 3)
        running.process.send_signal(signal.SIGINT)
        assert running.end() == 128 + signal.SIGINT
    assert running.stderr == "nexar: SIGINT: stopping all ranks; they have 5 s to end\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_before_the_cluster_has_formed_is_one_line_too(tmp_path, number):
    text = f"if rank == 0:\n    {SLEEP.splitlines()[0]}\n    time.sleep(600)\n"
    text += "import nexar\nPath(f'ready{rank}').touch()\nnexar.init()\n"
    with Nexar("run", "-n", 3, script(tmp_path, text), cwd=tmp_path) as running:
        await_files(tmp_path, "ready*", 3)
        running.process.send_signal(number)
        assert running.end() == 128 + number
    said = without_notices(running.stderr)
    assert said == f"nexar: {number.name}: stopping all ranks; they have 5 s to end\n"
