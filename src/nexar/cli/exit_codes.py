"""Runs a command and turns errors into a message and an exit code. Only internal errors show a traceback."""

import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from nexar.errors import ConfigError, InternalError, NexarError, UsageError

GOOD = 0
FAILED = 1
WRONG_INPUT = 2


def exit_code_of(action: Callable[[], int]) -> int:
    """Return the result, or print the error and return its exit code."""
    try:
        with _handled(), _terminable():
            return action()
    except InternalError:
        raise
    except NexarError as error:
        print_message(str(error))
        return WRONG_INPUT if isinstance(error, UsageError | ConfigError) else FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except _Terminated:
        return 128 + signal.SIGTERM


class _Terminated(BaseException):
    """SIGTERM unwinds the command as Ctrl-C does; a container's first process would ignore it."""


@contextmanager
def _terminable() -> Iterator[None]:
    """A second SIGTERM kills. An ignored SIGTERM stays ignored."""
    if signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:
        yield
        return
    former = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if former is None else former)


def _terminate(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise _Terminated


@contextmanager
def _handled() -> Iterator[None]:
    logger, handler = logging.getLogger("nexar"), logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("nexar: %(message)s"))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def print_message(message: str) -> None:
    """Write one message to standard error."""
    sys.stderr.write(f"nexar: {message}\n")
    sys.stderr.flush()
