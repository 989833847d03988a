"""What happened at the seed's door: kept, logged and told, one note after the other."""

from __future__ import annotations

import logging
import threading
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
    "refused": logging.WARNING,
    "failed": logging.ERROR,
}
_LONGEST_LINE: Final = 500


class Chronicle:
    """Notes come in from one thread at a time, in the order of what happened."""

    def __init__(self, on_note: Callable[[Note], None] | None = None) -> None:
        """`on_note` is called with each note and must not block. What it raises is logged, and changes nothing."""
        self._on_note = on_note
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
        _log.log(_level(note), "%s", describe_note(note))
        if self._on_note is None:
            return
        try:
            self._on_note(note)
        except Exception:  # noqa: BLE001 - foreign code must not cost the cluster its seed
            _log.exception("on_event raised")


def _level(note: Note) -> int:
    """Who has not even said a name is noise, and can make much of it."""
    stranger = note.kind == "refused" and note.node is None
    return logging.INFO if stranger else _LEVELS.get(note.kind, logging.INFO)


def describe_note(note: Note) -> str:
    """One line for people."""
    somebody = note.address is not None or note.node is not None
    parts = [note.kind, describe_peer(note.rank, note.node, note.address) if somebody else "", note.reason]
    return brief(": ".join(part for part in parts if part), _LONGEST_LINE)
