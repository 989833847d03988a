"""A process that reports to files as JSON lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_SHOWN_CHARACTERS: Final = 6_000
_DUMP_SECONDS: Final = 1.0  # for a process to dump its stacks


class MemberProcess:
    """A process whose output goes to files. It starts at once."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.started_at = time.monotonic()
        self._stdout_path = folder / f"{name}.out"
        self._stderr_path = folder / f"{name}.err"
        with self._stdout_path.open("wb") as out, self._stderr_path.open("wb") as err:
            self._process = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        self._read_bytes = 0
        self._dumped_at = 0  # bytes read at the last dump

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    def reports(self) -> Iterator[dict[str, Any]]:
        """The reports since the last call."""
        with self._stdout_path.open("rb") as file:
            file.seek(self._read_bytes)
            news = file.read()
        whole = news[: news.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.splitlines():
            yield json.loads(line)

    def send_kill(self) -> None:
        """Does not wait for its end."""
        self._process.kill()

    def kill(self) -> None:
        """Blocks until the process has ended."""
        self._process.kill()
        self._process.wait()

    def terminate(self) -> None:
        self._process.terminate()

    def end(self, timeout: float) -> bool:
        """Waits, and kills the process after the timeout. Returns whether it ended in time. Idempotent."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        return True

    def dump(self) -> bool:
        """Makes the process dump its stacks, once per silence. It has no signal handler before its first report."""
        if self.exit_code is not None or self._dumped_at == self._read_bytes:
            return False
        self._dumped_at = self._read_bytes
        os.kill(self.pid, signal.SIGUSR2)
        return True

    def describe(self) -> str:
        """Its state and the end of its standard error, with its stacks if it runs."""
        if self.dump():
            time.sleep(_DUMP_SECONDS)
        state = "runs" if self.exit_code is None else f"ended with {self.exit_code}"
        return f"{self.name} (process {self.pid}) {state}:\n{self.stderr()[-_SHOWN_CHARACTERS:]}"

    def stderr(self) -> str:
        return self._stderr_path.read_text(errors="replace")
