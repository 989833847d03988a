"""Private files: only the owner can read them, and replacing the content is atomic."""

from __future__ import annotations

import os
import shlex
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from nexar.errors import UsageError


def write_secret_file(path: Path, content: bytes) -> None:
    """Write with mode 0600; missing directories get 0700. Durable on return.

    On OSError the file holds the old or the new content, and no temporary file remains.
    """
    write_private_file(path, content, lasting=True)
    _sync_directory(path.parent)


def write_private_file(path: Path, content: bytes, *, lasting: bool = False) -> None:
    """As `write_secret_file`, but only `lasting` content survives a crash of the machine."""
    with private_file(path, lasting=lasting) as file:
        file.write(content)


@contextmanager
def private_file(path: Path, *, lasting: bool = False) -> Iterator[BinaryIO]:
    """As `write_private_file`, at the end of the block. If the block raises, the old content stays."""
    _make_directory(path.parent)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_secret_file(path: Path) -> bytes:
    """Raise UsageError with the remedy if others can read or change the file, or own it (root may); OSError as
    `open`.
    """
    with open_nonblocking(path) as file:
        _check_private(path, os.fstat(file.fileno()))  # of the open file: the name may refer to another by now
        return file.read()


def check_directory(directory: Path) -> None:
    """Raise UsageError with the remedy if others can put files into the directory, or own it (root may). A missing
    directory passes.
    """
    try:
        status = directory.stat()
    except FileNotFoundError:
        return
    mode, quoted = stat.S_IMODE(status.st_mode), shlex.quote(str(directory))
    if not stat.S_ISDIR(status.st_mode):
        return  # reading or writing in it raises
    if mode & 0o022:
        raise UsageError(f"others can replace files in {directory} (mode {mode:04o}); chmod 700 {quoted}")
    if status.st_uid not in {os.geteuid(), 0}:
        remedy = f"chown {os.geteuid()} {quoted}"
        raise UsageError(f"{directory} belongs to user {status.st_uid}, who can replace its files; {remedy}")


def open_nonblocking(path: Path) -> BinaryIO:
    """Open without blocking, even a pipe without a writer. Check the open file (fstat) before reading."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    return open(path, "rb", opener=opener)


def _check_private(path: Path, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path} is not a regular file; keep the secret in one with mode 0600")
    if mode & 0o077:
        raise UsageError(
            f"{path} can be read or changed by others (mode {mode:04o}); chmod 600 {shlex.quote(str(path))}"
        )
    if status.st_uid not in {os.geteuid(), 0}:
        remedy = f"chown {os.geteuid()} {shlex.quote(str(path))}"
        raise UsageError(f"{path} belongs to user {status.st_uid}, who can read and change it; {remedy}")


def _make_directory(directory: Path) -> None:
    if not directory.is_dir():
        _make_directory(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)


def _sync_directory(directory: Path) -> None:
    # A file's name is content of its directory.
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
