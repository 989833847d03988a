"""How a command ends: one clear message and an exit code. A traceback is shown only where the bug is ours."""

import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nexar.errors import ConfigError, InternalError, NexarError, UsageError

GOOD = 0
FAILED = 1
WRONG_INPUT = 2


def exit_code_of(action: Callable[[], int]) -> int:
    """Run a command. What it returns, or what its error means; the error's message is on standard error then."""
    try:
        with _heard():
            return action()
    except InternalError:
        raise
    except NexarError as error:
        complain(str(error))
        return WRONG_INPUT if isinstance(error, UsageError | ConfigError) else FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


@contextmanager
def _heard() -> Iterator[None]:
    """What our code has to say while a command runs, from warnings on, is marked as ours too."""
    logger, handler = logging.getLogger("nexar"), logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("nexar: %(message)s"))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def complain(message: str) -> None:
    """One message, marked as ours."""
    sys.stderr.write(f"nexar: {message}\n")
    sys.stderr.flush()
