"""Writes one rank's trace of a communicator when it closes; `observe.trace_merge` merges them."""

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
from nexar.group import Group
from nexar.security.storage import write_private_file
from nexar.types import NodeId, Rank, format_node

_log = logging.getLogger(__name__)

TRACE_FORMAT: Final = 1
SUFFIX: Final = ".part"
_Clock: TypeAlias = Annotated[float, Meta(ge=-1e10, le=1e10)]
"""The bounds exclude NaN and infinity."""
Called: TypeAlias = tuple[int, tuple[int, int, int, int, int, int], _Clock, _Clock, int, str]
"""Sequence, fingerprint, beginning, end (time.monotonic), bytes, name of the error."""


class TracePart(msgspec.Struct, frozen=True):
    """Content of one file."""

    format: int
    cluster: str
    node: NodeId
    rank: Rank
    size: int
    host: str
    """Host id. The ranks of one host share a clock."""
    host_name: str
    pid: int
    communicator: int
    generation: int
    monotonic: _Clock
    """The time of writing, by the monotonic and the wall clock."""
    wall: _Clock
    missed: int
    """Older calls that were overwritten."""
    calls: tuple[Called, ...]


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(TracePart)


class TraceWriter:
    """Writes on request, else at interpreter exit."""

    def __init__(self, directory: str, group: Group, call_log: CallLog) -> None:
        self._directory, self._group, self._call_log = Path(directory).absolute(), group, call_log
        self._process = os.getpid()  # 0: written
        atexit.register(self.write)

    def write(self) -> None:
        """Writes once, atomically; logs failures. No effect in a forked child."""
        atexit.unregister(self.write)
        if self._process != os.getpid():
            return
        self._process = 0
        try:
            _store(self._directory, _part(self._group, self._call_log))
        except OSError as error:
            _log.warning("this rank's part of the trace could not be written to %s: %s", self._directory, error)


def _part(group: Group, call_log: CallLog) -> TracePart:
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
    """ValueError if it is not a part of this format."""
    try:
        part = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a trace part: {error}") from None
    if part.format != TRACE_FORMAT:
        raise ValueError(f"its format is {part.format}; this version reads {TRACE_FORMAT}")
    return part
