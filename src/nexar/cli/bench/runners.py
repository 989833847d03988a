"""The ranks of one system, running: started once, told what to measure, ended when the run is over."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Final, Self

from nexar.cli.bench.order import Order, Reply, parse_hello, parse_reply
from nexar.cli.bench.plans import Plan

_FORMATION: Final = 90.0
_ENDING: Final = 10.0
_TAIL_LINES: Final = 15


class SystemFailed(Exception):
    """A system's ranks did not come, or died, or did not answer in time; the text says which, and what they wrote."""


class Runners:
    """A `with` block in which a system's ranks wait for orders. Leaving it ends all of its processes."""

    def __init__(self, plan: Plan, ranks: int, *, path: str, environment: Mapping[str, str], folder: Path) -> None:
        """`path`: the Unix socket that its ranks will connect to; `folder`: where their output is kept meanwhile."""
        self.plan = plan
        self.version = ""
        self._ranks = ranks
        self._path = path
        self._environment = environment
        self._output = folder / f"{plan.name}.output"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[_Line] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with self._stack:
            door = self._stack.enter_context(socket.socket(socket.AF_UNIX))
            door.bind(self._path)
            door.listen(self._ranks)
            output = self._stack.enter_context(self._output.open("wb"))
            self._stack.callback(self._end)
            for start in self.plan.starts:
                self._processes.append(self._started(start.command, start.environment, output))
            self._admit(door)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def ask(self, order: Order, patience: float) -> list[Reply]:
        """Every rank's reply, by rank. `SystemFailed` where one does not answer within `patience` seconds."""
        deadline = time.monotonic() + patience
        for line in self._lines:
            line.send(order.line())
        replies = []
        for rank, line in enumerate(self._lines):
            answer = line.read(deadline)
            if answer is None:
                raise self._failed(f"rank {rank} did not answer within {patience:.0f} s")
            if not answer:
                self._await_endings(_ENDING)  # its launcher passes on what it has written
                raise self._failed(f"rank {rank} is gone")
            replies.append(parse_reply(answer))
        return replies

    def _started(
        self, command: tuple[str, ...], variables: Mapping[str, str], output: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        environment = {**self._environment, **variables}
        try:
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # ended together with everything it starts
            )
        except OSError as error:
            raise self._failed(f"{command[0]} cannot be started: {error.strerror}") from error

    def _admit(self, door: socket.socket) -> None:
        deadline = time.monotonic() + _FORMATION
        found: dict[int, _Line] = {}
        while len(found) < self._ranks:
            self._check_processes(len(found))
            if time.monotonic() > deadline:
                raise self._failed(f"only {len(found)} of {self._ranks} ranks came within {_FORMATION:.0f} s")
            # A process that ends gives no sign on the socket: it is looked at every tenth of a second.
            if not select.select([door], [], [], 0.1)[0]:
                continue
            line = _Line(self._stack.enter_context(door.accept()[0]))
            said = line.read(deadline)
            if not said:
                raise self._failed(f"a rank came and left without a word when {len(found)} of {self._ranks} had come")
            hello = parse_hello(said)
            found[hello.rank] = line
            self.version = hello.version
        self._lines = [found[rank] for rank in range(self._ranks)]

    def _check_processes(self, came: int) -> None:
        for process in self._processes:
            code = process.poll()
            if code:
                program = " ".join(str(word) for word in list(process.args)[:4])  # type: ignore[arg-type]
                raise self._failed(f"`{program} …` ended with code {code} when {came} of {self._ranks} ranks had come")

    def _failed(self, what: str) -> SystemFailed:
        lines = self._output.read_text(errors="replace").splitlines() if self._output.exists() else []
        said = "\n".join(f"  | {line}" for line in lines[-_TAIL_LINES:])
        return SystemFailed(f"{self.plan.name}: {what}" + (f"; its last words:\n{said}" if said else ""))

    def _end(self) -> None:
        """Hang up, which tells the ranks to end; whoever has not ended soon after is killed."""
        for line in self._lines:
            line.close()
        self._await_endings(_ENDING if self._lines else 0.0)
        for process in self._processes:
            with suppress(ProcessLookupError):  # all of that session have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(_ENDING)

    def _await_endings(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


class _Line:
    """One rank's line, with deadlines."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._read = b""

    def send(self, line: bytes) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # who is gone does not answer either, and reading says so
            self._connection.sendall(line)

    def read(self, deadline: float) -> bytes | None:
        """The next line; empty if the rank has hung up, None if there is none by then."""
        while b"\n" not in self._read:
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                data = self._connection.recv(1 << 20)
            except TimeoutError:
                return None
            except ConnectionResetError:
                return b""
            if not data:
                return b""
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return line

    def close(self) -> None:
        self._connection.close()
