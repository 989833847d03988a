"""Addresses of shared-memory listeners, shm://<node>:<key>@<path>, and the private directory of their socket.

The socket has a path because the kernel checks the directory's mode before a byte arrives. Any user of the network
namespace could reach, flood or take an abstract name.

The owner holds a lock (flock) on the directory, which the kernel drops when the owner dies. So the next listener
removes unlocked directories as stale.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from nexar.types import format_node, parse_node

SCHEME: Final = "shm"
_START: Final = f"{SCHEME}://"


@dataclass(frozen=True, slots=True)
class ShmAddress:
    """Where a node listens, and the key to dial it."""

    node: int
    path: str
    key: bytes | None = field(default=None, repr=False)

    @property
    def shown(self) -> str:
        """The address without the key, for logs."""
        return f"{_START}{format_node(self.node)}@{self.path}"

    @property
    def secret(self) -> str:
        """The address with the key, for one peer."""
        key = "" if self.key is None else f":{self.key.hex()}"
        return f"{_START}{format_node(self.node)}{key}@{self.path}"


def parse_shm_address(text: str) -> ShmAddress:
    """Parse `secret` or `shown`. Raises ValueError, which does not quote the key."""
    credentials, at, path = text.removeprefix(_START).partition("@")
    node, _, key = credentials.partition(":")
    if not text.startswith(_START) or not at or not path:
        raise ValueError(f"not an address of the form {_START}NODE:KEY@PATH")
    return ShmAddress(parse_node(node), path, bytes.fromhex(key) if key else None)


def listen_directory(text: str) -> str | None:
    """Return the directory in `shm://DIRECTORY` or `DIRECTORY`, None if empty."""
    return text.removeprefix(_START).removeprefix(f"{SCHEME}:") or None


_PREFIX: Final = "nexar-shm-"
_SOCKET: Final = "s"
_PATH_BYTES: Final = 107  # size of sockaddr_un without the final zero
_NAME_BYTES: Final = len(_PREFIX) + 8 + len("//s")
_ATTEMPTS: Final = 16


@dataclass(slots=True)
class SocketDirectory:
    """A locked directory, and the socket's path in it."""

    directory: Path
    lock: int

    @property
    def socket_path(self) -> str:
        return str(self.directory / _SOCKET)

    def remove(self) -> None:
        _delete(self.directory)
        os.close(self.lock)

    def abandon(self) -> None:
        """In a forked child: a copy of the descriptor would keep the parent's lock."""
        os.close(self.lock)


def make_socket_directory(base: str | None) -> SocketDirectory:
    """Make a private directory in `base` or the temporary directory; remove stale ones. Raises OSError."""
    parent = _parent(base)
    remove_stale(parent)
    for _ in range(_ATTEMPTS):
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # mode 0700
        lock = _lock(directory)
        if lock is not None:
            return SocketDirectory(directory, lock)
    raise OSError(errno.EAGAIN, f"another process removes each new directory below {parent}")


def why_not_ours(path: str) -> str | None:
    """Return why a socket must not be dialed; None if a listener of this user made its directory."""
    socket_path = Path(path)
    directory = socket_path.parent
    is_listener = socket_path.name == _SOCKET and directory.name.startswith(_PREFIX) and directory.is_absolute()
    if not is_listener or "\0" in path:  # the kernel reads a path up to the NUL
        return "it is not the socket of a listener of nexar"
    if os.path.lexists(directory) and not _is_ours(directory):  # if it is missing, the dial fails anyway
        return f"{directory} is not a private directory of this user"
    return None


def _parent(base: str | None) -> Path:
    for parent in (base,) if base is not None else (tempfile.gettempdir(), "/tmp"):
        if len(os.fsencode(parent)) + _NAME_BYTES <= _PATH_BYTES:
            return Path(parent)
    raise OSError(errno.ENAMETOOLONG, f"the path of a socket below it would exceed {_PATH_BYTES} bytes", base)


def _lock(directory: Path) -> int | None:
    """Return a descriptor that holds the lock; None if locked or gone."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A sweep may have removed it before it was locked: compare with what is there now.
        if os.path.samestat(os.fstat(descriptor), os.stat(directory, follow_symlinks=False)):
            return descriptor
    except OSError:
        os.close(descriptor)
        return None
    os.close(descriptor)
    return None


def remove_stale(parent: Path) -> None:
    """Remove the directories of dead listeners of this user."""
    for directory in parent.glob(f"{_PREFIX}*"):
        if not _is_ours(directory):
            continue
        lock = _lock(directory)
        if lock is not None:
            _delete(directory)
            os.close(lock)


def _is_ours(directory: Path) -> bool:
    try:
        facts = directory.lstat()
    except OSError:
        return False  # removed since it was listed
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and stat.S_IMODE(facts.st_mode) == 0o700


def _delete(directory: Path) -> None:
    (directory / _SOCKET).unlink(missing_ok=True)
    try:
        directory.rmdir()
    except OSError:
        return  # somebody else put something in, or removed it first
