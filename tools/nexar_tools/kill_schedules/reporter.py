"""Reports of one rank: JSON lines on standard output."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from nexar.communicator.communicator import Communicator
from nexar.errors import MembershipChanged


class Reporter:
    """Writes each line at once and whole, because the process may be killed."""

    def __init__(self) -> None:
        self.doing = ""
        """What a loss interrupts now."""
        self._verbs: set[str] = set()  # called since the last report of them

    def report(self, what: str, **facts: Any) -> None:
        line = json.dumps({"what": what, "at": time.monotonic(), **facts})
        os.write(sys.stdout.fileno(), f"{line}\n".encode())

    def fact(self, name: str, key: list[int], value: object) -> None:
        """A value that all ranks must report alike for the same key."""
        self.report("fact", name=name, key=key, value=value)

    def opened(self, comm: Communicator) -> None:
        self.fact("membership", [comm.id, comm.epoch], [member.node for member in comm.membership.members])

    def changed(self, old: Communicator, change: MembershipChanged) -> None:
        new = change.communicator
        self.report("interrupted", doing=self.doing)
        value = [change.completed_by_all, sorted(change.lost), list(change.joined)]
        self.fact("change", [old.id, old.epoch, new.epoch], value)
        self.opened(new)

    def done(self, verb: str) -> None:
        self._verbs.add(verb)

    def take_verbs(self) -> list[str]:
        """Those that were called since the last time."""
        taken, self._verbs = sorted(self._verbs), set()
        return taken
