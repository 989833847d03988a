"""Leaving when the interpreter exits, without a node and without an exit."""

import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from nexar.config import Config
from nexar.errors import LinkClosed, SeedUnreachable
from nexar.launch import create
from nexar.launch.create import LeaveAtExit, join_cluster
from nexar.observe import metrics as metrics_module
from nexar.security.invitation import Invitation

INVITATION = Invitation(("127.0.0.1:1",), bytes(32), None)


class FakeMetrics:
    """Without a socket."""

    def __init__(self) -> None:
        self.collector = metrics_module.Collector()
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class FakeRuntime:
    class node:  # noqa: N801
        id = 7


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, FakeMetrics]]:
    made: list[tuple[int, int, FakeMetrics]] = []

    def open_metrics(_: Config, port: int, local_rank: int) -> FakeMetrics:
        made.append((port, local_rank, FakeMetrics()))
        return made[-1][2]

    monkeypatch.setattr(metrics_module, "open_metrics", open_metrics)
    return made


def bootstrap_with(monkeypatch: pytest.MonkeyPatch, does: Callable[..., Any]) -> None:
    monkeypatch.setattr(create, "bootstrap", does)


def test_without_the_setting_there_are_no_metrics(
    monkeypatch: pytest.MonkeyPatch, opened: list[tuple[int, int, FakeMetrics]]
) -> None:
    bootstrap_with(monkeypatch, lambda *_, **settings: settings)
    found: Any = join_cluster(Config(), INVITATION, rank=1, size=2, local_rank=1)
    assert (found["rank"], found["size"]) == (1, 2)
    assert opened == []


def test_metrics_are_of_the_node_that_joined_and_end_with_it(
    monkeypatch: pytest.MonkeyPatch, opened: list[tuple[int, int, FakeMetrics]]
) -> None:
    bootstrap_with(monkeypatch, lambda *_, beside, **__: beside(FakeRuntime(), object()))
    close: Any = join_cluster(Config(metrics_port=9300), INVITATION, local_rank=2)
    ((port, local_rank, metrics),) = opened
    assert (port, local_rank, metrics.closed) == (9300, 2, 0)
    assert metrics.collector.source is not None
    assert metrics.collector.source.me == 7
    close()
    assert metrics.closed == 1


def test_who_could_not_join_leaves_no_port_open(
    monkeypatch: pytest.MonkeyPatch, opened: list[tuple[int, int, FakeMetrics]]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise SeedUnreachable(addresses=("a:1",), attempts=1, cause="nobody")

    bootstrap_with(monkeypatch, fail)
    with pytest.raises(SeedUnreachable):
        join_cluster(Config(metrics_port=0), INVITATION)
    assert opened[0][2].closed == 1


def test_an_exit_before_the_caller_has_the_communicator_leaves_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may be in init() when the main thread ends."""
    left: list[object] = []
    error = ValueError("it ends the program")

    class Made:
        def __exit__(self, kind: object, error: object, trace: object) -> None:
            left.append(error)

    def exits(*_: object, beside: Callable[..., Any], **__: object) -> Made:
        made = Made()
        known = set(create._leavers)
        beside(FakeRuntime(), made)
        (leaver,) = (each for key, each in create._leavers.items() if key not in known)
        leaver.begin(error)
        assert leaver.has_left(time.monotonic() + 30.0)
        leaver.cancel()
        return made

    bootstrap_with(monkeypatch, exits)
    join_cluster(Config(), INVITATION)
    assert left == [error]


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(create, "_leavers", {})
    monkeypatch.delattr(sys, "last_value", raising=False)


def test_a_node_leaves_without_an_error_when_the_program_ends() -> None:
    notices: list[BaseException | None] = []
    LeaveAtExit(notices.append)
    create._leave_all()
    assert notices == [None]


def test_a_node_leaves_with_the_exception_that_nobody_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[BaseException | None] = []
    error = ValueError("on purpose")
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    LeaveAtExit(notices.append)
    create._leave_all()
    assert notices == [error]


def test_an_exception_at_the_prompt_is_not_the_end_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[BaseException | None] = []
    monkeypatch.setattr(sys, "last_value", ValueError("a typing error"), raising=False)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    LeaveAtExit(notices.append)
    create._leave_all()
    assert notices == [None]


def test_a_closed_node_does_not_leave_again_and_its_thread_has_ended() -> None:
    notices: list[BaseException | None] = []
    before = set(threading.enumerate())
    leaver = LeaveAtExit(notices.append)
    leaver.cancel()
    leaver.cancel()
    create._leave_all()
    assert notices == []
    assert set(threading.enumerate()) == before


def test_leaving_may_cancel_itself() -> None:
    leavers: list[LeaveAtExit] = []
    leavers.append(LeaveAtExit(lambda _: leavers[0].cancel()))
    create._leave_all()
    assert not leavers[0]._thread.is_alive()


def test_a_node_that_cannot_leave_does_not_keep_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(create, "EXIT_TIMEOUT", 0.05)
    go_on = threading.Event()

    def wait(_: BaseException | None) -> None:
        go_on.wait(30)

    leaver = LeaveAtExit(wait)
    with caplog.at_level(logging.WARNING):
        create._leave_all()
    assert "have not received all that it sent within 0.05 s" in caplog.text
    go_on.set()
    leaver._thread.join(30)


def test_what_goes_wrong_while_leaving_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: BaseException | None) -> None:
        raise RuntimeError("can't start new thread")

    LeaveAtExit(fail)
    with caplog.at_level(logging.WARNING):
        create._leave_all()
    assert [record.exc_info for record in caplog.records] == [None]
    assert "could not leave the cluster at exit: can't start new thread" in caplog.text


@pytest.mark.parametrize(
    ("daemon", "error", "shown"), [(True, LinkClosed(), 0), (True, OSError(), 1), (False, LinkClosed(), 1)]
)
def test_calls_of_daemon_threads_end_quietly_at_exit(daemon: bool, error: Exception, shown: int) -> None:
    reported: list[object] = []
    thread = threading.Thread(daemon=daemon)
    create._quiet(reported.append)(threading.ExceptHookArgs((type(error), error, None, thread)))
    assert len(reported) == shown
