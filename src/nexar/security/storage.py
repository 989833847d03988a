"""Secrets and other private things in files: only their owner can read them, and they are there whole or not at all.

The content is written to a new file beside the old one, brought to the disk and then given its name in one step, so
neither a crash nor a reader ever meets half of it. Whoever may not read the file now must not have been able to at any
time before: it is born with its mode.
"""

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
    """Put `content` into the file, for its owner alone (0600), instead of what it held. Directories that are missing
    are made for their owner alone (0700). When this returns, not even a crash of the machine undoes it; when it raises
    (OSError), the file holds the old content or the new, and nothing else is left."""
    write_private_file(path, content, lasting=True)
    _sync_directory(path.parent)


def write_private_file(path: Path, content: bytes, *, lasting: bool = False) -> None:
    """The same for what need not outlive a crash of the machine, unless it is `lasting`: it does not wait for the
    disk."""
    with private_file(path, lasting=lasting) as file:
        file.write(content)


@contextmanager
def private_file(path: Path, *, lasting: bool = False) -> Iterator[BinaryIO]:
    """The same for what is written piece by piece, in the block. If that raises, the old content stays."""
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
    """What the file holds. UsageError, naming the remedy, if anybody but its owner can read or change it, or if its
    owner is neither this user nor root; OSError, such as FileNotFoundError, as from `open`."""
    with open_nonblocking(path) as file:
        _check_private(path, os.fstat(file.fileno()))  # of what is open: the name may have another file by now
        return file.read()


def check_directory(directory: Path) -> None:
    """UsageError, naming the remedy, if others could put files into a directory that exists, or its owner is neither
    this user nor root. Nothing to check where there is none: it will be made for its owner alone.
    """
    try:
        status = directory.stat()
    except FileNotFoundError:
        return
    mode, quoted = stat.S_IMODE(status.st_mode), shlex.quote(str(directory))
    if not stat.S_ISDIR(status.st_mode):
        return  # whoever reads or writes in it is told
    if mode & 0o022:
        raise UsageError(f"others can replace files in {directory} (mode {mode:04o}); chmod 700 {quoted}")
    if status.st_uid not in {os.geteuid(), 0}:
        remedy = f"chown {os.geteuid()} {quoted}"
        raise UsageError(f"{directory} belongs to user {status.st_uid}, who can replace its files; {remedy}")


def open_nonblocking(path: Path) -> BinaryIO:
    """To be read, and closed. A pipe without a writer holds nobody up: look what is open (fstat) before reading."""

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
    """The name of a file is its directory's content."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
