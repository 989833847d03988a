"""The fixed header that starts every frame, and nothing else.

Law: a frame is HEADER_BYTES of header followed by exactly `body` bytes. The reader of a byte stream
therefore needs the header alone to find the next frame, whatever its kind means; a frame of an unknown
kind can be skipped, and a frame that claims too much is refused before a byte of memory is committed to it.

`length` is the size of the message's array, which travels in the body only when the kind carries it
whole (EAGER); of a large message the body holds the shape alone and `length` bytes follow as a payload.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

import msgspec
from msgspec.structs import astuple

VERSION: Final = 1
MAX_BODY_BYTES: Final = (1 << 20) + (64 << 10)
"""No frame carries more in its body: 1 MiB of payload (a chunk, or the largest control message) and room for shapes."""
MAX_DIMENSIONS: Final = 32

# version kind lane carrier space dtype dimensions operation reduce_op way | generation step root
# communicator source destination tag sequence message transfer length count | body
_LAYOUT: Final = struct.Struct("<10B2xIIIQQQQQQQQQI4x")
HEADER_BYTES: Final = _LAYOUT.size
_DIMENSIONS: Final = tuple(struct.Struct(f"<{n}Q") for n in range(MAX_DIMENSIONS + 1))

unpack_header = _LAYOUT.unpack_from
pack_header = _LAYOUT.pack


class Kind(IntEnum):
    """What a frame is. Numbers are the wire format: never reuse one."""

    EAGER = 1  # a whole message: shape, then `length` bytes
    ENVELOPE = 2  # a message whose payload waits for a grant: shape only
    GRANT = 3  # receiver → sender: send payload `transfer` now, from its beginning, on `carrier`
    DELIVERED = 4  # receiver → sender: payload `transfer` has arrived whole
    REFUSE = 5  # receiver → sender: payload `transfer` is not wanted; the body says why
    WITHDRAW = 6  # sender → receiver: message `transfer` is taken back
    CREDIT = 7  # receiver → sender: `length` bytes of credit for `communicator` are free again
    CONTROL = 8  # a control message: body is wire.messages
    CHUNK = 9  # a piece of payload `transfer`, starting at byte `count` (carriers without streams of their own)
    FINISH = 10  # no frame follows from this side (half-close); `count` is what the carrier needs to check it
    HELLO = 11  # first frame of a connection that needs one: its body is the transport's own
    TERMS = 12  # first frame of a link on each carrier: `length` is the credit of a flow, `transfer` a sidecar's name
    FALLBACK = 13  # the sidecar that your terms called `transfer` is lost here: what flows on it is granted anew
    RELAY = 14  # something on its way between two other nodes, or over others to you: body is wire.relay
    ROOM = 15  # `length` bytes of what you gave me to relay after `step` hops have gone on: send more


_EAGER: Final = int(Kind.EAGER)  # a member looked up in its enum class at every decode would cost a fifth of it


class Lane(IntEnum):
    """Kind of traffic on a link; a lower number leaves first."""

    CONTROL = 0
    RPC = 1
    DATA = 2
    BULK = 3
    RELAY = 4


class Space(IntEnum):
    """Tags of different spaces never match one another."""

    TAGGED = 0  # the user's tag
    UNTAGGED = 1
    COLLECTIVE = 2  # tag is unused: operation sequence and step are the conversation
    PART = 3  # the rest of a message that came in parts: tag is the number that its first part gave
    CALL = 4  # a remote call, or a word about one: tag is the number that its caller gave it
    ANSWER = 5  # to a remote call: tag is that number
    CLOSED = 6  # no body: its sender has closed the communicator, and this is its last message there


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A decoded header. Field order is the wire order. (A struct, because it is made and read for every message: its
    fields cost a third of a named tuple's. Of numbers alone, so there is nothing to collect.)
    """

    version: int = VERSION
    kind: int = 0
    lane: int = 0
    carrier: int = 0
    space: int = 0
    dtype: int = 0
    dimensions: int = 0
    operation: int = 0
    reduce_op: int = 0
    way: int = 0
    generation: int = 0
    step: int = 0
    root: int = 0
    communicator: int = 0
    source: int = 0
    destination: int = 0
    tag: int = 0
    sequence: int = 0
    message: int = 0
    transfer: int = 0
    length: int = 0
    count: int = 0
    body: int = 0


class FrameError(ValueError):
    """Bytes that are not a frame. `field` names what is wrong."""

    def __init__(self, field: str, found: int, allowed: str) -> None:
        super().__init__(f"frame with {field} {found}; allowed: {allowed}")
        self.field = field
        self.found = found
        self.allowed = allowed


def encode(frame: Frame) -> bytes:
    """The header's bytes. The body is the caller's to append."""
    return pack_header(*astuple(frame))


def control_header(body_bytes: int) -> bytes:
    """The header of a control message on a connection that is no link: there are no nodes to name yet."""
    return encode(Frame(kind=int(Kind.CONTROL), lane=int(Lane.CONTROL), length=body_bytes, body=body_bytes))


def decode(buffer: bytes | bytearray | memoryview, offset: int = 0) -> Frame:
    """The header at `offset`, checked so far as any reader needs: version, sizes. Raises FrameError.

    Unknown kinds and lanes pass: dropping and counting them is the link's decision, not the codec's.
    """
    fields = unpack_header(buffer, offset)
    extents, length, body = fields[6] * 8, fields[20], fields[22]  # by place: names cost, and this is every frame's way
    if fields[0] != VERSION or body > MAX_BODY_BYTES or extents > body:
        raise _fault(Frame(*fields))
    if fields[1] == _EAGER and body != extents + length:
        raise FrameError("body", body, f"{fields[6]} dimensions + {length} bytes of message")
    return Frame(*fields)


def _fault(frame: Frame) -> FrameError:
    if frame.version != VERSION:
        return FrameError("version", frame.version, str(VERSION))
    if frame.body > MAX_BODY_BYTES:
        return FrameError("body", frame.body, f"at most {MAX_BODY_BYTES} bytes")
    return FrameError("dimensions", frame.dimensions, f"at most {frame.body // 8} in a body of {frame.body} bytes")


def encode_shape(shape: tuple[int, ...]) -> bytes:
    """The first bytes of an EAGER or ENVELOPE body."""
    return _DIMENSIONS[len(shape)].pack(*shape)


def decode_shape(frame: Frame, body: bytes | bytearray | memoryview) -> tuple[int, ...]:
    """The shape that `frame` announces at the start of its body. Raises FrameError."""
    if frame.dimensions > MAX_DIMENSIONS:
        raise FrameError("dimensions", frame.dimensions, f"at most {MAX_DIMENSIONS}")
    return _DIMENSIONS[frame.dimensions].unpack_from(body)
