"""The standard input of the launcher is rank 0's; and lines of any length come out whole."""

import json
import os
import pty
import subprocess
import sys

import pytest

from tests.processes.launcher import MAIN, await_files, script

EVENT_TIMEOUT = 120.0
READ = "print(f'{rank} read {sys.stdin.read()!r}')"


def run(folder, text, **streams):
    command = [sys.executable, str(MAIN), "run", "-n", "3", str(script(folder, text))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NEXAR_")}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, **streams)


def test_a_pipe_is_read_by_rank_0_and_the_others_have_none(tmp_path):
    with run(tmp_path, READ, stdin=subprocess.PIPE) as running:
        shown, _ = running.communicate("hello\n" * 20_000, timeout=EVENT_TIMEOUT)
    assert "[rank 0] 0 read 'hello" in shown
    assert shown.count("hello") == 20_000
    assert "[rank 1] 1 read ''" in shown
    assert "[rank 2] 2 read ''" in shown


def test_a_file_is_read_by_rank_0(tmp_path):
    (tmp_path / "input").write_text("from a file")
    with (tmp_path / "input").open() as file, run(tmp_path, READ, stdin=file) as running:
        shown, _ = running.communicate(timeout=EVENT_TIMEOUT)
    assert "[rank 0] 0 read 'from a file'" in shown


def _run_closed(folder, text, redirections):
    """Start a run with some of its standard streams closed."""
    path = script(folder, text)
    launcher = [sys.executable, str(MAIN), "run", "-n", "2", str(path)]
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirections}', "sh", *launcher],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=EVENT_TIMEOUT,
        check=False,
    )


def test_a_closed_standard_input_is_empty_for_rank_0(tmp_path):
    """The descriptor is not that of a pipe which the launcher opened for itself."""
    ran = _run_closed(tmp_path, "print(rank, os.readlink('/proc/self/fd/0'))", "<&-")
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == ["[rank 0] 0 /dev/null", "[rank 1] 1 /dev/null"]


@pytest.mark.parametrize("redirections", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_run_with_closed_standard_streams_returns_the_exit_code(tmp_path, redirections):
    ran = _run_closed(tmp_path, "print('shown'); Path(f'ran.{rank}').touch(); sys.exit(7 * (rank == 1))", redirections)
    assert ran.returncode == 7, ran.stderr
    assert len(list(tmp_path.glob("ran.*"))) == 2


def test_what_is_typed_at_a_terminal_reaches_rank_0(tmp_path):
    """A group in the background that reads from its terminal is stopped; rank 0 is not."""
    text = "print(f'{rank} was told {input()}' if rank == 0 else 'nothing')"
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(tmp_path)
        command = [sys.executable, str(MAIN), "run", "-n", "2", str(script(tmp_path, text))]
        os.execv(sys.executable, command)
    os.write(terminal, b"a line\n")
    shown = _read_all(terminal)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0, shown
    assert b"0 was told a line" in shown


SHELL = """
import os, re, signal, subprocess, sys, time
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
launcher = subprocess.Popen(sys.argv[1:], process_group=0)
def waits_for_input():
    folder = f"/proc/{launcher.pid}/fdinfo"
    return any(re.search("^tfd: +0 ", open(f"{folder}/{name}").read(), re.MULTILINE) for name in os.listdir(folder))
while not os.path.exists("typed") or waits_for_input(): time.sleep(0.01)
os.tcsetpgrp(0, launcher.pid)
os.killpg(launcher.pid, signal.SIGCONT)
sys.exit(launcher.wait())
"""


def test_a_launcher_that_is_put_in_the_foreground_reads_what_is_typed(tmp_path):
    """As a shell does it for `fg`: the launcher was in the background when the line was typed."""
    text = "if rank == 0: Path('ready').touch()\nprint(f'{rank} was told {input()}' if rank == 0 else 'nothing')"
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(tmp_path)
        command = [sys.executable, str(MAIN), "run", "-n", "2", str(script(tmp_path, text))]
        os.execv(sys.executable, [sys.executable, "-c", SHELL, *command])
    await_files(tmp_path, "ready", 1)
    os.write(terminal, b"a line\n")
    (tmp_path / "typed").touch()
    shown = _read_all(terminal)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0, shown
    assert b"0 was told a line" in shown


def _read_all(terminal):
    shown = b""
    try:
        while piece := os.read(terminal, 65_536):
            shown += piece
    except OSError:  # the system's way to say that the other side is closed
        return shown
    return shown


def test_a_long_line_comes_out_whole(tmp_path):
    text = "import json; print(json.dumps([rank] * 1_000_000))"
    with run(tmp_path, text, stdin=subprocess.DEVNULL) as running:
        shown, _ = running.communicate(timeout=EVENT_TIMEOUT)
    lines = shown.splitlines()
    assert len(lines) == 3
    for line in lines:
        prefix, _, content = line.partition("] ")
        assert json.loads(content) == [int(prefix[-1])] * 1_000_000
