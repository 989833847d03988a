"""A rank tells the launcher that started it which uncaught exception ends it.

The launcher gives each rank the write end of a pipe. A variable names its descriptor, and its inode: a program between
the two that closes descriptors may have given the number to another file. `report_at_exit` writes one line when the
interpreter exits, also where no exception ended it, so the last line counts. An exception of the main thread is
reported at once: threads that go on, or exit handlers, may keep the process. A rank that is killed, is not Python, or
ends before it calls `nexar.init()` writes nothing: its end is its own failure.
"""

from __future__ import annotations

import atexit
import logging
import os
import stat
import sys
import threading
from typing import Final, Literal, TypeAlias

import msgspec

from nexar.environment import take
from nexar.errors import (
    Expelled,
    FormationTimeout,
    JoinRefused,
    MembershipChanged,
    NoQuorum,
    PeerLost,
    Revoked,
    SeedUnreachable,
)
from nexar.launch.plan import EXIT_PIPE_VARIABLE

_log = logging.getLogger(__name__)

Origin: TypeAlias = Literal["own", "consequence", "perhaps_consequence", "too_late", "interrupted"]
"""Why the exception was raised: by the rank itself; because another rank was gone; perhaps because another rank failed,
if one did; because nobody was left who could let a joiner in; by a KeyboardInterrupt.
"""
_CONSEQUENCES: Final = (PeerLost, MembershipChanged)
_PERHAPS: Final = (FormationTimeout, JoinRefused, SeedUnreachable, NoQuorum, Expelled, Revoked)
_MOST_BYTES: Final = 65_536
"""What a pipe holds at least by default: more is not read."""


class ExitReport(msgspec.Struct, frozen=True):
    """How a rank ended, by its own account."""

    exception: str = ""
    """Name of the class; empty: no exception ended the main thread."""
    origin: Origin = "own"


def origin_of(error: BaseException) -> Origin:
    """Decides by the class of the exception and of those that led to it, never by their text."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, JoinRefused) and error.nobody_left:
        return "too_late"
    if _led_by(error, _CONSEQUENCES):
        return "consequence"
    return "perhaps_consequence" if _led_by(error, _PERHAPS) else "own"


def _led_by(error: BaseException | None, kinds: tuple[type[BaseException], ...]) -> bool:
    """Whether it is of one of these kinds, or was raised from one, or while one was handled; a group: all of it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, kinds):
            return True
        if isinstance(error, BaseExceptionGroup):
            return all(_led_by(each, kinds) for each in error.exceptions)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


# -- the rank ----------------------------------------------------------------------------------------------------------


def report_at_exit() -> None:
    """Tell the launcher at exit. Takes the variable out of the environment: programs that this one starts are not the
    rank. Without a launcher, and when it is called again, nothing happens.
    """
    pipe = _usable(take(EXIT_PIPE_VARIABLE))
    if pipe is None:
        return
    os.set_inheritable(pipe, False)
    process = os.getpid()
    atexit.register(lambda: _tell(pipe) if os.getpid() == process else None)  # a forked child is not the rank
    threading.Thread(target=_tell_at_once, args=(pipe,), name="nexar-exit-report", daemon=True).start()


def _tell_at_once(pipe: int) -> None:
    """In a thread of its own: the interpreter waits for other threads before it calls exit handlers."""
    threading.main_thread().join()  # the interpreter ends this wait when it begins to exit
    if getattr(sys, "last_value", None) is not None:
        _tell(pipe)


def _usable(text: str) -> int | None:
    """The descriptor, if it still is the pipe of the launcher."""
    try:
        descriptor, inode = (int(part) for part in text.split(":"))
        status = os.fstat(descriptor)
    except (ValueError, OSError):
        return None
    return descriptor if stat.S_ISFIFO(status.st_mode) and status.st_ino == inode else None


def _tell(pipe: int) -> None:
    error: BaseException | None = getattr(sys, "last_value", None)
    report = ExitReport() if error is None else ExitReport(type(error).__name__, origin_of(error))
    try:
        os.write(pipe, msgspec.json.encode(report) + b"\n")  # shorter than PIPE_BUF: whole, and without waiting
    except OSError as failure:
        _log.info("the launcher cannot be told how this rank ends: %s", failure)


# -- the launcher ------------------------------------------------------------------------------------------------------


class ExitPipe:
    """The launcher's side, for one rank. Close it."""

    def __init__(self) -> None:
        self._read, self.write_end = os.pipe()
        self._last: ExitReport | None = None
        os.set_blocking(self._read, False)
        os.set_blocking(self.write_end, False)  # for the rank too: it never waits for its launcher

    @property
    def variable(self) -> str:
        """What the rank finds in its environment."""
        return f"{self.write_end}:{os.fstat(self.write_end).st_ino}"

    def close_write_end(self) -> None:
        """The rank has its own. Idempotent."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def fileno(self) -> int:
        """Readable when the rank has said something, or has closed its end."""
        return self._read

    def take(self) -> ExitReport | None:
        """What the rank said last. Never waits; None: nothing that can be read."""
        try:
            lines = os.read(self._read, _MOST_BYTES).splitlines()
            if lines:
                self._last = msgspec.json.decode(lines[-1], type=ExitReport)
        except (BlockingIOError, msgspec.DecodeError):
            pass
        return self._last

    def close(self) -> None:
        """Idempotent."""
        self.close_write_end()
        if self._read >= 0:
            os.close(self._read)
            self._read = -1
