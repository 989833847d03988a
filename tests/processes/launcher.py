"""A launcher in a process of its own, and the scripts it runs. Every wait has a deadline."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

MAIN = Path(__file__).with_name("launcher_main.py")
EVENT_TIMEOUT = 120.0  # seconds: on two cores with ten times as much to do, four ranks need half of it to start


class Launch:
    """`nexar …`, running. Context manager: nothing it started is left."""

    program: Sequence[str] = (sys.executable, str(MAIN))

    def __init__(self, *arguments: object, cwd: Path, prefix: Sequence[str] = (), **variables: str) -> None:
        """`prefix` goes before the command, and ends by executing it: the way into a host."""
        command = [*prefix, *self.program, *(str(argument) for argument in arguments)]
        environment = {name: text for name, text in os.environ.items() if not name.startswith("NEXAR_")}
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.stdout = self.stderr = ""

    def end(self, patience: float = EVENT_TIMEOUT) -> int:
        """Wait for it; what it wrote is in `stdout` and `stderr` then."""
        try:
            self.stdout, self.stderr = self.process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            said = "\n".join(text or "" for text in self.process.communicate(timeout=EVENT_TIMEOUT))
            raise AssertionError(f"{self.process.args} has not ended in {patience} s; it said:\n{said}") from None
        return self.process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        if self.process.stdout is not None and not self.process.stdout.closed:
            self.process.communicate(timeout=EVENT_TIMEOUT)


def without_notices(said: str) -> str:
    """What a command said, but for what it waits for: on a busy machine it says so."""
    lines = said.splitlines(keepends=True)
    return "".join(line for line in lines if not re.search(r"nexar: (waiting (for|until)|no seed answers at) ", line))


def launch(*arguments: object, cwd: Path, **variables: str) -> Launch:
    """Run it to its end."""
    with Launch(*arguments, cwd=cwd, **variables) as running:
        running.end()
    return running


def script(folder: Path, text: str, name: str = "script.py") -> Path:
    """A script of ranks; `rank`, `Path`, `os`, `sys`, `time` and `signal` are there."""
    path = folder / name
    path.write_text(f"import os, signal, sys, time\nfrom pathlib import Path\nrank = int(os.environ['RANK'])\n{text}")
    return path


def await_files(folder: Path, pattern: str, count: int) -> list[Path]:
    """Wait until that many files are there: how ranks say that they have come to a point."""
    deadline = time.monotonic() + EVENT_TIMEOUT
    while len(found := sorted(folder.glob(pattern))) < count:
        assert time.monotonic() < deadline, f"only {found} of {count}"
        time.sleep(0.01)
    return found


def await_gone(pid: int) -> None:
    """Wait until a process has ended; one that only waits to be reaped has."""
    deadline = time.monotonic() + EVENT_TIMEOUT
    while _runs(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
