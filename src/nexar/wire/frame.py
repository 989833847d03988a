"""The frame header, and FrameReader and next_frame, which find frames in a byte stream.

A frame is HEADER_BYTES of header and `body` bytes. So a reader can skip an unknown kind, and rejects an oversized frame
before it allocates memory. `length` is the size of the message's array: in the body of EAGER, a payload after ENVELOPE.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Final, TypeAlias

import msgspec
from msgspec.structs import astuple

VERSION: Final = 1
# 1 MiB of payload (a chunk, or the largest control message), and room for shapes
MAX_BODY_BYTES: Final = (1 << 20) + (64 << 10)
MAX_DIMENSIONS: Final = 32

# version kind lane carrier space dtype dimensions operation reduce_op way | generation step root
# communicator source destination tag sequence message transfer length count | body
_LAYOUT: Final = struct.Struct("<10B2xIIIQQQQQQQQQI4x")
HEADER_BYTES: Final = _LAYOUT.size
_DIMENSIONS: Final = tuple(struct.Struct(f"<{n}Q") for n in range(MAX_DIMENSIONS + 1))

unpack_header = _LAYOUT.unpack_from
pack_header = _LAYOUT.pack


class FrameKind(IntEnum):
    """Numbers are the wire format: never reuse one."""

    EAGER = 1  # a whole message: shape, then `length` bytes
    ENVELOPE = 2  # a message whose payload waits for a grant: shape only
    GRANT = 3  # receiver → sender: send payload `transfer` now, from its beginning, on `carrier`
    DELIVERED = 4  # receiver → sender: payload `transfer` has arrived whole
    REFUSE = 5  # receiver → sender: payload `transfer` is not wanted; the body is the reason
    WITHDRAW = 6  # sender → receiver: message `transfer` is cancelled
    CREDIT = 7  # receiver → sender: `length` bytes of credit for `communicator` are free again
    CONTROL = 8  # a control message: the body is wire.control
    CHUNK = 9  # a piece of payload `transfer`, starting at byte `count` (carriers without streams)
    FINISH = 10  # half-close: no frame follows from this side; `count` lets the carrier check that
    HELLO = 11  # first frame of a connection that needs one: the transport defines its body
    TERMS = 12  # first frame on each carrier of a link: `length` is a flow's credit, `transfer` names a bulk channel
    FALLBACK = 13  # the bulk channel that your TERMS named `transfer` is lost: its receiver grants its payloads again
    RELAY = 14  # a frame that other nodes forward to its destination: the body is wire.relay
    RELAY_CREDIT = 15  # `length` bytes that you gave me to relay after `step` hops are forwarded: send more


_EAGER: Final = int(FrameKind.EAGER)  # looking up an enum member in every decode would cost a fifth of it


class Lane(IntEnum):
    """Traffic class on a link; lower numbers are sent first."""

    CONTROL = 0
    RPC = 1
    DATA = 2
    BULK = 3
    RELAY = 4


class Space(IntEnum):
    """Tag namespace. Tags of different spaces never match."""

    TAGGED = 0  # tag: chosen by the user
    UNTAGGED = 1
    COLLECTIVE = 2  # tag: unused; operation sequence and step identify the message
    PART = 3  # the rest of a message that came in parts; tag: the number that the first part gave
    CALL = 4  # a remote call, or its cancellation; tag: the caller's number of the call
    ANSWER = 5  # answer to a remote call; tag: the number of the call
    CLOSED = 6  # no body: the sender closed the communicator, and this is its last message in it


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A decoded header, in wire order. Not a named tuple, whose fields cost three times as much."""

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
    """The bytes are not a valid frame."""

    def __init__(self, field: str, found: int, allowed: str) -> None:
        super().__init__(f"frame with {field} {found}; allowed: {allowed}")
        self.field = field
        self.found = found
        self.allowed = allowed


def encode(frame: Frame) -> bytes:
    """Return the header's bytes, without the body."""
    return pack_header(*astuple(frame))


def control_header(body_bytes: int) -> bytes:
    """Return the header of a control message, without node ids: the connection is not a link yet."""
    return encode(Frame(kind=int(FrameKind.CONTROL), lane=int(Lane.CONTROL), length=body_bytes, body=body_bytes))


def decode(buffer: bytes | bytearray | memoryview, offset: int = 0) -> Frame:
    """Return the header at `offset`. Raise FrameError for a wrong version or size.

    Unknown kinds and lanes pass: the link drops and counts them.
    """
    fields = unpack_header(buffer, offset)
    extents, length, body = fields[6] * 8, fields[20], fields[22]  # by index: names cost time in every frame
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
    """Return the first bytes of an EAGER or ENVELOPE body."""
    return _DIMENSIONS[len(shape)].pack(*shape)


def decode_shape(frame: Frame, body: bytes | bytearray | memoryview) -> tuple[int, ...]:
    """Return the shape. Raise FrameError for too many dimensions."""
    if frame.dimensions > MAX_DIMENSIONS:
        raise FrameError("dimensions", frame.dimensions, f"at most {MAX_DIMENSIONS}")
    return _DIMENSIONS[frame.dimensions].unpack_from(body)


Bytes: TypeAlias = bytes | bytearray | memoryview
# `decode`, or a stricter one: it raises FrameError before the reader waits for the frame's body
Decode: TypeAlias = Callable[[Bytes, int], Frame]

MAX_FRAME_BYTES: Final = HEADER_BYTES + MAX_BODY_BYTES
MAX_CHUNK_BYTES: Final = 1 << 20  # the longest delay of other frames by a payload; a carrier may send smaller pieces
MAX_BUFFER_BYTES: Final = MAX_FRAME_BYTES  # one frame of the largest size, or the smaller ones that fit into that
FIRST_BUFFER_BYTES: Final = 64 << 10
UNVERIFIED_BUFFER_BYTES: Final = 16 << 10  # for an unauthenticated peer, whose frames are small
_LEAST_ROOM_BYTES: Final = 16 << 10  # a TLS record; reading into less costs a system call per few bytes
_CHUNK: Final = int(FrameKind.CHUNK)  # ints: an enum lookup costs as much as a small decode
_FINISH: Final = int(FrameKind.FINISH)
_BULK: Final = int(Lane.BULK)
_CONTROL: Final = int(Lane.CONTROL)
_ZEROS: Final = (0,) * 16  # the fields from `carrier` to `message`, unused in a chunk


def next_frame(buffer: Bytes, start: int, end: int, decode: Decode = decode) -> tuple[Frame, int, int] | int:
    """Return the frame at `start` and the bounds of its body, or the number of bytes missing from the header or the
    frame. Raise FrameError.
    """
    body = start + HEADER_BYTES
    if body > end:
        return body - end
    frame = decode(buffer, start)
    stop = body + frame.body
    return (frame, body, stop) if stop <= end else stop - end


def encode_chunk(transfer: int, offset: int, size: int) -> bytes:
    """Return the header of a piece of payload; an empty payload has one."""
    return pack_header(VERSION, _CHUNK, _BULK, *_ZEROS, transfer, 0, offset, size)


def encode_finish(count: int) -> bytes:
    """Return the header of FINISH, whose `count` the peer checks."""
    return pack_header(VERSION, _FINISH, _CONTROL, *_ZEROS, 0, 0, count, 0)


class FrameReader:
    """The receiving end of one byte stream (tls). Driver only.

    Write to `room()`, call `filled()`, then `next()` until None. The buffer grows up to MAX_BUFFER_BYTES, and only when
    full of arrived bytes, not because of an announced size. After a FrameError every call raises: a stream cannot be
    realigned.

    Only a CHUNK is returned incomplete: the caller reads the missing `frame.body - len(body)` bytes from its socket
    before it calls `room()` again.
    """

    __slots__ = ("_end", "_first_bytes", "_pending", "_start", "_view", "decode")

    def __init__(self, decode: Decode = decode, first_bytes: int = FIRST_BUFFER_BYTES) -> None:
        self.decode = decode  # checks the next headers; may be replaced at any time
        self._first_bytes = first_bytes
        self._view = memoryview(bytearray(first_bytes))
        self._start = 0  # _view[_start:_end] arrived and is not returned yet
        self._end = 0
        self._pending: Frame | None = None  # header at _start, decoded, while its body is incomplete

    def room(self) -> memoryview:
        """Return where to write; not empty after `next()` returned None. Invalidates earlier bodies."""
        start, end = self._start, self._end
        if start == end:
            if len(self._view) != self._first_bytes:
                self._resize(self._first_bytes)
            self._start = self._end = 0
            return self._view
        if len(self._view) - end < _LEAST_ROOM_BYTES:
            self._make_room()
        return self._view[self._end :]

    def filled(self, count: int) -> None:
        self._end += count

    def next(self) -> tuple[Frame, memoryview] | None:
        """Return the next frame and its body, or None. Raise FrameError."""
        start = self._start
        frame = self._pending
        if frame is None:
            if self._end - start < HEADER_BYTES:
                return None
            frame = self.decode(self._view, start)
        stop = start + HEADER_BYTES + frame.body
        if stop > self._end:
            return self._incomplete(frame)
        self._start = stop
        self._pending = None
        return frame, self._view[start + HEADER_BYTES : stop]

    @property
    def buffered_bytes(self) -> int:
        """Not 0 at the end of a truncated stream."""
        return self._end - self._start

    @property
    def buffer_bytes(self) -> int:
        return len(self._view)

    def _incomplete(self, frame: Frame) -> tuple[Frame, memoryview] | None:
        if frame.kind != _CHUNK:
            self._pending = frame
            return None
        arrived = self._view[self._start + HEADER_BYTES : self._end]
        self._start = self._end
        return frame, arrived

    def _make_room(self) -> None:
        held = self._end - self._start
        if len(self._view) - held < _LEAST_ROOM_BYTES and len(self._view) < MAX_BUFFER_BYTES:
            self._resize(min(2 * len(self._view), MAX_BUFFER_BYTES))
            return
        self._view[:held] = self._view[self._start : self._end]
        self._start, self._end = 0, held

    def _resize(self, size: int) -> None:
        # A new buffer, because others may hold views of the old one.
        held = self._end - self._start
        view = memoryview(bytearray(size))
        view[:held] = self._view[self._start : self._end]
        self._view = view
        self._start, self._end = 0, held
