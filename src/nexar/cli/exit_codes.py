"""How a command ends: one clear message and an exit code. A traceback is shown only where the bug is ours."""

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
    """Run a command. What it returns, or what its error means; the error's message is on standard error then."""
    try:
        with _handled(), _terminable():
            return action()
    except InternalError:
        raise
    except NexarError as error:
        fail_with(str(error))
        return WRONG_INPUT if isinstance(error, UsageError | ConfigError) else FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except _Terminated:
        return 128 + signal.SIGTERM


class _Terminated(BaseException):
    """SIGTERM came. It unwinds the command as Ctrl-C does, so that what was opened is closed and those who wait are
    told; a container, whose first process has no default for SIGTERM, would otherwise not even end."""


@contextmanager
def _terminable() -> Iterator[None]:
    """The first SIGTERM is polite, the second one is not. Who was started to ignore it still does."""
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
    """What our code has to say while a command runs, from warnings on, is marked as ours too."""
    logger, handler = logging.getLogger("nexar"), logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("nexar: %(message)s"))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def fail_with(message: str) -> None:
    """One message, marked as ours."""
    sys.stderr.write(f"nexar: {message}\n")
    sys.stderr.flush()
