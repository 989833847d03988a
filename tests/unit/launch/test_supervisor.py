import os
import signal
from pathlib import Path

import pytest

from nexar.errors import UsageError
from nexar.launch.supervisor import Guard


def test_the_guard_goes_when_it_is_sent_away_and_ends_nobody():
    with Guard("mark") as guard:
        guard.watch(os.getpgid(0))
        assert os.getsid(guard.pid) == guard.pid
    assert not Path(f"/proc/{guard.pid}").exists()
    guard.close()


def test_a_guard_that_was_killed_is_not_missed():
    with Guard("mark") as guard:
        os.kill(guard.pid, signal.SIGKILL)
        os.waitid(os.P_PID, guard.pid, os.WEXITED | os.WNOWAIT)
        guard.watch(1)
        guard.forget(1)


def test_a_system_that_starts_no_guard_says_what_it_lacks(monkeypatch):
    def refuse(*_, **__):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("nexar.launch.supervisor.subprocess.Popen", refuse)
    with pytest.raises(UsageError, match=r"Too many open files.*ulimit"):
        Guard("mark")
