"""The flight recorder: dumps a node's activity when a call fails or a user asks.

A dump is one JSON file per node. Durations are seconds before the dump, so hosts are comparable. Collecting takes no
lock: a lock may be stuck.
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
from typing import Any, Final
from weakref import WeakValueDictionary

import msgspec

from nexar.collectives.call import Call
from nexar.collectives.call_log import CallLog
from nexar.collectives.fingerprint import Fingerprint, operation_name
from nexar.collectives.statistics import Record
from nexar.errors import CollectiveMismatch, CollectiveTimeout, Expelled, MembershipChanged, NoQuorum, PeerLost
from nexar.group import Group
from nexar.links.mismatch_detector import CallFacts
from nexar.security.storage import write_private_file
from nexar.types import NodeId, format_node

_DEEPEST: Final = 64  # frames per thread
_LIBRARY_PATHS: Final = (
    str(Path(__file__).parents[1]),  # this package
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen",
)


class ThreadStack(msgspec.Struct, frozen=True):
    """The stack of one thread."""

    thread: str
    main: bool
    at: str
    """`train.py:88`: the innermost line outside nexar and libraries, or empty."""
    frames: tuple[str, ...]
    """`/home/ann/train.py:88 in step: loss.backward()`, the outermost first."""


def thread_stacks() -> tuple[ThreadStack, ...]:
    """All stacks, the main thread first. Takes no lock."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = [
        _stack(names.get(ident, f"thread {ident}"), ident == main, frame)
        for ident, frame in sys._current_frames().items()
    ]
    return tuple(sorted(found, key=lambda stack: (not stack.main, stack.thread)))


def _stack(thread: str, main: bool, frame: FrameType) -> ThreadStack:
    lines = traceback.extract_stack(frame, _DEEPEST)
    user_lines = [line for line in lines if not line.filename.startswith(_LIBRARY_PATHS)]
    at = f"{Path(user_lines[-1].filename).name}:{user_lines[-1].lineno}" if user_lines else ""
    return ThreadStack(
        thread, main, at, tuple(f"{line.filename}:{line.lineno} in {line.name}: {line.line}" for line in lines)
    )


FORMAT: Final = 1
_LINE: Final = 240  # characters
_RECORDS: Final = 1024  # per communicator: enough to see where ranks diverged, and fast to write


class RecordedCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """One collective call."""

    sequence: int
    operation: str
    what: str
    """`all_reduce of float32[8], sum, by ring`."""
    fingerprint: CallFacts
    began_ago: float
    ended_ago: float | None = None
    """None: in progress."""
    outcome: str = ""
    """Name of its error."""
    step: int = 0
    """Finished steps of a call in progress."""
    moved_ago: float | None = None
    """When the last step finished."""


class DumpedPeer(msgspec.Struct, frozen=True):
    """Another member, as this node knows it."""

    rank: int
    node: str
    host: str
    address: str | None = None
    heard_ago: float | None = None
    """When its last collective message arrived."""


class DumpedCommunicator(msgspec.Struct, frozen=True):
    """One communicator of the node."""

    communicator: int
    generation: int
    epoch: int
    rank: int
    size: int
    in_flight: tuple[RecordedCall, ...]
    last_calls: tuple[RecordedCall, ...]
    """Finished calls, by end time."""
    peers: tuple[DumpedPeer, ...]


class Dump(msgspec.Struct, frozen=True):
    """Content of one file."""

    format: int
    reason: str
    cluster: str
    rank: int
    """In the node's first communicator."""
    node: str
    host: str
    pid: int
    epoch: int
    written_at: float
    """Unix time of its host."""
    written: str
    """`written_at` as text."""
    monotonic: float
    communicators: tuple[DumpedCommunicator, ...]
    threads: tuple[ThreadStack, ...]


def make_dump(sources: Sequence[FlightRecorder], reason: str) -> Dump:
    """The dump of a node. `sources` must not be empty."""
    now, wall = time.monotonic(), time.time()
    communicators = sorted(
        (_communicator(source, now) for source in sources), key=lambda each: (each.communicator, each.generation)
    )
    first = sources[0].group
    member = first.membership.members[first.rank]
    return Dump(
        format=FORMAT,
        reason=reason,
        cluster=first.membership.cluster,
        rank=communicators[0].rank,
        node=format_node(member.node),
        host=member.host,
        pid=os.getpid(),
        epoch=max(each.epoch for each in communicators),
        written_at=wall,
        written=time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(wall)),
        monotonic=now,
        communicators=tuple(communicators),
        threads=thread_stacks(),
    )


def encode_dump(dump: Dump) -> bytes:
    """File content, one line per call and stack frame."""
    return f"{_readable(msgspec.to_builtins(dump))}\n".encode()


def decode_dump(data: bytes) -> Dump:
    """ValueError if it is not a dump of this format."""
    try:
        dump = msgspec.json.decode(data, type=Dump)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a flight recorder dump: {error}") from None
    if dump.format != FORMAT:
        raise ValueError(f"its format is {dump.format}; this version reads {FORMAT}")
    return dump


def _communicator(source: FlightRecorder, now: float) -> DumpedCommunicator:
    group, call_log = source.group, source.call_log
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
    return _recorded(
        entry.sequence,
        entry.fingerprint,
        now - entry.began,
        step=entry.step,
        moved_ago=_microseconds(now - entry.moved_at),
    )


def _ended(record: Record, now: float) -> RecordedCall:
    ended_ago = _microseconds(now - record.ended)
    return _recorded(
        record.sequence, record.fingerprint, now - record.began, ended_ago=ended_ago, outcome=record.outcome
    )


def _recorded(
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
        what=fingerprint.describe(with_algorithm=True),
        fingerprint=fingerprint,
        began_ago=_microseconds(began_ago),
        ended_ago=ended_ago,
        outcome=outcome,
        step=step,
        moved_ago=moved_ago,
    )


def _peers(group: Group, now: float) -> list[DumpedPeer]:
    known, heard = group.matching.peers, group.matching.mismatch_detector.heard
    others = [(rank, member) for rank, member in enumerate(group.membership.members) if rank != group.rank]
    return [
        DumpedPeer(
            rank=rank,
            node=format_node(member.node),
            host=member.host,
            address=known[member.node].address if member.node in known else None,
            heard_ago=_microseconds(now - heard[member.node]) if member.node in heard else None,
        )
        for rank, member in others
    ]


def _readable(value: Any, margin: str = "") -> str:
    flat = msgspec.json.encode(value).decode()
    if len(flat) <= _LINE or not isinstance(value, (dict, list, tuple)):
        return flat
    inner = f"{margin} "
    if isinstance(value, dict):
        parts = [f'{inner}"{key}": {_readable(each, inner)}' for key, each in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{margin}}}"
    return "[\n" + ",\n".join(f"{inner}{_readable(each, inner)}" for each in value) + f"\n{margin}]"


def _microseconds(seconds: float) -> float:
    return round(seconds, 6)


_log = logging.getLogger(__name__)

DUMPED_ERRORS: Final = (CollectiveMismatch, CollectiveTimeout, Expelled, MembershipChanged, NoQuorum, PeerLost)
KEPT: Final = 16
"""Dumps kept per node; older ones are deleted."""
DEFAULT_DIRECTORY: Final = "nexar-dumps"
"""For requested dumps if no directory is set."""
# seconds in which errors of one kind on one node cause one dump: it covers all communicators
_MIN_INTERVAL: Final = 1.0


class FlightRecorder:
    """The flight recorder of one communicator. Thread-safe."""

    def __init__(self, group: Group, call_log: CallLog, directory: str | None) -> None:
        """`directory` None: write dumps only on request."""
        self.group: Final = group
        self.call_log: Final = call_log
        self.node: Final[NodeId] = group.membership.members[group.rank].node
        self.directory: Final = directory
        self._process: Final = os.getpid()
        self._dumped: set[type[BaseException]] = set()  # kinds of errors already dumped; set methods are atomic
        call_log.on_failure = self.failed
        _recorders[id(self)] = self

    @property
    def is_open(self) -> bool:
        """False in a forked child."""
        return not self.call_log.closed and self._process == os.getpid()

    def failed(self, error: BaseException) -> None:
        """Dump the first error of each kind and add the path as a note. Never raises. Blocks while writing."""
        kind = type(error)
        if self.directory is None or not isinstance(error, DUMPED_ERRORS) or kind in self._dumped:
            return
        if kind is MembershipChanged and PeerLost in self._dumped:
            return  # the same failure, seen before the ranks agreed on it
        self._dumped.add(kind)
        if _is_rate_limited(self.node, kind):
            return
        path = _write(self.node, self.directory, f"{kind.__name__}: {error}")
        if path is not None:
            error.add_note(f"flight recorder dump: {path}; compare it with those of other ranks: `nexar trace analyze`")


def dump_all(reason: str) -> int:
    """Dump every node of this process; returns their number. Never raises, not even in a signal handler."""
    nodes = {recorder.node: recorder.directory for recorder in _open_recorders()}
    for node, directory in nodes.items():
        _write(node, directory or DEFAULT_DIRECTORY, reason)
    return len(nodes)


_recorders: Final[WeakValueDictionary[int, FlightRecorder]] = WeakValueDictionary()  # by id
# guards the variables below; reentrant for a signal handler in the thread that holds it
_writing: Final = threading.RLock()
_numbers: Final = count(1)
_written: Final[dict[NodeId, deque[Path]]] = {}
_last: Final[dict[tuple[NodeId, type[BaseException]], float]] = {}


def _open_recorders() -> list[FlightRecorder]:
    """Takes no lock: listing the references is atomic."""
    return [recorder for each in _recorders.valuerefs() if (recorder := each()) is not None and recorder.is_open]


def _is_rate_limited(node: NodeId, kind: type[BaseException]) -> bool:
    now = monotonic()
    with _writing:
        before = _last.get((node, kind))
        _last[node, kind] = now
    return before is not None and now - before < _MIN_INTERVAL


def _write(node: NodeId, directory: str, reason: str) -> Path | None:
    """None: it failed and was logged."""
    sources = [recorder for recorder in _open_recorders() if recorder.node == node]
    if not sources:
        return None  # closed meanwhile
    try:
        dump = make_dump(sources, reason)
        with _writing:
            path = _store(Path(directory).absolute(), dump)
            _delete_oldest(node, path)
    except Exception as error:  # noqa: BLE001 - the user's call must raise its own error
        _log.warning("the flight recorder could not write to %s: %s", directory, error)
        return None
    _log.info("the flight recorder wrote %s: %s", path, reason)
    return path


def _store(directory: Path, dump: Dump) -> Path:
    path = directory / f"rank-{dump.rank}-{dump.node}-{next(_numbers):04}.json"
    write_private_file(path, encode_dump(dump))
    return path


def _delete_oldest(node: NodeId, path: Path) -> None:
    written = _written.setdefault(node, deque())
    written.append(path)
    while len(written) > KEPT:
        written.popleft().unlink(missing_ok=True)
