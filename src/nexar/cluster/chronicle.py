"""What happened at the seed's door: kept, logged and told, one note after the other."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from nexar.cluster.decisions.admission_events import Note, NoteKind
from nexar.cluster.decisions.refusals import brief
from nexar.types import describe_peer

MAX_NOTES: Final = 1024
"""The newest are kept: strangers can make as many as they like."""

_log: Final = logging.getLogger("nexar.seed")
_LEVELS: Final[dict[NoteKind, int]] = {
    "knocked": logging.DEBUG,
    "failed": logging.ERROR,
}
_LONGEST_LINE: Final = 500
_MOST_WARNINGS: Final = 64
"""Refusals that are warned of at once; one more each second. A stranger can be refused as often as it likes."""


class Chronicle:
    """Notes come in from one thread at a time, in the order of what happened."""

    def __init__(
        self, on_note: Callable[[Note], None] | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`on_note` is called with each note and must not block. What it raises is logged, and changes nothing."""
        self._on_note = on_note
        self._clock = clock
        self._warnings = float(_MOST_WARNINGS)  # of refusals, that are left; who adds a note writes this and the next
        self._warned = clock()
        self._lock = threading.Lock()
        self._notes: deque[Note] = deque(maxlen=MAX_NOTES)  # under the lock

    @property
    def notes(self) -> list[Note]:
        """The newest MAX_NOTES, oldest first. Any thread."""
        with self._lock:
            return list(self._notes)

    def add(self, note: Note) -> None:
        """It happened."""
        with self._lock:
            self._notes.append(note)
        _log.log(self._level(note), "%s", describe_note(note))
        if self._on_note is None:
            return
        try:
            self._on_note(note)
        except Exception:  # noqa: BLE001 - foreign code must not cost the cluster its seed
            _log.exception("on_event raised")

    def _level(self, note: Note) -> int:
        """Refusals of unnamed connections are never warnings; those of named nodes are, within the budget."""
        if note.kind != "refused":
            return _LEVELS.get(note.kind, logging.INFO)
        return logging.WARNING if note.node is not None and self._may_warn() else logging.INFO

    def _may_warn(self) -> bool:
        now = self._clock()
        left = min(self._warnings + now - self._warned, _MOST_WARNINGS)
        self._warned, self._warnings = now, left - 1 if left >= 1 else left
        return left >= 1


def describe_note(note: Note) -> str:
    """One line for people."""
    somebody = note.address is not None or note.node is not None
    parts = [note.kind, describe_peer(note.rank, note.node, note.address) if somebody else "", note.reason]
    return brief(": ".join(part for part in parts if part), _LONGEST_LINE)
