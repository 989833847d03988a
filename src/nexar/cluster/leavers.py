"""Links to nodes that have closed, and are members no longer: what they sent may still be on its way.

Who closes waits until its peers have what it sent. The others go on without it meanwhile, as soon as most of them have
seen it go. Whoever it reaches slowly must not lose what was promised to arrive: its link ends by itself, or when who
closed would not wait any longer either.
"""

from __future__ import annotations

import threading
from typing import Final

from nexar.links.link import Link
from nexar.types import NodeId

LONGEST_CLOSE: Final = 30.0
"""Seconds that a node waits for its peers while it closes."""


class Leavers:
    """Of one mesh. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: dict[Link, float] = {}  # under the lock

    def keep(self, link: Link, now: float) -> bool:
        """Let it end by itself. False: it has already."""
        with self._lock:
            self._until[link] = now + LONGEST_CLOSE
        if link.failure is None:
            return True
        self.forget(link)  # whoever tells of its end may have been here before it was kept
        return False

    def forget(self, link: Link) -> bool:
        """It has ended. Whether it was kept."""
        with self._lock:
            return self._until.pop(link, None) is not None

    def has(self, node: NodeId) -> bool:
        """Whether something may still come from there."""
        with self._lock:
            return any(link.peer == node for link in self._until)

    def due(self) -> float | None:
        """When the next one has had its time; None: there is none."""
        with self._lock:
            return min(self._until.values(), default=None)

    def overdue(self, now: float) -> list[Link]:
        """Those that have had their time."""
        with self._lock:
            return [link for link, until in self._until.items() if until <= now]

    def links(self) -> list[Link]:
        """All that are kept."""
        with self._lock:
            return list(self._until)
