import logging
import signal

import pytest

from nexar import ConfigError, InternalError, SeedUnreachable, UsageError
from nexar.cli.exit_codes import exit_code_of


def failing(error):
    def action():
        raise error

    return action


def test_what_the_action_returns_is_the_exit_code():
    assert exit_code_of(lambda: 7) == 7


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("wrong"), 2),
        (ConfigError(variable="V", value="x", allowed="y"), 2),
        (SeedUnreachable(addresses=["a:1"], attempts=3, cause="refused"), 1),
    ],
)
def test_an_error_is_one_line_and_a_code(error, code, capsys):
    assert exit_code_of(failing(error)) == code
    assert capsys.readouterr().err == f"nexar: {error}\n"


def test_an_interruption_ends_as_a_shell_expects():
    assert exit_code_of(failing(KeyboardInterrupt())) == 130


def test_being_terminated_closes_what_was_opened_and_ends_as_a_shell_expects():
    former, closed = signal.getsignal(signal.SIGTERM), []

    def action():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            closed.append(True)

    assert exit_code_of(action) == 143
    assert closed == [True]
    assert signal.getsignal(signal.SIGTERM) is former


def test_a_command_that_was_started_to_ignore_termination_ignores_it():
    former = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert exit_code_of(lambda: signal.raise_signal(signal.SIGTERM) or 0) == 0
    finally:
        signal.signal(signal.SIGTERM, former)


def test_a_bug_of_ours_is_shown_as_one():
    with pytest.raises(InternalError):
        exit_code_of(failing(InternalError("impossible")))


def test_warnings_of_ours_are_marked_while_a_command_runs_and_only_then(capsys):
    logger = logging.getLogger("nexar.seed")

    def action():
        logger.info("somebody joined")
        logger.warning("somebody was refused")
        return 0

    handlers = list(logging.getLogger("nexar").handlers)
    exit_code_of(action)
    assert capsys.readouterr().err == "nexar: somebody was refused\n"
    assert logging.getLogger("nexar").handlers == handlers
