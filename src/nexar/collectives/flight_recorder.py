"""The flight recorder writes what a node was doing: when a call failed, or when somebody wants to know.

A dump is of a node, with all its communicators; so the failure of one tells of the others too. It is written whole or
not at all, is readable by its owner only, and never makes anything worse: what goes wrong with it is logged.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Final
from weakref import WeakValueDictionary

from nexar.collectives.dump import Dump, describe, encode
from nexar.collectives.journal import Journal
from nexar.collectives.voice import Members
from nexar.errors import CollectiveMismatch, CollectiveTimeout, Expelled, MembershipChanged, NoQuorum, PeerLost
from nexar.security.storage import write_private_file
from nexar.types import NodeId

_log = logging.getLogger(__name__)

WORTH_IT: Final = (CollectiveMismatch, CollectiveTimeout, Expelled, MembershipChanged, NoQuorum, PeerLost)
"""Errors that leave a dump."""
KEPT: Final = 16
"""Dumps of one node; older ones are deleted."""
USUAL_PLACE: Final = "nexar-dumps"
"""In the working directory: where a dump goes that somebody asked for, if no directory is set."""
_STORM: Final = 1.0  # seconds in which errors of one kind on one node are one: each dump has all communicators


class FlightRecorder:
    """Of one communicator, as long as its journal is open. Any thread."""

    def __init__(self, group: Members, journal: Journal, directory: str | None) -> None:
        """`directory` None: nothing is written unless somebody asks."""
        self.group: Final = group
        self.journal: Final = journal
        self.node: Final[NodeId] = group.membership.members[group.rank].node
        self.directory: Final = directory
        self._process: Final = os.getpid()
        self._told: set[type[BaseException]] = set()  # kinds of errors; set methods are atomic
        journal.on_failure = self.failed
        _recorders[id(self)] = self

    @property
    def is_open(self) -> bool:
        """In a forked child none is."""
        return not self.journal.closed and self._process == os.getpid()

    def failed(self, error: BaseException) -> None:
        """A call has ended with this error, or is about to raise it. The first of its kind leaves a dump, and a note in
        the error that says where. Never raises; takes the time of writing a file, and none for other errors.
        """
        kind = type(error)
        if self.directory is None or not isinstance(error, WORTH_IT) or kind in self._told:
            return
        if kind is MembershipChanged and PeerLost in self._told:
            return  # that was the same mishap, seen before the others had agreed on it
        self._told.add(kind)
        if _is_storm(self.node, kind):
            return
        path = _write(self.node, self.directory, f"{kind.__name__}: {error}")
        if path is not None:
            error.add_note(f"what this rank was doing is in {path}; `nexar trace analyze` compares it with the others")


def dump_all(reason: str) -> int:
    """Somebody wants to know what every node of this process does. Returns how many there are. Never raises, and may
    be called from a signal handler.
    """
    nodes = {recorder.node: recorder.directory for recorder in _open_recorders()}
    for node, directory in nodes.items():
        _write(node, directory or USUAL_PLACE, reason)
    return len(nodes)


_recorders: Final[WeakValueDictionary[int, FlightRecorder]] = WeakValueDictionary()  # by id
_writing: Final = threading.RLock()  # over what follows; a signal handler may come while its thread has it
_numbers: Final = count(1)
_written: Final[dict[NodeId, deque[Path]]] = {}
_last: Final[dict[tuple[NodeId, type[BaseException]], float]] = {}


def _open_recorders() -> list[FlightRecorder]:
    """Without a lock: one may be made for a successor while calls on the one before fail; to list references is one
    step.
    """
    return [recorder for each in _recorders.valuerefs() if (recorder := each()) is not None and recorder.is_open]


def _is_storm(node: NodeId, kind: type[BaseException]) -> bool:
    now = monotonic()
    with _writing:
        before = _last.get((node, kind))
        _last[node, kind] = now
    return before is not None and now - before < _STORM


def _write(node: NodeId, directory: str, reason: str) -> Path | None:
    """None: it could not be done, and was logged."""
    flights = [recorder for recorder in _open_recorders() if recorder.node == node]
    if not flights:
        return None  # closed meanwhile
    try:
        dump = describe(flights, reason)
        with _writing:
            path = _store(Path(directory).absolute(), dump)
            _forget_oldest(node, path)
    except Exception as error:  # noqa: BLE001 - whatever it is, the user's call has a failure of its own to tell of
        _log.warning("the flight recorder could not write to %s: %s", directory, error)
        return None
    _log.info("the flight recorder wrote %s: %s", path, reason)
    return path


def _store(directory: Path, dump: Dump) -> Path:
    """Whole or not at all: who reads the directory meanwhile sees finished files only."""
    path = directory / f"rank-{dump.rank}-{dump.node}-{next(_numbers):04}.json"
    write_private_file(path, encode(dump))
    return path


def _forget_oldest(node: NodeId, path: Path) -> None:
    written = _written.setdefault(node, deque())
    written.append(path)
    while len(written) > KEPT:
        written.popleft().unlink(missing_ok=True)
