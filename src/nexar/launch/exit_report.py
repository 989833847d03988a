"""Reports to the launcher, through a pipe, which uncaught exception ends a rank.

A variable names descriptor and inode, because a program in between may have reused the number. The last line counts. A
rank writes one at exit, and one at once for an exception of the main thread: other threads may keep the process
running. A rank that writes nothing (killed, not Python, before `nexar.init()`) failed by itself.
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
"""Why the exception was raised: by the rank itself; because a rank was gone; perhaps because a rank failed, if one did;
because no member was left to admit a joiner; by a KeyboardInterrupt.
"""
_CONSEQUENCES: Final = (PeerLost, MembershipChanged)
_PERHAPS_CONSEQUENCES: Final = (FormationTimeout, JoinRefused, SeedUnreachable, NoQuorum, Expelled, Revoked)
_MOST_BYTES: Final = 65_536
"""A pipe holds at least this much by default; more is not read."""


class ExitReport(msgspec.Struct, frozen=True):
    """How a rank ended, as it reports itself."""

    exception: str = ""
    """Name of the class; empty: no exception ended the main thread."""
    origin: Origin = "own"


def origin_of(error: BaseException) -> Origin:
    """Decides by the classes of the exception and its causes, not by text."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, JoinRefused) and error.nobody_left:
        return "too_late"
    if _caused_by(error, _CONSEQUENCES):
        return "consequence"
    return "perhaps_consequence" if _caused_by(error, _PERHAPS_CONSEQUENCES) else "own"


def _caused_by(error: BaseException | None, kinds: tuple[type[BaseException], ...]) -> bool:
    """Whether it is one of these kinds, or was raised from or while handling one. Of a group, all members must be."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, kinds):
            return True
        if isinstance(error, BaseExceptionGroup):
            return all(_caused_by(each, kinds) for each in error.exceptions)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


# -- rank
# ----------------------------------------------------------------------------------------------------------------


def report_at_exit() -> None:
    """Idempotent. Remove the variable: child programs are not the rank."""
    pipe = _usable(take(EXIT_PIPE_VARIABLE))
    if pipe is None:
        return
    os.set_inheritable(pipe, False)
    process = os.getpid()
    atexit.register(lambda: _write_report(pipe) if os.getpid() == process else None)  # a forked child is not the rank
    threading.Thread(target=_report_main_thread, args=(pipe,), name="nexar-exit-report", daemon=True).start()


def _report_main_thread(pipe: int) -> None:
    """The interpreter waits for other threads before it calls exit handlers."""
    threading.main_thread().join()  # the interpreter ends this wait when it begins to exit
    if getattr(sys, "last_value", None) is not None:
        _write_report(pipe)


def _usable(text: str) -> int | None:
    try:
        descriptor, inode = (int(part) for part in text.split(":"))
        status = os.fstat(descriptor)
    except (ValueError, OSError):
        return None
    return descriptor if stat.S_ISFIFO(status.st_mode) and status.st_ino == inode else None


def _write_report(pipe: int) -> None:
    error: BaseException | None = getattr(sys, "last_value", None)
    report = ExitReport() if error is None else ExitReport(type(error).__name__, origin_of(error))
    try:
        os.write(pipe, msgspec.json.encode(report) + b"\n")  # shorter than PIPE_BUF: whole, and without blocking
    except OSError as failure:
        _log.info("cannot report to the launcher how this rank ends: %s", failure)


# -- launcher
# ------------------------------------------------------------------------------------------------------------


class ExitPipe:
    """The launcher's side, for one rank."""

    def __init__(self) -> None:
        self._read, self.write_end = os.pipe()
        self._last: ExitReport | None = None
        os.set_blocking(self._read, False)
        os.set_blocking(self.write_end, False)  # for the rank too: it never waits for its launcher

    @property
    def variable(self) -> str:
        return f"{self.write_end}:{os.fstat(self.write_end).st_ino}"

    def close_write_end(self) -> None:
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def fileno(self) -> int:
        return self._read

    def take(self) -> ExitReport | None:
        """Return the last readable report. Never block."""
        try:
            lines = os.read(self._read, _MOST_BYTES).splitlines()
            if lines:
                self._last = msgspec.json.decode(lines[-1], type=ExitReport)
        except (BlockingIOError, msgspec.DecodeError):
            pass
        return self._last

    def close(self) -> None:
        self.close_write_end()
        if self._read >= 0:
            os.close(self._read)
            self._read = -1
