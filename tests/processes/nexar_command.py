"""The command `nexar` with a real cluster behind it, and what its ranks say of themselves."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.processes.launcher import EVENT_TIMEOUT, Launch

INTRODUCE = Path(__file__).with_name("introduce.py")
LATE_LINK = Path(__file__).with_name("late_link.py")


class Nexar(Launch):
    """`nexar …`, as installed."""

    program: Sequence[str] = (sys.executable, "-m", "nexar")


class Python(Launch):
    """`python …`: a rank that some other launcher, or nobody, has started."""

    program: Sequence[str] = (sys.executable,)


def introductions(*ran: Launch, patience: float = EVENT_TIMEOUT) -> dict[int, dict[str, Any]]:
    """Wait for these to end well; what their ranks have printed, by rank."""
    found: dict[int, dict[str, Any]] = {}
    for each in ran:
        assert each.end(patience) == 0, each.stderr
        for line in each.stdout.splitlines():
            facts = json.loads(line[line.index("{") :])
            assert facts["rank"] not in found, "two processes have the same rank"
            found[facts["rank"]] = facts
    return found


def await_ticket(path: Path, seed: Launch) -> str:
    """The ticket that a seed writes to a file; the file appears whole."""
    deadline = time.monotonic() + EVENT_TIMEOUT
    while not path.exists():
        assert seed.process.poll() is None, seed.process.communicate()
        assert time.monotonic() < deadline, "the seed does not open"
        time.sleep(0.01)
    return path.read_text().strip()
