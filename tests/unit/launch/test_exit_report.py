"""What a rank reports to its launcher about its end."""

import os

import pytest

from nexar import errors
from nexar.launch.exit_report import ExitPipe, ExitReport, origin_of, report_at_exit
from nexar.launch.plan import EXIT_PIPE_VARIABLE


class Derived(errors.MembershipChanged):
    """Of a user."""


CHANGE = {"communicator": None, "lost": {}, "joined": (), "completed_by_all": None}
FORMATION = {"joined": (), "expected": 2, "refused": {}, "timeout": 1.0}


@pytest.mark.parametrize(
    ("error", "origin"),
    [
        (errors.PeerLost(rank=1, cause="gone"), "consequence"),
        (errors.MembershipChanged(**CHANGE), "consequence"),
        (Derived(**CHANGE), "consequence"),
        (errors.FormationTimeout(**FORMATION), "perhaps_consequence"),
        (errors.JoinRefused(reason="full"), "perhaps_consequence"),
        (errors.JoinRefused(reason="every member has left or died"), "perhaps_consequence"),
        (errors.JoinRefused(reason="full", code="nobody_left"), "too_late"),
        (errors.JoinRefused(reason="nobody_left", code="full"), "perhaps_consequence"),
        (errors.NoQuorum(alive=[0], needed=2), "perhaps_consequence"),
        (ValueError("nexar.errors.PeerLost: lost rank 1"), "own"),
        (errors.UsageError("closed"), "own"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_the_class_of_the_exception_decides_and_never_its_text(error: BaseException, origin: str) -> None:
    assert origin_of(error) == origin


def raised_after(error: BaseException, *, how: str) -> BaseException:
    """As `raise RuntimeError from error` in the handler of it, `raise RuntimeError`, and `raise … from None`."""
    raised = RuntimeError("the training failed")
    raised.__context__ = error
    if how != "context":
        raised.__cause__ = error if how == "cause" else None  # which suppresses the context
    return raised


@pytest.mark.parametrize(("how", "origin"), [("cause", "consequence"), ("context", "consequence"), ("none", "own")])
def test_an_exception_that_was_raised_because_of_a_loss_is_a_consequence(how: str, origin: str) -> None:
    assert origin_of(raised_after(errors.MembershipChanged(**CHANGE), how=how)) == origin


def test_a_group_is_a_consequence_if_all_of_its_exceptions_are() -> None:
    lost, own = errors.MembershipChanged(**CHANGE), ValueError("own")
    assert origin_of(ExceptionGroup("tasks", [lost, raised_after(lost, how="cause")])) == "consequence"
    assert origin_of(ExceptionGroup("tasks", [lost, own])) == "own"


def test_exceptions_that_name_one_another_as_their_cause_come_to_an_end() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert origin_of(one) == "own"


@pytest.fixture
def pipe():
    with_both_ends = ExitPipe()
    yield with_both_ends
    with_both_ends.close()


def test_the_last_report_counts(pipe: ExitPipe) -> None:
    os.write(pipe.write_end, b'{"exception":"PeerLost","origin":"consequence"}\n{}\n')
    assert pipe.take() == ExitReport()


@pytest.mark.parametrize("text", [b"", b"nonsense\n", b'{"origin":"fate"}\n', b'{"exception":'])
def test_what_is_no_report_means_nothing(pipe: ExitPipe, text: bytes) -> None:
    os.write(pipe.write_end, text)
    assert pipe.take() is None


def test_what_the_rank_said_is_kept(pipe: ExitPipe) -> None:
    os.write(pipe.write_end, b'{"exception":"ValueError"}\n')
    assert pipe.take() == pipe.take() == ExitReport("ValueError")


def test_a_rank_that_has_closed_its_end_does_not_block_the_launcher(pipe: ExitPipe) -> None:
    pipe.close_write_end()
    assert pipe.take() is None


@pytest.mark.parametrize("text", ["", "x", "1", "1:2:3", "999999:1"])
def test_a_variable_that_names_no_pipe_of_the_launcher_is_taken_and_ignored(monkeypatch, text: str) -> None:
    registered: list[object] = []
    monkeypatch.setattr("atexit.register", registered.append)
    monkeypatch.setenv(EXIT_PIPE_VARIABLE, text)
    report_at_exit()
    assert registered == []
    assert EXIT_PIPE_VARIABLE not in os.environ


def test_a_descriptor_that_is_another_file_now_is_not_written_to(monkeypatch, pipe: ExitPipe) -> None:
    registered: list[object] = []
    monkeypatch.setattr("atexit.register", registered.append)
    monkeypatch.setattr("threading.Thread.start", lambda _: registered.append("thread"))
    descriptor, _, inode = pipe.variable.partition(":")
    monkeypatch.setenv(EXIT_PIPE_VARIABLE, f"{descriptor}:{int(inode) + 1}")
    report_at_exit()
    assert registered == []
    monkeypatch.setenv(EXIT_PIPE_VARIABLE, pipe.variable)
    report_at_exit()
    assert len(registered) == 2
