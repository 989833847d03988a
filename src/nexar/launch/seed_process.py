"""Rank 0's side of the seed process, and the private file that passes the ticket to the ranks of its host.

Folder (0700) and file (0600) are private, and the file appears whole. It names the seed's process, so the file of a
crashed run is ignored.
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
    """Sent through a pipe, because the settings hold the secret."""

    size: int
    listen: str
    settings: Mapping[str, Any]


class SeedReady(msgspec.Struct, frozen=True, tag="ready"):
    """The seed is open."""

    ticket: str
    address: str
    pid: int


class SeedFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The seed cannot open."""

    reason: str


def changed_settings(config: Config) -> dict[str, Any]:
    """Return the settings that differ from their defaults."""
    values = {setting.name: (getattr(config, setting.name), setting.default) for setting in settings()}
    return {name: value for name, (value, default) in values.items() if value != default}


_MODULE = "nexar.launch.seed_main"
_NOTICE_TIMEOUT = 5.0  # seconds for the seed to tell the other ranks that the cluster does not form


class SeedProcess:
    """A seed in its own session. An error in its block ends it; otherwise it serves until every member has left. It is
    not a child of this process, which would have to reap it.
    """

    def __init__(self, size: int, listen: str, config: Config, timeout: float) -> None:
        """Raise UsageError if the seed cannot open, OperationTimeout at the timeout."""
        self._session, self._stdin, self._stdout = _spawn()
        try:
            terms = SeedTerms(size, listen, changed_settings(config))
            _write(self._stdin, msgspec.json.encode(terms) + b"\n")
            ready = self._read_ready(timeout)
        except BaseException:
            self._end()
            raise
        self.ticket, self.address, self.pid = ready.ticket, ready.address, ready.pid

    def _read_ready(self, timeout: float) -> SeedReady:
        line = _read_line(self._stdout, time.monotonic() + timeout)
        if line is None:
            raise OperationTimeout(operation="nexar.init()", waiting_for="the seed it started", timeout=timeout)
        if not line.endswith(b"\n"):
            raise UsageError("the seed that rank 0 started ended at once; its output is above")
        message = msgspec.json.decode(line, type=SeedReady | SeedFailed)
        if isinstance(message, SeedFailed):
            raise UsageError(f"rank 0 could not open the cluster: {message.reason}")
        return message

    def _close(self) -> None:
        os.close(self._stdin)
        os.close(self._stdout)
        with suppress(ChildProcessError):  # the program may reap any child, or ignore SIGCHLD
            os.waitpid(self._session, 0)  # it exited after it started the seed, or was killed with it

    def _end_after_notice(self) -> None:
        """Without a parent the seed first tells the other ranks why; otherwise they would time out."""
        os.close(self._stdin)
        self._stdin = os.open(os.devnull, os.O_WRONLY)  # closed with the other pipe
        _read_line(
            self._stdout, time.monotonic() + _NOTICE_TIMEOUT
        )  # the seed writes nothing more: the pipe ends with it
        self._end()

    def _end(self) -> None:
        with suppress(
            ProcessLookupError
        ):  # a program that reaps any child may have reaped it, and the seed has ended by itself
            os.killpg(self._session, signal.SIGKILL)  # while one of the two exists, no other group has this id
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
    stdin_read, stdin = os.pipe()
    stdout, stdout_write = os.pipe()
    try:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", _MODULE],
            inherited(),
            file_actions=[(os.POSIX_SPAWN_DUP2, stdin_read, 0), (os.POSIX_SPAWN_DUP2, stdout_write, 1)],
            setsid=True,  # signals to the group of rank 0 must not reach the seed
        )
    except BaseException:
        os.close(stdin)
        os.close(stdout)
        raise
    finally:
        os.close(stdin_read)
        os.close(stdout_write)
    return pid, stdin, stdout


def _write(pipe: int, line: bytes) -> None:
    while line:
        try:
            line = line[os.write(pipe, line) :]
        except BrokenPipeError:
            return  # the seed has ended, as the end of its output pipe shows


def _read_line(pipe: int, deadline: float) -> bytes | None:
    """A line, or the rest before the end of the pipe; None at the deadline."""
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


_POLL_INTERVAL = 0.02


class _TicketFile(msgspec.Struct, frozen=True):
    ticket: str
    seed: int
    """Process id of the seed."""
    started: str
    """When that process started, if the system tells: process ids are reused."""


@contextmanager
def offered_ticket(name: str, ticket: str, seed: int) -> Iterator[None]:
    """Offer the ticket until the block ends."""
    path = _folder() / name
    write_secret_file(path, msgspec.json.encode(_TicketFile(ticket, seed, _started(seed))))
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            path.unlink()


def wait_for_ticket(name: str, timeout: float, tell: Tell | None = None, operation: str = "nexar.init()") -> str:
    """Block until rank 0 offers the ticket. Raise OperationTimeout, which names the user's `operation`."""
    path, deadline = _folder() / name, time.monotonic() + timeout
    waiting_for = "rank 0, which opens the cluster on this host"
    with WaitNotice(tell, lambda: f"waiting for {waiting_for}{seconds_left(deadline)}"):
        while (ticket := _read_ticket_file(path)) is None:
            if time.monotonic() > deadline:
                raise OperationTimeout(operation=operation, waiting_for=waiting_for, timeout=timeout)
            time.sleep(_POLL_INTERVAL)
    return ticket


def folder_identity() -> str:
    """Equal only for processes of one host that share the private folder. UsageError."""
    status = _folder().stat()
    return f"{status.st_dev:x}.{status.st_ino:x}"


def _read_ticket_file(path: Path) -> str | None:
    try:
        note = msgspec.json.decode(read_secret_file(path), type=_TicketFile)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return note.ticket if _started(note.seed) == note.started != "" else None


def _folder() -> Path:
    path = Path(tempfile.gettempdir()) / f"nexar-{os.geteuid()}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise UsageError(
            f"{path} is not private to this user, so no ticket is written there; remove it, set TMPDIR to "
            "another directory for all ranks, or start a seed and set NEXAR_TICKET"
        )
    return path


def _started(pid: int) -> str:
    """Differs for processes that reuse an id; empty: none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return "" if Path("/proc/self/stat").exists() else _alive(pid)
    return "" if fields[0] == "Z" else fields[19]


def _alive(pid: int) -> str:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    return "alive"
