import os
import stat
import subprocess
import sys
import threading

import msgspec
import pytest

from nexar import Config, OperationTimeout, UsageError
from nexar.launch import seed_process
from nexar.launch.seed_process import (
    SeedFailed,
    SeedReady,
    SeedTerms,
    changed_settings,
    offered_ticket,
    wait_for_ticket,
)

NAME = "0123456789abcdef"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"nexar-{os.geteuid()}"


def test_the_ticket_goes_from_rank_0_to_the_others_and_nothing_is_left(folder):
    with offered_ticket(NAME, "T", os.getpid()):
        assert wait_for_ticket(NAME, 5) == "T"
        assert stat.S_IMODE((folder / NAME).stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(folder.iterdir()) == []


def test_the_others_may_come_first():
    taken = []
    waiter = threading.Thread(target=lambda: taken.append(wait_for_ticket(NAME, 20)))
    waiter.start()
    with offered_ticket(NAME, "T", os.getpid()):
        waiter.join(20)
    assert taken == ["T"]


def test_a_rank_0_that_never_comes_is_named():
    with pytest.raises(OperationTimeout, match=r"rank 0.*\(NEXAR_FORMATION_TIMEOUT_SECS\)"):
        wait_for_ticket(NAME, 0.05)
    with pytest.raises(OperationTimeout, match=r'^init_process_group\("nexar"\).*\(timeout=\)'):
        wait_for_ticket(NAME, 0.05, operation='init_process_group("nexar")')


def test_a_file_that_a_crash_left_behind_is_not_believed():
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with offered_ticket(NAME, "old", ended.pid):
        assert wait_for_ticket(NAME, 5) == "old"
        ended.communicate(b"\n")
        with pytest.raises(OperationTimeout):
            wait_for_ticket(NAME, 0.05)
        with offered_ticket(NAME, "new", os.getpid()):
            assert wait_for_ticket(NAME, 5) == "new"


def test_a_folder_that_others_can_look_into_is_refused(folder):
    folder.mkdir(mode=0o755)
    with pytest.raises(UsageError, match="not private to this user"):
        wait_for_ticket(NAME, 1)


def test_a_link_instead_of_the_folder_is_refused(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="not private to this user"), offered_ticket(NAME, "T", os.getpid()):
        pass


def test_half_a_file_is_no_file(folder):
    with offered_ticket(NAME, "T", os.getpid()):
        (folder / NAME).write_bytes(b'{"ticket":')
        with pytest.raises(OperationTimeout):
            wait_for_ticket(NAME, 0.05)


def test_a_process_that_is_gone_has_no_start():
    assert seed_process._started(2**22 + 1) == ""
    assert seed_process._alive(2**22 + 1) == ""
    assert seed_process._alive(os.getpid()) == "alive"


def test_a_config_is_the_same_on_the_other_side():
    config = Config(port_range=(4000, 4100), transports=("tls",), elastic_enabled=True, buffer_profile=((1024, 2),))
    sent = msgspec.json.encode(SeedTerms(4, ":0", changed_settings(config)))
    assert Config(**msgspec.json.decode(sent, type=SeedTerms).settings) == config


def test_defaults_are_not_sent():
    assert changed_settings(Config()) == {}


def test_an_answer_is_one_or_the_other():
    for answer in (SeedReady("T", "a:1", 7), SeedFailed("no")):
        assert msgspec.json.decode(msgspec.json.encode(answer), type=SeedReady | SeedFailed) == answer
