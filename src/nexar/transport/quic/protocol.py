"""Stream preambles, close codes, and the translation of native errors into CarrierLost.

Streams are unidirectional. Each starts with a preamble of PREAMBLE_BYTES that names its type:

ORDERED       frames until the end of the stream. `number` (communicator) and `lane` are informative, for captures.
PAYLOAD       exactly the `size` bytes of payload `number`.
ALL_RECEIVED  nothing. The sender has finished and has received everything that its peer announced.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from nexar.transport.base import CarrierLost
from nexar.wire.text import foreign_line

if TYPE_CHECKING:
    from nexar.native import quic

VERSION: Final = 1
_LAYOUT: Final = struct.Struct("<BBB5xQQ")
PREAMBLE_BYTES: Final = _LAYOUT.size


class StreamType(IntEnum):
    """Numbers are the wire format: never reuse one."""

    ORDERED = 1
    PAYLOAD = 2
    ALL_RECEIVED = 3


class Preamble(NamedTuple):
    """A decoded preamble."""

    type: StreamType
    lane: int
    number: int
    size: int


class PreambleError(ValueError):
    """The stream does not start with a valid preamble."""


def encode_preamble(stream_type: StreamType, number: int = 0, *, lane: int = 0, size: int = 0) -> bytes:
    """Return the first bytes of a stream."""
    return _LAYOUT.pack(VERSION, stream_type, lane, number, size)


def decode_preamble(buffer: bytes | bytearray) -> Preamble:
    """Raises PreambleError."""
    version, stream_type, lane, number, size = _LAYOUT.unpack_from(buffer)
    if version != VERSION:
        raise PreambleError(f"a stream of preamble version {version}; ours is {VERSION}")
    try:
        return Preamble(StreamType(stream_type), lane, number, size)
    except ValueError as error:
        raise PreambleError(f"a stream of unknown type {stream_type}") from error


MAX_REASON_BYTES: Final = 512  # a reason must fit into one packet


class CloseCode(IntEnum):
    """Sent to the peer; 0: closed without a reason. Never reuse a number."""

    DONE = 1  # both sides have finished and received everything
    ABORTED = 2
    MISBEHAVED = 3  # the peer violated the protocol
    REFUSED = 4  # the handshake succeeded with the wrong peer
    FAULT = 5  # an error on this side


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


def finished_error() -> CarrierLost:
    """Return the error for sending after finish()."""
    return CarrierLost("closed", "this side has finished: nothing more can be sent")


def orderly_end() -> CarrierLost:
    """Return the error of an end without loss."""
    return CarrierLost("closed", "both sides have finished")


def forked_error() -> CarrierLost:
    """Return the error in a forked child."""
    return CarrierLost("fault", "this process was forked; the connection belongs to its parent")


def fresh_copy(error: CarrierLost) -> CarrierLost:
    """Return a copy: raising one object twice would keep the first traceback and its buffers alive."""
    return CarrierLost(error.kind, error.reason)


def to_carrier_lost(error: quic.QuicError | quic.ForkedError) -> CarrierLost:
    """Translate an error of the native package."""
    from nexar.native import quic  # noqa: PLC0415 - preambles need no native package

    if isinstance(error, quic.ConnectionLost):
        return CarrierLost(_KINDS.get(error.kind, "fault"), _reason(error))
    if isinstance(error, quic.EndpointClosed):
        return CarrierLost("closed", f"the endpoint is closed: {error}")
    if isinstance(error, quic.ForkedError):
        return forked_error()
    return CarrierLost("fault", str(error))


def close_code(error: CarrierLost) -> CloseCode:
    """Translate an error for the peer."""
    return _CODES.get(error.kind, CloseCode.ABORTED)


def shorten(reason: str) -> str:
    """Cut `reason` to MAX_REASON_BYTES."""
    encoded = reason.encode()[:MAX_REASON_BYTES]
    return encoded.decode(errors="ignore")


def _reason(lost: quic.ConnectionLost) -> str:
    if lost.kind == "timed_out":
        return "no packet for longer than the idle timeout"
    if lost.kind != "peer_closed":
        return lost.reason or lost.kind
    told = _MESSAGES.get(lost.code or 0, "the peer closed the connection")  # type: ignore[call-overload]
    return f"{told}: {foreign_line(lost.reason)}" if lost.reason else str(told)
