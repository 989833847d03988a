"""What this node does inside nexar: for a rank that asks why another one is missing in a collective.

A rank that is missing in one communicator may be in a call of another one, or wait for a message. Neither is user code.
"""

from __future__ import annotations

import threading

from nexar.collectives.journal import Journal
from nexar.links.progress import Progress

_OURS = "nexar-"
"""How the names of nexar's own threads begin: what they wait for says nothing about the user."""


class Whereabouts:
    """Of one node. Any thread; no method takes a lock, so a node that hangs can be asked as well."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._journals: dict[Journal, None] = {}  # of communicators that are open; changed in single steps

    def add(self, journal: Journal) -> None:
        """A communicator is open."""
        self._journals[journal] = None

    def remove(self, journal: Journal) -> None:
        """It is closed."""
        self._journals.pop(journal, None)

    def beside(self, communicator: int, generation: int) -> tuple[str, float] | None:
        """What this node does that is no collective call of this generation, and since when (time.monotonic): the call
        that has lasted longest. None: nothing, so it is in user code.
        """
        others = (each for each in self._journals.copy() if each.about != (communicator, generation))
        calls = [
            (f"{entry.name} of communicator {journal.communicator}", entry.began)
            for journal in others
            for entry in journal.in_flight()
        ]
        return min(calls or self._waits(), key=lambda call: call[1], default=None)

    def _waits(self) -> list[tuple[str, float]]:
        ours = {thread.ident for thread in threading.enumerate() if thread.name.startswith(_OURS)}
        return [(name, since) for thread, name, since in self._progress.waits() if thread not in ours]
