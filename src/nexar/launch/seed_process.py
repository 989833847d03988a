"""What rank 0 and the seed process it starts tell each other: one line each way. Pure.

Rank 0's side of the seed it starts.

A ticket passed from rank 0 to the other ranks of its host, through a file that only this user can reach.

The folder is the user's own (0700) and checked to be; the file (0600) appears whole. It names the process of the seed:
a file that an earlier run left behind after a crash names one that is gone, and is not believed.
"""

import os
import select
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from nexar.cluster.wait_notice import Tell, WaitNotice, seconds_left
from nexar.config import Config, settings
from nexar.environment import inherited
from nexar.errors import OperationTimeout, UsageError
from nexar.security.storage import read_secret_file, write_secret_file


class SeedTerms(msgspec.Struct, frozen=True):
    """To the seed: what to open. It travels through a pipe: the settings hold the secret."""

    size: int
    listen: str
    settings: Mapping[str, Any]


class SeedReady(msgspec.Struct, frozen=True, tag="ready"):
    """From the seed: it is open."""

    ticket: str
    address: str
    pid: int


class SeedFailed(msgspec.Struct, frozen=True, tag="failed"):
    """From the seed: it cannot open, and why."""

    reason: str


def changed_settings(config: Config) -> dict[str, Any]:
    """The settings that differ from their defaults: what makes the same `Config` on the other side."""
    values = {setting.name: (getattr(config, setting.name), setting.default) for setting in settings()}
    return {name: value for name, (value, default) in values.items() if value != default}


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


_LOOK_INTERVAL = 0.02


class _TicketFile(msgspec.Struct, frozen=True):
    ticket: str
    seed: int
    """The process id of the seed."""
    started: str
    """When that process started, as far as the system tells: ids are given out again."""


@contextmanager
def offered_ticket(name: str, ticket: str, seed: int) -> Iterator[None]:
    """Offer the ticket for as long as the block takes."""
    path = _folder() / name
    write_secret_file(path, msgspec.json.encode(_TicketFile(ticket, seed, _started(seed))))
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            path.unlink()


def wait_for_ticket(name: str, timeout: float, tell: Tell | None = None) -> str:
    """Wait for the ticket that rank 0 offers, and `tell` the user so. OperationTimeout if it does not."""
    path, deadline = _folder() / name, time.monotonic() + timeout
    waiting_for = "rank 0, which opens the cluster on this host"
    with WaitNotice(tell, lambda: f"waiting for {waiting_for}{seconds_left(deadline)}"):
        while (ticket := _look(path)) is None:
            if time.monotonic() > deadline:
                raise OperationTimeout(operation="nexar.init()", waiting_for=waiting_for, timeout=timeout)
            time.sleep(_LOOK_INTERVAL)
    return ticket


def folder_identity() -> str:
    """The same for processes of one host that offer and take in one folder, and for no others there. UsageError if the
    folder of this user is not private.
    """
    status = _folder().stat()
    return f"{status.st_dev:x}.{status.st_ino:x}"


def _look(path: Path) -> str | None:
    try:
        note = msgspec.json.decode(read_secret_file(path), type=_TicketFile)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return note.ticket if _started(note.seed) == note.started != "" else None


def _folder() -> Path:
    """The private folder of this user. UsageError if somebody else has made it or can look into it."""
    path = Path(tempfile.gettempdir()) / f"nexar-{os.geteuid()}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise UsageError(
            f"{path} is not a folder of this user alone, so no ticket is put there; remove it, or set TMPDIR to "
            "another place for all ranks, or start a seed and set NEXAR_TICKET"
        )
    return path


def _started(pid: int) -> str:
    """A text that tells this process from others that had or will have its id; empty if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return "" if Path("/proc/self/stat").exists() else _alive(pid)
    return "" if fields[0] == "Z" else fields[19]


def _alive(pid: int) -> str:
    """Where there is no /proc: at least whether it is there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    return "alive"
