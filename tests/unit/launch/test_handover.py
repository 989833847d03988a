import os
import stat
import subprocess
import sys
import threading

import pytest

from nexar import OperationTimeout, UsageError
from nexar.launch import handover
from nexar.launch.handover import offered, take

NAME = "0123456789abcdef"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"nexar-{os.geteuid()}"


def test_the_ticket_goes_from_rank_0_to_the_others_and_nothing_is_left(folder):
    with offered(NAME, "T", os.getpid()):
        assert take(NAME, 5) == "T"
        assert stat.S_IMODE((folder / NAME).stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(folder.iterdir()) == []


def test_the_others_may_come_first():
    taken = []
    waiter = threading.Thread(target=lambda: taken.append(take(NAME, 20)))
    waiter.start()
    with offered(NAME, "T", os.getpid()):
        waiter.join(20)
    assert taken == ["T"]


def test_a_rank_0_that_never_comes_is_named():
    with pytest.raises(OperationTimeout, match="rank 0"):
        take(NAME, 0.05)


def test_a_file_that_a_crash_left_behind_is_not_believed():
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with offered(NAME, "old", ended.pid):
        assert take(NAME, 5) == "old"
        ended.communicate(b"\n")
        with pytest.raises(OperationTimeout):
            take(NAME, 0.05)
        with offered(NAME, "new", os.getpid()):
            assert take(NAME, 5) == "new"


def test_a_folder_that_others_can_look_into_is_refused(folder):
    folder.mkdir(mode=0o755)
    with pytest.raises(UsageError, match="not a folder of this user alone"):
        take(NAME, 1)


def test_a_link_instead_of_the_folder_is_refused(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="not a folder of this user alone"), offered(NAME, "T", os.getpid()):
        pass


def test_half_a_file_is_no_file(folder):
    with offered(NAME, "T", os.getpid()):
        (folder / NAME).write_bytes(b'{"ticket":')
        with pytest.raises(OperationTimeout):
            take(NAME, 0.05)


def test_a_process_that_is_gone_has_no_start():
    assert handover._started(2**22 + 1) == ""
    assert handover._alive(2**22 + 1) == ""
    assert handover._alive(os.getpid()) == "alive"
