"""The first bytes of every stream: what it is.

Streams are unidirectional and opened by the side that sends. Each starts with PREAMBLE_BYTES that name its type:

ORDERED   frames follow, one after another, until the stream ends. `number` is the communicator that opened it, `lane`
          its lane; both are for people who look at captures, because every frame says the same of itself and
          communicators may share a stream.
PAYLOAD   the `size` bytes of payload `number` follow, and nothing else.
FAREWELL  nothing follows: the side that sends it has finished, and has received everything the other side announced.

How a connection ends, in the words of the contract: foreign errors are mapped here and nowhere else.
"""

from __future__ import annotations

import os
import re
import struct
from enum import IntEnum
from typing import Final, NamedTuple

from nexar.native import quic
from nexar.transport.base import CarrierLost
from nexar.wire.text import foreign_line

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


_NUMBER: Final = re.compile(r"\(os error (\d+)\)$")
MAX_REASON_BYTES: Final = 512
"""A reason must fit into one packet beside its frame."""


class CloseCode(IntEnum):
    """Says why, to the peer. 0 is what an endpoint sends that goes away without a word. Never reuse a number."""

    DONE = 1  # both sides have finished and received everything
    ABORTED = 2
    MISBEHAVED = 3  # you broke the protocol
    REFUSED = 4  # the handshake was fine, but you are not who you should be
    FAULT = 5  # something broke on this side


_MESSAGES: Final = {
    CloseCode.DONE: "the peer closed the connection as if both sides had finished",
    CloseCode.ABORTED: "the peer aborted",
    CloseCode.MISBEHAVED: "the peer says that this side broke the protocol",
    CloseCode.REFUSED: "the peer refuses this node",
    CloseCode.FAULT: "the peer had a fault",
}
_KINDS: Final = {
    "closed": "closed",
    "peer_closed": "peer",
    "timed_out": "timeout",
    "reset": "peer",
    "protocol": "misbehaved",
}
_CODES: Final = {"misbehaved": CloseCode.MISBEHAVED, "fault": CloseCode.FAULT}


def close_code_of(error: OSError) -> OSError:
    """The same with its number: the native package tells what the system said as text, which ends with it."""
    found = _NUMBER.search(str(error))
    if error.errno is not None or found is None:
        return error
    number = int(found[1])
    return OSError(number, os.strerror(number))


def finished_already() -> CarrierLost:
    """Raised to who sends after finish()."""
    return CarrierLost("closed", "this side has finished: nothing more can be sent")


def ended_politely() -> CarrierLost:
    """The end that is no loss."""
    return CarrierLost("closed", "both sides have finished")


def is_forked() -> CarrierLost:
    """What is raised in a child process."""
    return CarrierLost("fault", "this process was forked; the connection belongs to its parent")


def retryable(error: CarrierLost) -> CarrierLost:
    """The same once more: one that is raised twice would keep the first one's frames, and their buffers, alive."""
    return CarrierLost(error.kind, error.reason)


def to_carrier_lost(error: quic.QuicError | quic.ForkedError) -> CarrierLost:
    """What a verb raises, and a sink is told, when the native package raised `error`."""
    if isinstance(error, quic.ConnectionLost):
        return CarrierLost(_KINDS.get(error.kind, "fault"), _reason(error))
    if isinstance(error, quic.EndpointClosed):
        return CarrierLost("closed", f"the endpoint is closed: {error}")
    if isinstance(error, quic.ForkedError):
        return is_forked()
    return CarrierLost("fault", str(error))


def close_code(error: CarrierLost) -> CloseCode:
    """What the peer is told when this side ends the connection with `error`."""
    return _CODES.get(error.kind, CloseCode.ABORTED)


def shorten(reason: str) -> str:
    """`reason`, cut to what a close can carry."""
    encoded = reason.encode()[:MAX_REASON_BYTES]
    return encoded.decode(errors="ignore")


def _reason(lost: quic.ConnectionLost) -> str:
    if lost.kind == "timed_out":
        return "silence for longer than the idle timeout"
    if lost.kind != "peer_closed":
        return lost.reason or lost.kind
    told = _MESSAGES.get(lost.code or 0, "the peer closed the connection")  # type: ignore[call-overload]
    return f"{told}: {foreign_line(lost.reason)}" if lost.reason else str(told)
