"""The standard input of the launcher, for rank 0.

A file or a pipe is inherited by the process of rank 0, which reads it directly. A terminal cannot be: ranks are in
process groups of their own, and the system stops a group in the background that reads from its terminal. So the
launcher reads the terminal and passes it on through a pipe.

One rank: a process, the leader of a process group of its own, whose output comes here.

The group is what makes an end complete. Workers that a rank forked belong to its group; when the rank has ended, the
rest of the group is killed *before* the rank is reaped: until then its process id, which names the group, cannot be
given to anybody else.
"""

import fcntl
import os
import selectors
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from nexar.errors import UsageError
from nexar.launch.exit_report import ExitPipe, ExitReport
from nexar.launch.output import STREAMS, Console, Stream, StreamOutput
from nexar.launch.plan import EXIT_PIPE_VARIABLE, RankPlan

_INPUT_BYTES: Final = 65_536


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
            self._take(os.read(self._source, _INPUT_BYTES), self._pipe[1])
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


_PIECE_BYTES = 65_536


class RankProcess:
    """A started rank. Ends by itself, or by `signal`; owns its pipes and log files until `close`."""

    def __init__(
        self, plan: RankPlan, console: Console | None, log_dir: Path | None, stdin: int = subprocess.DEVNULL
    ) -> None:
        """`stdin`: as for `Popen`."""
        self.plan = plan
        self.outputs: dict[Stream, StreamOutput] = {}
        self.exit_pipe = ExitPipe()
        self.raised_at = inf
        """When it told of an exception of its own (time.monotonic); infinite: it has not."""
        self.failed = False
        """Whether it counts as failed."""
        try:
            for stream in STREAMS:
                self.outputs[stream] = StreamOutput(plan, stream, console, log_dir)
            self._process = subprocess.Popen(
                plan.command,
                env={**plan.environment, EXIT_PIPE_VARIABLE: self.exit_pipe.variable},
                pass_fds=(self.exit_pipe.write_end,),
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                process_group=0,
            )
        except OSError as error:
            self._close_outputs()
            self.exit_pipe.close()
            raise _not_started(plan, error) from error
        self.exit_pipe.close_write_end()
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.pipes: Mapping[Stream, int] = {
            "stdout": self._process.stdout.fileno(),
            "stderr": self._process.stderr.fileno(),
        }
        for pipe in self.pipes.values():
            os.set_blocking(pipe, False)

    @property
    def pid(self) -> int:
        """Its process id, and that of its group."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None until it was reaped; negative: the signal that ended it."""
        return self._process.returncode

    def reap(self, before: Callable[[int], None]) -> bool:
        """Whether it has ended. If so its group is ended too, `before` is told the group, and then it is reaped."""
        if self.returncode is not None:
            return True
        if not self._has_ended():
            return False
        self._end_group()
        before(self.pid)
        self._process.wait()
        return True

    def _has_ended(self) -> bool:
        if not hasattr(os, "waitid"):  # macOS before Python 3.13: reaped a moment too early, and the moment is short
            return self._process.poll() is not None
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _end_group(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return  # nobody is left in it; macOS calls a group of zombies not permitted

    def signal(self, number: int) -> None:
        """Send a signal to its whole group; nothing once it was reaped."""
        if self.returncode is None:
            try:
                os.killpg(self.pid, number)
            except PermissionError:  # macOS, of a group of zombies
                return

    def ask(self, number: int) -> bool:
        """Send a signal to it alone, if it has a handler: whether it has. Workers that it forked are not meant."""
        if self.returncode is not None or not _catches(self.pid, number):
            return False
        os.kill(self.pid, number)
        return True

    def read(self, stream: Stream) -> bytes | None:
        """Take what is there now and pass it on: None, nothing; empty: the stream has ended."""
        try:
            piece = os.read(self.pipes[stream], _PIECE_BYTES)
        except BlockingIOError:
            return None
        if piece:
            self.outputs[stream].feed(piece)
        return piece

    def drain(self) -> None:
        """Take what is there now. Once it was reaped that is all that its group wrote: the group is gone with it.

        A process that left the group may still hold the pipe, and write faster than it is read here.
        """
        for stream, pipe in self.pipes.items():
            left = _readable_bytes(pipe)
            while left > 0 and (piece := self.read(stream)):
                left -= len(piece)

    def exit_report(self) -> ExitReport:
        """How it ends, by its own account so far. A rank that said nothing fails by itself."""
        return self.exit_pipe.take() or ExitReport()

    def close(self) -> None:
        """Close pipes and files; after it was reaped. Idempotent."""
        self._close_outputs()
        self.exit_pipe.close()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _close_outputs(self) -> None:
        for output in self.outputs.values():
            output.close()


def _readable_bytes(pipe: int) -> int:
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def _catches(process: int, number: int) -> bool:
    """Whether a process has a handler for a signal, so far as the system tells."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def _not_started(plan: RankPlan, error: OSError) -> UsageError:
    reason = error.strerror or str(error)
    return UsageError(f"{plan.name} cannot be started: {error.filename or plan.command[0]}: {reason}")
