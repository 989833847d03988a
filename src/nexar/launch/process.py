"""One rank: a process, the leader of a process group of its own, whose output comes here.

The group is what makes an end complete. Workers that a rank forked belong to its group; when the rank has ended, the
rest of the group is killed *before* the rank is reaped: until then its process id, which names the group, cannot be
given to anybody else.
"""

import fcntl
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path

from nexar.errors import UsageError
from nexar.launch.exit_report import ExitPipe, ExitReport
from nexar.launch.output import STREAMS, Console, Stream, StreamOutput
from nexar.launch.plan import EXIT_PIPE_VARIABLE, RankPlan

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
