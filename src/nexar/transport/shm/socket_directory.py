"""shm://<listener's node>:<key>@<path of its socket>. The key makes it a secret of the two nodes; `shown` leaves it
out.

Where a listener's socket lies: a directory of its own that only its user can enter.

A path, not an abstract name. Who may reach a path is decided by the kernel from the directory's mode, before a byte
arrives; an abstract name can be reached, flooded, or taken first, by every user of the network namespace. Processes
see each other by path when they share a file system, by abstract name when they share a network; containers that share
neither use network carriers, and so do those that share only the network.

The directory is locked (flock) by its owner for as long as it lives; the kernel drops the lock however the owner dies.
So an unlocked directory is a dead one's, in whatever process namespace it ran, and the next listener removes it.
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
    """Where a node listens, and what proves that one may dial it."""

    node: int
    path: str
    key: bytes | None = field(default=None, repr=False)

    @property
    def shown(self) -> str:
        """For people and logs."""
        return f"{_START}{format_node(self.node)}@{self.path}"

    @property
    def secret(self) -> str:
        """For the one peer it is meant for."""
        key = "" if self.key is None else f":{self.key.hex()}"
        return f"{_START}{format_node(self.node)}{key}@{self.path}"


def parse_shm_address(text: str) -> ShmAddress:
    """The address that `secret` or `shown` wrote. ValueError, which does not quote the key."""
    credentials, at, path = text.removeprefix(_START).partition("@")
    node, _, key = credentials.partition(":")
    if not text.startswith(_START) or not at or not path:
        raise ValueError(f"not an address of the form {_START}NODE:KEY@PATH")
    return ShmAddress(parse_node(node), path, bytes.fromhex(key) if key else None)


def listen_directory(text: str) -> str | None:
    """The directory that `listen` is asked for by `shm://DIRECTORY` or `DIRECTORY`; None: the transport chooses."""
    return text.removeprefix(_START).removeprefix(f"{SCHEME}:") or None


_PREFIX: Final = "nexar-shm-"
_SOCKET: Final = "s"
_PATH_BYTES: Final = 107  # of sockaddr_un, less the closing zero
_NAME_BYTES: Final = len(_PREFIX) + 8 + len("//s")
_ATTEMPTS: Final = 16


@dataclass(slots=True)
class SocketDirectory:
    """A locked directory, and the socket's path in it."""

    directory: Path
    lock: int

    @property
    def socket_path(self) -> str:
        """Where to bind."""
        return str(self.directory / _SOCKET)

    def remove(self) -> None:
        """Delete it and let go of the lock."""
        _delete(self.directory)
        os.close(self.lock)

    def abandon(self) -> None:
        """In a forked child: the directory is the parent's, and so is the lock, which a copy would keep."""
        os.close(self.lock)


def make_socket_directory(base: str | None) -> SocketDirectory:
    """A new private directory below `base` (default: where temporary files go), after sweeping dead ones away.
    OSError.
    """
    parent = _parent(base)
    remove_stale(parent)
    for _ in range(_ATTEMPTS):
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # mode 0700
        lock = _lock(directory)
        if lock is not None:
            return SocketDirectory(directory, lock)
    raise OSError(errno.EAGAIN, f"somebody removes each new directory below {parent}")


def why_not_ours(path: str) -> str | None:
    """Why a socket that a peer offers is not to be dialed; None: it lies in a directory that a listener of this user
    made. Whoever else can write there could put anything in its place.
    """
    socket_path = Path(path)
    directory = socket_path.parent
    is_listener = socket_path.name == _SOCKET and directory.name.startswith(_PREFIX) and directory.is_absolute()
    if not is_listener or "\0" in path:  # the kernel reads a path up to there
        return "it is not the socket of a listener of nexar"
    if os.path.lexists(directory) and not _is_ours(directory):  # where there is none, the dial finds nobody
        return f"{directory} is not a private directory of this user"
    return None


def _parent(base: str | None) -> Path:
    for parent in (base,) if base is not None else (tempfile.gettempdir(), "/tmp"):
        if len(os.fsencode(parent)) + _NAME_BYTES <= _PATH_BYTES:
            return Path(parent)
    raise OSError(errno.ENAMETOOLONG, f"the path of a socket below it would exceed {_PATH_BYTES} bytes", base)


def _lock(directory: Path) -> int | None:
    """A descriptor that holds the directory's lock; None if it is not ours to lock, or gone."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between its making and its locking a sweep may have removed it: what is locked must still be what is there.
        if os.path.samestat(os.fstat(descriptor), os.stat(directory, follow_symlinks=False)):
            return descriptor
    except OSError:
        os.close(descriptor)
        return None
    os.close(descriptor)
    return None


def remove_stale(parent: Path) -> None:
    """Remove what dead listeners of this user left."""
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
        return False  # gone since it was listed
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and stat.S_IMODE(facts.st_mode) == 0o700


def _delete(directory: Path) -> None:
    (directory / _SOCKET).unlink(missing_ok=True)
    try:
        directory.rmdir()
    except OSError:
        return  # somebody else put something in, or removed it first
