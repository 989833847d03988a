"""A ticket passed from rank 0 to the other ranks of its host, through a file that only this user can reach.

The folder is the user's own (0700) and checked to be; the file (0600) appears whole. It names the process of the seed:
a file that an earlier run left behind after a crash names one that is gone, and is not believed.
"""

import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from nexar.cluster.wait_notice import Tell, WaitNotice, seconds_left
from nexar.errors import OperationTimeout, UsageError
from nexar.security.storage import read_secret_file, write_secret_file

_LOOK_INTERVAL = 0.02


class _Note(msgspec.Struct, frozen=True):
    ticket: str
    seed: int
    """The process id of the seed."""
    started: str
    """When that process started, as far as the system tells: ids are given out again."""


@contextmanager
def offered(name: str, ticket: str, seed: int) -> Iterator[None]:
    """Offer the ticket for as long as the block takes."""
    path = _folder() / name
    write_secret_file(path, msgspec.json.encode(_Note(ticket, seed, _started(seed))))
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            path.unlink()


def take(name: str, timeout: float, tell: Tell | None = None) -> str:
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
        note = msgspec.json.decode(read_secret_file(path), type=_Note)
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
