"""A seed in a process of its own, four honest nodes in another, and unauthenticated peers in this one."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

from nexar.cluster.seed import SeedService
from nexar.security.invitation import Invitation, parse_ticket
from nexar.transport.address import parse_address
from tests.cluster.joiners import EVENT_TIMEOUT, JoinDialer, Line

_MAIN = Path(__file__).with_name("attack_main.py")
SIZE = 4


class Noted(NamedTuple):
    """An event of the seed."""

    kind: str
    address: str | None
    node: int | None
    reason: str


class Process:
    """One of attack_main's. What it says is read line by line; every wait has a deadline."""

    def __init__(self, *arguments: str) -> None:
        environment = {name: text for name, text in os.environ.items() if not name.startswith("NEXAR_")}
        command = [sys.executable, str(_MAIN), *arguments]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.pid = self._process.pid

    def ask(self, line: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        return self.receive()

    def receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"{_MAIN.stem} ended"
        return json.loads(line)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(EVENT_TIMEOUT)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(EVENT_TIMEOUT)
        finally:
            if self._process.poll() is None:
                self.kill()
            self._process.stdout.close()


@contextmanager
def process(*arguments: str) -> Iterator[Process]:
    made = Process(*arguments)
    try:
        yield made
    finally:
        made.close()


class Siege:
    """Everybody is in place: the seed listens, the honest wait for the signal. `ticket` and `address` as of a Seed."""

    def __init__(self, seed: Process, nodes: Process) -> None:
        self._seed = seed
        self._nodes = nodes
        opened = seed.receive()
        assert nodes.receive() == "ready"
        self.ticket: str = opened["ticket"]
        self.address: str = opened["address"]
        self.invitation: Invitation = parse_ticket(self.ticket)
        self.place = parse_address(self.address)
        self._events: list[Noted] = []
        self._resident_before = self._resident("VmRSS")
        self._begin = 0.0
        self.started = 0

    def start(self, count: int = SIZE) -> None:
        """Let so many more of the honest dial."""
        if not count:
            return
        self._begin = self._begin or time.monotonic()
        self._nodes.ask(f"{count} {self.ticket}")
        self.started += count

    def dial(self, dialer: JoinDialer, node: int, invitation: Invitation | None = None) -> Line:
        """A line of a joiner that may misbehave."""
        return dialer.dial(cast(SeedService, self), node, invitation)

    def end(self) -> float:
        """Waits until the honest have formed, met and parted; returns the seconds since the first of them dialed."""
        answer = self._nodes.ask("wait")
        assert not answer["faults"], (answer["faults"], self.events)
        return answer["ended"] - self._begin

    @property
    def events(self) -> list[Noted]:
        self._events += [Noted(*event) for event in self._seed.ask(str(len(self._events)))]
        return self._events

    def await_events(self, kind: str, pattern: str, count: int = 1) -> list[Noted]:
        """Until so many have been noted."""
        deadline = time.monotonic() + EVENT_TIMEOUT
        while len(found := self.noted(kind, pattern)) < count:
            assert time.monotonic() < deadline, (kind, pattern, len(found), self.events[-30:])
            time.sleep(0.02)
        return found

    def noted(self, kind: str, pattern: str) -> list[Noted]:
        return [event for event in self.events if event.kind == kind and re.search(pattern, event.reason)]

    def grown_bytes(self) -> int:
        """How much more memory the seed has had, at its peak, than before the attack."""
        return self._resident("VmHWM") - self._resident_before

    def _resident(self, what: str) -> int:
        status = Path(f"/proc/{self._seed.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith(f"{what}:")]
        return int(line.split()[1]) << 10


@contextmanager
def besieged(**settings: Any) -> Iterator[Siege]:
    """A siege; `settings` are the seed's."""
    with ExitStack() as stack:
        seed = stack.enter_context(process("seed", str(SIZE), json.dumps(settings)))
        yield Siege(seed, stack.enter_context(process("nodes")))
