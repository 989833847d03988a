"""The processes of ranks, and the launcher's standard input, which rank 0 reads.

The system stops a background process group that reads from the terminal, so the launcher forwards it to rank 0 through
a pipe. Each rank leads a process group with the workers it forks. When a rank has ended, the group is killed *before*
the rank is reaped: until then the group's id cannot be reused.
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
    """For the thread that waits with `selector` and calls the data of its keys."""

    def __init__(self, selector: selectors.BaseSelector, source: int = 0) -> None:
        self._selector, self._source = selector, source
        self._pending = b""  # read, and not yet written to the pipe
        self._pipe: tuple[int, int] | None = None
        if _is_terminal(source):
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            selector.register(source, selectors.EVENT_READ, self._forward)

    def descriptor_for(self, plan: RankPlan) -> int:
        if plan.rank != 0 or not _is_open(self._source):
            return subprocess.DEVNULL
        return self._source if self._pipe is None else self._pipe[0]

    def _forward(self) -> None:
        assert self._pipe is not None
        if self._pending:
            self._write(self._pipe[1])
        elif _is_foreground(self._source):
            self._take(os.read(self._source, _INPUT_BYTES), self._pipe[1])
        else:
            self._selector.unregister(self._source)  # the input is for the program in the foreground

    def resume(self) -> None:
        """The launcher may be in the foreground again."""
        has_ended = self._pipe is None or self._pipe[1] < 0
        if not has_ended and not self._pending and self._source not in self._selector.get_map():
            self._selector.register(self._source, selectors.EVENT_READ, self._forward)

    def _take(self, piece: bytes, pipe: int) -> None:
        self._pending = piece
        if piece:
            self._write(pipe)
        else:
            self._end()

    def _write(self, pipe: int) -> None:
        with suppress(BlockingIOError):
            self._pending = self._pending[os.write(pipe, self._pending) :]
        registered = self._selector.get_map()
        if self._pending and self._source in registered:
            self._selector.unregister(self._source)
            self._selector.register(pipe, selectors.EVENT_WRITE, self._forward)
        elif not self._pending and pipe in registered:
            self._selector.unregister(pipe)
            self._selector.register(self._source, selectors.EVENT_READ, self._forward)

    def _end(self) -> None:
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
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False  # not the controlling terminal of this process


_PIECE_BYTES = 65_536


class RankProcess:
    """A started rank. Owns its pipes and log files."""

    def __init__(
        self, plan: RankPlan, console: Console | None, log_dir: Path | None, stdin: int = subprocess.DEVNULL
    ) -> None:
        """UsageError if it cannot be started."""
        self.plan = plan
        self.outputs: dict[Stream, StreamOutput] = {}
        self.exit_pipe = ExitPipe()
        self.raised_at = inf
        """When it reported an exception of its own (time.monotonic); infinite: it has not."""
        self.failed = False
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
        """Also the id of its group."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None until reaped; negative: the signal that ended it."""
        return self._process.returncode

    def reap(self, before: Callable[[int], None]) -> bool:
        """Return whether it has ended. If so, kill its group, call `before` with the group's id, and reap it. Never
        block.
        """
        if self.returncode is not None:
            return True
        if not self._has_ended():
            return False
        self._end_group()
        before(self.pid)
        self._process.wait()
        return True

    def _has_ended(self) -> bool:
        if not hasattr(os, "waitid"):  # macOS before Python 3.13: reaped a moment too early
            return self._process.poll() is not None
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _end_group(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return  # the group is empty; macOS raises PermissionError for a group of zombies

    def signal(self, number: int) -> None:
        """To its group, unless reaped."""
        if self.returncode is None:
            try:
                os.killpg(self.pid, number)
            except PermissionError:  # macOS, for a group of zombies
                return

    def ask(self, number: int) -> bool:
        """Signal it alone if it has a handler. Return whether it has."""
        if self.returncode is not None or not _catches(self.pid, number):
            return False
        os.kill(self.pid, number)
        return True

    def read(self, stream: Stream) -> bytes | None:
        """None: nothing is available; empty: the stream has ended."""
        try:
            piece = os.read(self.pipes[stream], _PIECE_BYTES)
        except BlockingIOError:
            return None
        if piece:
            self.outputs[stream].feed(piece)
        return piece

    def drain(self) -> None:
        """Read available output; after the reap, all that its group wrote. The amount is fixed first: a process that
        left the group may write faster than this reads.
        """
        for stream, pipe in self.pipes.items():
            left = _readable_bytes(pipe)
            while left > 0 and (piece := self.read(stream)):
                left -= len(piece)

    def exit_report(self) -> ExitReport:
        return self.exit_pipe.take() or ExitReport()

    def close(self) -> None:
        """After the reap. Idempotent."""
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
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def _not_started(plan: RankPlan, error: OSError) -> UsageError:
    reason = error.strerror or str(error)
    return UsageError(f"{plan.name} cannot be started: {error.filename or plan.command[0]}: {reason}")
