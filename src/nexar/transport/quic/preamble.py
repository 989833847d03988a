"""The first bytes of every stream: what it is.

Streams are unidirectional and opened by the side that sends. Each starts with PREAMBLE_BYTES that name its type:

ORDERED   frames follow, one after another, until the stream ends. `number` is the communicator that opened it, `lane`
          its lane; both are for people who look at captures, because every frame says the same of itself and
          communicators may share a stream.
PAYLOAD   the `size` bytes of payload `number` follow, and nothing else.
FAREWELL  nothing follows: the side that sends it has finished, and has received everything the other side announced.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

VERSION: Final = 1
_LAYOUT: Final = struct.Struct("<BBB5xQQ")
PREAMBLE_BYTES: Final = _LAYOUT.size


class StreamType(IntEnum):
    """Numbers are the wire format: never reuse one."""

    ORDERED = 1
    PAYLOAD = 2
    FAREWELL = 3


class Preamble(NamedTuple):
    """A decoded preamble."""

    type: StreamType
    lane: int
    number: int
    size: int


class PreambleError(ValueError):
    """A stream that begins with something else."""


def encode_preamble(stream_type: StreamType, number: int = 0, *, lane: int = 0, size: int = 0) -> bytes:
    """The bytes that open a stream of this type."""
    return _LAYOUT.pack(VERSION, stream_type, lane, number, size)


def decode_preamble(buffer: bytes | bytearray) -> Preamble:
    """What the stream is. Raises PreambleError."""
    version, stream_type, lane, number, size = _LAYOUT.unpack_from(buffer)
    if version != VERSION:
        raise PreambleError(f"a stream of preamble version {version}; ours is {VERSION}")
    try:
        return Preamble(StreamType(stream_type), lane, number, size)
    except ValueError as error:
        raise PreambleError(f"a stream of unknown type {stream_type}") from error
