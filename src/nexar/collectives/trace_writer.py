"""One rank's part of a trace: the calls it made on one communicator, as its recorder has them.

Written when the communicator is closed, off the way of every call: while the program runs a call costs what it costs
anyway. The parts of all ranks are put together afterwards (`observe.trace_export`).
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import time
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from nexar.collectives.call_log import CallLog
from nexar.collectives.call_notices import GroupView
from nexar.security.storage import write_private_file
from nexar.types import NodeId, Rank, format_node

_log = logging.getLogger(__name__)

TRACE_FORMAT: Final = 1
SUFFIX: Final = ".part"
_Clock: TypeAlias = Annotated[float, Meta(ge=-1e10, le=1e10)]
"""Seconds, whenever a clock began: three hundred years are no time, nor is what is no number."""
Called: TypeAlias = tuple[int, tuple[int, int, int, int, int, int], _Clock, _Clock, int, str]
"""Sequence, fingerprint, beginning, end (time.monotonic), bytes, and the name of the error that it ended with."""


class TracePart(msgspec.Struct, frozen=True):
    """One file."""

    format: int
    cluster: str
    node: NodeId
    rank: Rank
    size: int
    host: str
    """Its id: ranks of one host have one clock."""
    host_name: str
    pid: int
    communicator: int
    generation: int
    monotonic: _Clock
    """Of the moment of writing, and the same by the clock on the wall."""
    wall: _Clock
    missed: int
    """Calls that came first, and for which there was no room."""
    calls: tuple[Called, ...]


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(TracePart)


class TraceWriter:
    """Of one communicator. Writes when it is told to, else when the interpreter ends."""

    def __init__(self, directory: str, group: GroupView, call_log: CallLog) -> None:
        self._directory, self._group, self._call_log = Path(directory).absolute(), group, call_log
        self._process = os.getpid()  # 0: it is written
        atexit.register(self.write)

    def write(self) -> None:
        """Once; whole or not at all, readable by its owner only. Never raises: what goes wrong is logged. A forked
        child writes nothing: it is not its story.
        """
        atexit.unregister(self.write)
        if self._process != os.getpid():
            return
        self._process = 0
        try:
            _store(self._directory, _part(self._group, self._call_log))
        except OSError as error:
            _log.warning("this rank's part of the trace could not be written to %s: %s", self._directory, error)


def _part(group: GroupView, call_log: CallLog) -> TracePart:
    calls, missed = call_log.recorder.drain()
    member = group.membership.members[group.rank]
    return TracePart(
        format=TRACE_FORMAT,
        cluster=group.membership.cluster,
        node=member.node,
        rank=group.rank,
        size=group.membership.size,
        host=member.host,
        host_name=socket.gethostname(),
        pid=os.getpid(),
        communicator=group.communicator,
        generation=group.matching.generation,
        monotonic=time.monotonic(),
        wall=time.time(),
        missed=missed,
        calls=tuple(calls),
    )


def _store(directory: Path, part: TracePart) -> None:
    path = directory / f"{format_node(part.node)}-{part.communicator:x}-{part.generation}{SUFFIX}"
    write_private_file(path, _encoder.encode(part))


def decode_trace_part(data: bytes) -> TracePart:
    """What a file says. ValueError if it is none, or of another format."""
    try:
        part = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is no part of a trace: {error}") from None
    if part.format != TRACE_FORMAT:
        raise ValueError(f"its format is {part.format}; this version reads {TRACE_FORMAT}")
    return part
