"""Rank 0's side of the seed it starts."""

import os
import select
import signal
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

import msgspec

from nexar.config import Config
from nexar.environment import inherited
from nexar.errors import OperationTimeout, UsageError
from nexar.launch.seed_terms import SeedFailed, SeedReady, SeedTerms, changed_settings

_MODULE = "nexar.launch.seed_main"
_NOTICE_TIMEOUT = 5.0  # seconds that a seed has to tell the other ranks that the cluster does not form


class SeedProcess:
    """A seed in a process and a session of its own. Context manager: left by an error it is ended; left well it stays.

    Staying is the point: it attends the cluster until every member has left, also after this process has gone. So it is
    no child of this process, which may end many clusters and would have to wait for the end of each one's seed: the
    child that is started starts the seed, and ends.
    """

    def __init__(self, size: int, listen: str, config: Config, timeout: float) -> None:
        """UsageError if it cannot open, OperationTimeout if it does not in time."""
        self._session, self._orders, self._news = _spawn()
        try:
            terms = SeedTerms(size, listen, changed_settings(config))
            _write(self._orders, msgspec.json.encode(terms) + b"\n")
            ready = self._hear(timeout)
        except BaseException:
            self._end()
            raise
        self.ticket, self.address, self.pid = ready.ticket, ready.address, ready.pid

    def _hear(self, timeout: float) -> SeedReady:
        line = _read_line(self._news, time.monotonic() + timeout)
        if line is None:
            raise OperationTimeout(operation="nexar.init()", waiting_for="the seed it started", timeout=timeout)
        if not line.endswith(b"\n"):
            raise UsageError("the seed that rank 0 started ended at once; what it wrote is above")
        message = msgspec.json.decode(line, type=SeedReady | SeedFailed)
        if isinstance(message, SeedFailed):
            raise UsageError(f"rank 0 could not open the cluster: {message.reason}")
        return message

    def _close(self) -> None:
        os.close(self._orders)
        os.close(self._news)
        with suppress(ChildProcessError):  # a program that waits for any child, or for none, has taken note already
            os.waitpid(self._session, 0)  # it ended when it had started the seed, or was ended with it

    def _end_after_notice(self) -> None:
        """The seed ends by itself when it has no parent and its cluster does not form. First it tells the other ranks
        why; ended at once it might not, and they would try to reach it until their time is up.
        """
        os.close(self._orders)
        self._orders = os.open(os.devnull, os.O_WRONLY)  # closed with the other pipe
        _read_line(self._news, time.monotonic() + _NOTICE_TIMEOUT)  # it writes no more: the pipe ends with the seed
        self._end()

    def _end(self) -> None:
        with suppress(ProcessLookupError):  # the same program, and the seed has ended by itself
            os.killpg(self._session, signal.SIGKILL)  # while one of the two is there, no other group has this id
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._close()
        else:
            self._end_after_notice()


def _spawn() -> tuple[int, int, int]:
    """The session's id, the pipe to its standard input, the pipe from its standard output. Others inherit neither."""
    orders_in, orders = os.pipe()
    news, news_out = os.pipe()
    try:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", _MODULE],
            inherited(),
            file_actions=[(os.POSIX_SPAWN_DUP2, orders_in, 0), (os.POSIX_SPAWN_DUP2, news_out, 1)],
            setsid=True,  # what is sent to the group of rank 0 is not meant for the seed
        )
    except BaseException:
        os.close(orders)
        os.close(news)
        raise
    finally:
        os.close(orders_in)
        os.close(news_out)
    return pid, orders, news


def _write(pipe: int, line: bytes) -> None:
    while line:
        try:
            line = line[os.write(pipe, line) :]
        except BrokenPipeError:
            return  # it has ended, which the other pipe tells


def _read_line(pipe: int, deadline: float) -> bytes | None:
    """A line; what came before the end of the pipe; None at the deadline."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    line = b""
    while not line.endswith(b"\n"):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return None
        piece = os.read(pipe, 65_536)
        if not piece:
            return line
        line += piece
    return line
