"""Where every Python thread of this process is, and which line of it is the user's own.

What the flight recorder writes: the last calls of a node, those it is in, and where its threads are.

One file for each node, in JSON, so that people can read it too. Durations are seconds before the dump was written;
they can be compared between hosts, whose clocks cannot.

Nothing here takes a lock: a dump is wanted most when somebody holds one and does not let go. What is read may be a
moment apart, as it always is between ranks.

The flight recorder writes what a node was doing: when a call failed, or when somebody wants to know.

A dump is of a node, with all its communicators; so the failure of one tells of the others too. It is written whole or
not at all, is readable by its owner only, and never makes anything worse: what goes wrong with it is logged.
"""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any, Final, Protocol
from weakref import WeakValueDictionary

import msgspec

from nexar.collectives.call import Call
from nexar.collectives.call_log import CallLog
from nexar.collectives.call_notices import GroupView
from nexar.collectives.fingerprint import Fingerprint, operation_name
from nexar.collectives.statistics import Record
from nexar.errors import CollectiveMismatch, CollectiveTimeout, Expelled, MembershipChanged, NoQuorum, PeerLost
from nexar.links.mismatch_detector import CallFacts
from nexar.security.storage import write_private_file
from nexar.types import NodeId, format_node

_DEEPEST: Final = 64  # frames of a thread
_NOT_THE_USERS: Final = (
    str(Path(__file__).parents[1]),  # ours
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen",
)


class ThreadStack(msgspec.Struct, frozen=True):
    """Of one thread."""

    thread: str
    main: bool
    at: str
    """`train.py:88`: the innermost line that is neither ours nor a library's; empty if there is none."""
    frames: tuple[str, ...]
    """`/home/ann/train.py:88 in step: loss.backward()`, the outermost first."""


def thread_stacks() -> tuple[ThreadStack, ...]:
    """Of all threads, the main one first. Takes no lock but the interpreter's own."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = [
        _stack(names.get(ident, f"thread {ident}"), ident == main, frame)
        for ident, frame in sys._current_frames().items()
    ]
    return tuple(sorted(found, key=lambda stack: (not stack.main, stack.thread)))


def _stack(thread: str, main: bool, frame: FrameType) -> ThreadStack:
    lines = traceback.extract_stack(frame, _DEEPEST)
    theirs = [line for line in lines if not line.filename.startswith(_NOT_THE_USERS)]
    at = f"{Path(theirs[-1].filename).name}:{theirs[-1].lineno}" if theirs else ""
    return ThreadStack(
        thread, main, at, tuple(f"{line.filename}:{line.lineno} in {line.name}: {line.line}" for line in lines)
    )


FORMAT: Final = 1
_LINE: Final = 240  # characters
_RECORDS: Final = 1024  # of each communicator: enough to see where ranks parted, and quick to write


class RecordedCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call of a collective."""

    sequence: int
    operation: str
    what: str
    """`all_reduce of float32[8], sum, by ring`."""
    fingerprint: CallFacts
    began_ago: float
    ended_ago: float | None = None
    """None: it is in flight."""
    outcome: str = ""
    """The name of the error that it ended with."""
    step: int = 0
    """How many of its steps are done, of one in flight."""
    moved_ago: float | None = None
    """Its last step."""


class DumpedPeer(msgspec.Struct, frozen=True):
    """What this node knows of another member."""

    rank: int
    node: str
    host: str
    address: str | None = None
    heard_ago: float | None = None
    """When it was last heard of in a collective."""


class DumpedCommunicator(msgspec.Struct, frozen=True):
    """The node's place in one communicator."""

    communicator: int
    generation: int
    epoch: int
    rank: int
    size: int
    in_flight: tuple[RecordedCall, ...]
    last_calls: tuple[RecordedCall, ...]
    """Those that have ended, in the order of their end."""
    peers: tuple[DumpedPeer, ...]


class Dump(msgspec.Struct, frozen=True):
    """One file."""

    format: int
    reason: str
    cluster: str
    rank: int
    """In the first communicator of the node."""
    node: str
    host: str
    pid: int
    epoch: int
    written_at: float
    """Seconds since 1970, by the clock of its host."""
    written: str
    """The same, to be read."""
    monotonic: float
    communicators: tuple[DumpedCommunicator, ...]
    threads: tuple[ThreadStack, ...]


class DumpSource(Protocol):
    """One communicator that is open."""

    @property
    def group(self) -> GroupView:
        """Who takes part."""

    @property
    def call_log(self) -> CallLog:
        """Its calls."""


def make_dump(flights: Sequence[DumpSource], reason: str) -> Dump:
    """Of one node, which has these communicators; one at least."""
    now, wall = time.monotonic(), time.time()
    seats = sorted(
        (_communicator(flight, now) for flight in flights), key=lambda seat: (seat.communicator, seat.generation)
    )
    first = flights[0].group
    member = first.membership.members[first.rank]
    return Dump(
        format=FORMAT,
        reason=reason,
        cluster=first.membership.cluster,
        rank=seats[0].rank,
        node=format_node(member.node),
        host=member.host,
        pid=os.getpid(),
        epoch=max(seat.epoch for seat in seats),
        written_at=wall,
        written=time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(wall)),
        monotonic=now,
        communicators=tuple(seats),
        threads=thread_stacks(),
    )


def encode_dump(dump: Dump) -> bytes:
    """The content of a file: a line for each call, and for each frame of a thread."""
    return f"{_laid_out(msgspec.to_builtins(dump))}\n".encode()


def decode_dump(data: bytes) -> Dump:
    """What a file says. ValueError if it is no dump, or one of another format."""
    try:
        dump = msgspec.json.decode(data, type=Dump)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is no dump: {error}") from None
    if dump.format != FORMAT:
        raise ValueError(f"its format is {dump.format}; this version reads {FORMAT}")
    return dump


def _communicator(flight: DumpSource, now: float) -> DumpedCommunicator:
    group, call_log = flight.group, flight.call_log
    return DumpedCommunicator(
        communicator=group.communicator,
        generation=group.matching.generation,
        epoch=group.membership.epoch,
        rank=group.rank,
        size=group.membership.size,
        in_flight=tuple(_in_flight(entry, now) for entry in call_log.in_flight()),
        last_calls=tuple(_ended(record, now) for record in call_log.recorder.snapshot()[-_RECORDS:]),
        peers=tuple(_peers(group, now)),
    )


def _in_flight(entry: Call, now: float) -> RecordedCall:
    return _called(
        entry.sequence, entry.fingerprint, now - entry.began, step=entry.step, moved_ago=_short(now - entry.moved_at)
    )


def _ended(record: Record, now: float) -> RecordedCall:
    ended_ago = _short(now - record.ended)
    return _called(record.sequence, record.fingerprint, now - record.began, ended_ago=ended_ago, outcome=record.outcome)


def _called(
    sequence: int,
    fingerprint: Fingerprint,
    began_ago: float,
    *,
    ended_ago: float | None = None,
    outcome: str = "",
    step: int = 0,
    moved_ago: float | None = None,
) -> RecordedCall:
    return RecordedCall(
        sequence=sequence,
        operation=operation_name(fingerprint.operation),
        what=fingerprint.describe(way=True),
        fingerprint=fingerprint,
        began_ago=_short(began_ago),
        ended_ago=ended_ago,
        outcome=outcome,
        step=step,
        moved_ago=moved_ago,
    )


def _peers(group: GroupView, now: float) -> list[DumpedPeer]:
    known, heard = group.matching.peers, group.matching.mismatch_detector.heard
    others = [(rank, member) for rank, member in enumerate(group.membership.members) if rank != group.rank]
    return [
        DumpedPeer(
            rank=rank,
            node=format_node(member.node),
            host=member.host,
            address=known[member.node].address if member.node in known else None,
            heard_ago=_short(now - heard[member.node]) if member.node in heard else None,
        )
        for rank, member in others
    ]


def _laid_out(value: Any, margin: str = "") -> str:
    """JSON that people can read: what is short stands in one line."""
    flat = msgspec.json.encode(value).decode()
    if len(flat) <= _LINE or not isinstance(value, (dict, list, tuple)):
        return flat
    inner = f"{margin} "
    if isinstance(value, dict):
        parts = [f'{inner}"{key}": {_laid_out(each, inner)}' for key, each in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{margin}}}"
    return "[\n" + ",\n".join(f"{inner}{_laid_out(each, inner)}" for each in value) + f"\n{margin}]"


def _short(seconds: float) -> float:
    """To the microsecond: more digits are noise to who reads them."""
    return round(seconds, 6)


_log = logging.getLogger(__name__)

DUMPED_ERRORS: Final = (CollectiveMismatch, CollectiveTimeout, Expelled, MembershipChanged, NoQuorum, PeerLost)
"""Errors that leave a dump."""
KEPT: Final = 16
"""Dumps of one node; older ones are deleted."""
DEFAULT_DIRECTORY: Final = "nexar-dumps"
"""In the working directory: where a dump goes that somebody asked for, if no directory is set."""
_MIN_INTERVAL: Final = 1.0  # seconds in which errors of one kind on one node are one: each dump has all communicators


class FlightRecorder:
    """Of one communicator, as long as its journal is open. Any thread."""

    def __init__(self, group: GroupView, call_log: CallLog, directory: str | None) -> None:
        """`directory` None: nothing is written unless somebody asks."""
        self.group: Final = group
        self.call_log: Final = call_log
        self.node: Final[NodeId] = group.membership.members[group.rank].node
        self.directory: Final = directory
        self._process: Final = os.getpid()
        self._told: set[type[BaseException]] = set()  # kinds of errors; set methods are atomic
        call_log.on_failure = self.failed
        _recorders[id(self)] = self

    @property
    def is_open(self) -> bool:
        """In a forked child none is."""
        return not self.call_log.closed and self._process == os.getpid()

    def failed(self, error: BaseException) -> None:
        """A call has ended with this error, or is about to raise it. The first of its kind leaves a dump, and a note in
        the error that says where. Never raises; takes the time of writing a file, and none for other errors.
        """
        kind = type(error)
        if self.directory is None or not isinstance(error, DUMPED_ERRORS) or kind in self._told:
            return
        if kind is MembershipChanged and PeerLost in self._told:
            return  # that was the same mishap, seen before the others had agreed on it
        self._told.add(kind)
        if _is_rate_limited(self.node, kind):
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
        _write(node, directory or DEFAULT_DIRECTORY, reason)
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


def _is_rate_limited(node: NodeId, kind: type[BaseException]) -> bool:
    now = monotonic()
    with _writing:
        before = _last.get((node, kind))
        _last[node, kind] = now
    return before is not None and now - before < _MIN_INTERVAL


def _write(node: NodeId, directory: str, reason: str) -> Path | None:
    """None: it could not be done, and was logged."""
    flights = [recorder for recorder in _open_recorders() if recorder.node == node]
    if not flights:
        return None  # closed meanwhile
    try:
        dump = make_dump(flights, reason)
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
    write_private_file(path, encode_dump(dump))
    return path


def _forget_oldest(node: NodeId, path: Path) -> None:
    written = _written.setdefault(node, deque())
    written.append(path)
    while len(written) > KEPT:
        written.popleft().unlink(missing_ok=True)
