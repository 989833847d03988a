"""The standard input of the launcher, for rank 0.

A file or a pipe is inherited by the process of rank 0, which reads it directly. A terminal cannot be: ranks are in
process groups of their own, and the system stops a group in the background that reads from its terminal. So the
launcher reads the terminal and passes it on through a pipe.
"""

import os
import selectors
import subprocess
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from nexar.launch.plan import RankPlan

_PIECE_BYTES: Final = 65_536


class StandardInput:
    """Context manager. One thread uses it, which waits with `selector` and calls the data of the keys it returns."""

    def __init__(self, selector: selectors.BaseSelector, source: int = 0) -> None:
        self._selector, self._source = selector, source
        self._pending = b""  # read, and not yet taken by the pipe
        self._pipe: tuple[int, int] | None = None
        if _is_terminal(source):
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            selector.register(source, selectors.EVENT_READ, self._pass_on)

    def descriptor_for(self, plan: RankPlan) -> int:
        """What the process of a rank gets as its standard input: for `Popen`."""
        if plan.rank != 0 or not _is_open(self._source):
            return subprocess.DEVNULL
        return self._source if self._pipe is None else self._pipe[0]

    def _pass_on(self) -> None:
        """The selector says that the terminal can be read, or the pipe written."""
        assert self._pipe is not None
        if self._pending:
            self._write(self._pipe[1])
        elif _is_foreground(self._source):
            self._take(os.read(self._source, _PIECE_BYTES), self._pipe[1])
        else:
            self._selector.unregister(self._source)  # the input is meant for the program in the foreground

    def resume(self) -> None:
        """The launcher may be in the foreground again: read the terminal, if it is not read and has not ended."""
        has_ended = self._pipe is None or self._pipe[1] < 0
        if not has_ended and not self._pending and self._source not in self._selector.get_map():
            self._selector.register(self._source, selectors.EVENT_READ, self._pass_on)

    def _take(self, piece: bytes, pipe: int) -> None:
        self._pending = piece
        if piece:
            self._write(pipe)
        else:
            self._end()

    def _write(self, pipe: int) -> None:
        """The terminal is not read while the pipe is full."""
        with suppress(BlockingIOError):
            self._pending = self._pending[os.write(pipe, self._pending) :]
        registered = self._selector.get_map()
        if self._pending and self._source in registered:
            self._selector.unregister(self._source)
            self._selector.register(pipe, selectors.EVENT_WRITE, self._pass_on)
        elif not self._pending and pipe in registered:
            self._selector.unregister(pipe)
            self._selector.register(self._source, selectors.EVENT_READ, self._pass_on)

    def _end(self) -> None:
        """The user ended the input (Ctrl-D): rank 0 is to see that."""
        self._selector.unregister(self._source)
        assert self._pipe is not None
        os.close(self._pipe[1])
        self._pipe = self._pipe[0], -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for end in self._pipe or ():
            if end >= 0:
                os.close(end)
        self._pipe = None


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _is_terminal(descriptor: int) -> bool:
    return _is_open(descriptor) and os.isatty(descriptor)


def _is_foreground(terminal: int) -> bool:
    """Whether this process may read from it."""
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False  # it is not the terminal that controls this process
