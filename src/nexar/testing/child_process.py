"""A process of ours with a line of messages to it and from it, in which every wait has a deadline.

Its standard output belongs to the messages, its standard error goes to a file and is shown when something went wrong.
It is ended by its process id, never by its name, and it has ended when `end` returns.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import msgspec

_SHOWN_BYTES = 8000  # of standard error
_GRACE = 2.0  # between the polite and the impolite signal


class ChildEnded(Exception):
    """The process ended without saying what was awaited."""


class ChildProcess:
    """`python -m module`, started behind `prefix` (for example `ip netns exec NAME`)."""

    def __init__(self, module: str, prefix: Sequence[str] = ()) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by end()
        command = [*prefix, sys.executable, "-m", module]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0
            )
        except OSError:
            self._errors.close()
            raise
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        self._heard = b""

    @property
    def pid(self) -> int:
        """The process id; that of the Python process, as long as `prefix` execs rather than forks."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    def stderr(self) -> str:
        """The last part of what it wrote there, whatever the process does at the moment."""
        if self._errors.closed:
            return ""
        end = os.fstat(self._errors.fileno()).st_size
        shown = os.pread(self._errors.fileno(), _SHOWN_BYTES, max(0, end - _SHOWN_BYTES))
        return shown.decode(errors="replace").strip()

    def send(self, message: msgspec.Struct, deadline: float) -> None:
        """Raises ChildEnded, or TimeoutError when it does not listen."""
        line = memoryview(msgspec.json.encode(message) + b"\n")
        while line:
            _await(self._stdin.fileno(), select.POLLOUT, deadline, "the process does not read its orders")
            try:
                line = line[self._stdin.write(line) or 0 :]
            except BrokenPipeError:
                raise ChildEnded from None

    def receive(self, deadline: float) -> bytes:
        """The next message. Raises ChildEnded, or TimeoutError."""
        while b"\n" not in self._heard:
            _await(self._stdout.fileno(), select.POLLIN, deadline, "the process said nothing")
            news = self._stdout.read(1 << 16)
            if not news:
                raise ChildEnded
            self._heard += news
        line, _, self._heard = self._heard.partition(b"\n")
        return line

    def fileno(self) -> int:
        """For waiting on several children at once; readable when it said something or ended."""
        return self._stdout.fileno()

    def signal(self, number: int) -> None:
        """Send it a signal; nothing happens if it has ended."""
        self._process.send_signal(number)

    def wait(self, timeout: float) -> int | None:
        """The exit code, None if it still runs at the end of the timeout."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def end(self, timeout: float) -> bool:
        """Give it `timeout` to end by itself, then make it. False: it had to be made. Idempotent."""
        self._stdin.close()
        by_itself = self.wait(timeout) is not None
        if not by_itself:
            self._process.terminate()
            if self.wait(_GRACE) is None:
                self._process.kill()
                self._process.wait()
        self._stdout.close()
        return by_itself

    def forget(self) -> None:
        """Drop what it wrote to standard error; after `end`."""
        self._errors.close()

    def describe_end(self) -> str:
        """How it ended, in words."""
        code = self.wait(_GRACE)  # its pipe closes a moment before it has ended
        if code is None:
            return "closed its output but still runs"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _await(descriptor: int, event: int, deadline: float, complaint: str) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError(complaint)
