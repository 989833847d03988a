"""A process that ends the ranks if this one cannot: after kill -9 no handler of ours runs, but the kernel closes pipes.

It is started without the site machinery and imports nothing of ours, so it costs a few milliseconds.
"""

import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from nexar.errors import UsageError

_SCRIPT = Path(__file__).with_name("guard_main.py")
_ENDING = 5.0


class Guard:
    """Knows the process groups of the ranks. Context manager; leaving it sends the guard away, nobody is ended."""

    def __init__(self, mark: str) -> None:
        command = [sys.executable, "-I", "-S", "-E", str(_SCRIPT), mark]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,  # what ends this process's group or terminal does not end the guard
            )
        except OSError as error:
            raise UsageError(
                f"no process can be started to watch over the ranks ({error.strerror or error}); "
                "see the limits of this shell with `ulimit -a`, and raise the one that is too low"
            ) from error

    @property
    def pid(self) -> int:
        """The guard's process id."""
        return self._process.pid

    def watch(self, group: int) -> None:
        """End this group if we die. Call `forget` before its leader is reaped."""
        self._say(f"+{group}\n")

    def forget(self, group: int) -> None:
        """The group has ended; its number may be given to strangers from now on."""
        self._say(f"-{group}\n")

    def close(self) -> None:
        """Send it away. It has ended when this returns. Idempotent."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            self._say("bye\n")
            self._process.stdin.close()
        try:
            self._process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
        except BrokenPipeError:
            return  # somebody killed the guard; the ranks lose nothing but their insurance

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
