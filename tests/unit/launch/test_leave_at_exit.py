"""Leaving when the interpreter exits, without a node and without an exit."""

import logging
import sys
import threading

import pytest

from nexar.errors import LinkClosed
from nexar.launch import leave_at_exit
from nexar.launch.leave_at_exit import ExitLeaver


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(leave_at_exit, "_leavers", {})
    monkeypatch.delattr(sys, "last_value", raising=False)


def test_a_node_leaves_without_an_error_when_the_program_ends() -> None:
    told: list[BaseException | None] = []
    ExitLeaver(told.append)
    leave_at_exit._leave_all()
    assert told == [None]


def test_a_node_leaves_with_the_exception_that_nobody_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[BaseException | None] = []
    error = ValueError("on purpose")
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    ExitLeaver(told.append)
    leave_at_exit._leave_all()
    assert told == [error]


def test_an_exception_at_the_prompt_is_not_the_end_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[BaseException | None] = []
    monkeypatch.setattr(sys, "last_value", ValueError("a typing error"), raising=False)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    ExitLeaver(told.append)
    leave_at_exit._leave_all()
    assert told == [None]


def test_a_closed_node_does_not_leave_again_and_its_thread_has_ended() -> None:
    told: list[BaseException | None] = []
    before = set(threading.enumerate())
    leaver = ExitLeaver(told.append)
    leaver.cancel()
    leaver.cancel()
    leave_at_exit._leave_all()
    assert told == []
    assert set(threading.enumerate()) == before


def test_leaving_may_cancel_itself() -> None:
    leavers: list[ExitLeaver] = []
    leavers.append(ExitLeaver(lambda _: leavers[0].cancel()))
    leave_at_exit._leave_all()
    assert not leavers[0]._thread.is_alive()


def test_a_node_that_cannot_leave_does_not_keep_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leave_at_exit, "EXIT_TIMEOUT", 0.05)
    go_on = threading.Event()

    def wait(_: BaseException | None) -> None:
        go_on.wait(30)

    leaver = ExitLeaver(wait)
    with caplog.at_level(logging.WARNING):
        leave_at_exit._leave_all()
    assert "have not taken all that it sent within 0.05 s" in caplog.text
    go_on.set()
    leaver._thread.join(30)


def test_what_goes_wrong_while_leaving_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: BaseException | None) -> None:
        raise RuntimeError("can't start new thread")

    ExitLeaver(fail)
    with caplog.at_level(logging.WARNING):
        leave_at_exit._leave_all()
    assert [record.exc_info for record in caplog.records] == [None]
    assert "could not leave the cluster at exit: can't start new thread" in caplog.text


@pytest.mark.parametrize(
    ("daemon", "error", "shown"), [(True, LinkClosed(), 0), (True, OSError(), 1), (False, LinkClosed(), 1)]
)
def test_calls_of_daemon_threads_end_quietly_at_exit(daemon: bool, error: Exception, shown: int) -> None:
    reported: list[object] = []
    thread = threading.Thread(daemon=daemon)
    leave_at_exit._quiet(reported.append)(threading.ExceptHookArgs((type(error), error, None, thread)))
    assert len(reported) == shown
