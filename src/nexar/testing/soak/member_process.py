"""A process of a soak, with what it says in files. It is ended by its process id, and has ended when `end` returns."""

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
_DUMP_SECONDS: Final = 1.0  # for a process to write where its threads are


class MemberProcess:
    """Started at once."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.started_at = time.monotonic()
        self._said = folder / f"{name}.out"
        self._complained = folder / f"{name}.err"
        with self._said.open("wb") as out, self._complained.open("wb") as err:
            self._process = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        self._read_bytes = 0
        self._dumped_at = 0  # how much had been read then

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    def reports(self) -> Iterator[dict[str, Any]]:
        """What it said since this was last asked; whole lines."""
        with self._said.open("rb") as said:
            said.seek(self._read_bytes)
            news = said.read()
        whole = news[: news.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.splitlines():
            yield json.loads(line)

    def kill(self) -> None:
        """At once, without a word."""
        self._process.kill()
        self._process.wait()

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def end(self, timeout: float) -> bool:
        """Whether it ended by itself in time; it has ended afterwards in any case. Idempotent."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        return True

    def dump(self) -> bool:
        """Let it write where its threads are, once while it is silent; not before it knows the signal."""
        if self.exit_code is not None or self._dumped_at == self._read_bytes:
            return False
        self._dumped_at = self._read_bytes
        os.kill(self.pid, signal.SIGUSR2)
        return True

    def tell(self) -> str:
        """How it is, where its threads are if it runs, and the last that it wrote to standard error."""
        if self.dump():
            time.sleep(_DUMP_SECONDS)
        state = "runs" if self.exit_code is None else f"ended with {self.exit_code}"
        return f"{self.name} (process {self.pid}) {state}:\n{self.complaints()[-_SHOWN_CHARACTERS:]}"

    def complaints(self) -> str:
        """All that it wrote to standard error."""
        return self._complained.read_text(errors="replace")
