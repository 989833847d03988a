import signal
import sys
from pathlib import Path

from nexar.testing.soak.member_process import MemberProcess
from tests.ranks import PATIENCE


def start(folder: Path, program: str) -> MemberProcess:
    return MemberProcess("one", [sys.executable, "-c", program], folder, {})


def test_what_it_says_is_read_once_and_in_whole_lines(tmp_path: Path) -> None:
    process = start(tmp_path, """print('{"step": 1}'); print('{"step": 2}'); print('{"st', end='')""")
    assert process.end(PATIENCE)
    assert list(process.reports()) == [{"step": 1}, {"step": 2}]
    assert list(process.reports()) == []
    assert process.exit_code == 0


def test_what_it_complained_of_is_told_with_how_it_ended(tmp_path: Path) -> None:
    process = start(tmp_path, "raise SystemExit('too bad')")
    assert process.end(PATIENCE)
    assert process.tell() == f"one (process {process.pid}) ended with 1:\ntoo bad\n"


def test_one_that_does_not_end_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path, "import time; time.sleep(600)")
    assert not process.end(0.1)
    assert process.exit_code == -signal.SIGKILL
