import io
import os
import signal
from types import SimpleNamespace

import pytest

from nexar.launch import guard_main


@pytest.fixture
def say(monkeypatch):
    def speak(text):
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(text)))

    return speak


def test_groups_that_were_not_forgotten_are_left_when_the_launcher_is_gone(say):
    say(b"+10\n+11\n+12\n-11\n")
    assert guard_main.listen() == {10, 12}


def test_a_launcher_that_said_goodbye_leaves_nobody(say):
    say(b"+10\nbye\n")
    assert guard_main.listen() is None


def test_a_launcher_that_died_before_its_first_report_still_leaves_its_mark_behind(say):
    say(b"")
    assert guard_main.listen() == set()


def test_a_group_that_is_gone_gets_no_signal():
    assert guard_main.send(2**22 + 1, signal.SIGTERM) is False


def test_processes_are_found_by_their_mark():
    mine = guard_main.environment_of(os.getpid())
    assert guard_main.environment_of(2**22 + 1) == []
    assert os.getpid() not in guard_main.marked("no such mark")
    assert all(b"=" in variable for variable in mine if variable)
