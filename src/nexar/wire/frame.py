"""The fixed header that starts every frame, and nothing else.

Law: a frame is HEADER_BYTES of header followed by exactly `body` bytes. The reader of a byte stream
therefore needs the header alone to find the next frame, whatever its kind means; a frame of an unknown
kind can be skipped, and a frame that claims too much is refused before a byte of memory is committed to it.

`length` is the size of the message's array, which travels in the body only when the kind carries it
whole (EAGER); of a large message the body holds the shape alone and `length` bytes follow as a payload.

Finding frames in a stream of bytes: FrameReader for tls, next_frame for quic (shared memory has its own records).

Law: bytes go in where `room()` says, frames come out of `next()`, in order, without a copy: a body is a view of the
reader's own buffer, valid until `room()` is called again. Memory follows the bytes that arrived: the buffer doubles
only when it is full of them, never on the word of a header, ends at MAX_BUFFER_BYTES and shrinks again once empty.
A reader that has raised FrameError stays at the bad bytes and raises again: a stream cannot be realigned.

One turn of a carrier, whether the read brought half a frame or fifty:

    count = socket.recv_into(reader.room())
    reader.filled(count)
    while (found := reader.next()) is not None:
        frame, body = found
        if frame.kind == Kind.CHUNK:
            self._take_chunk(frame, body)
        else:
            sink.frame_arrived(self, frame, body)

A CHUNK, and only a CHUNK, is handed over before it is whole, so that its bytes need not pass through this buffer:
`len(body)` of its `frame.body` bytes have come. The carrier copies those to their place and reads the other
`frame.body - len(body)` straight from its socket into the memory behind them; the reader, which is empty then, never
sees them. Only after that is `room()` asked for again.

A carrier that reads into a buffer of its own (a QUIC stream) uses `next_frame` and keeps its own positions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Final, TypeAlias

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


class FrameKind(IntEnum):
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


_EAGER: Final = int(FrameKind.EAGER)  # a member looked up in its enum class at every decode would cost a fifth of it


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
    return encode(Frame(kind=int(FrameKind.CONTROL), lane=int(Lane.CONTROL), length=body_bytes, body=body_bytes))


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


Bytes: TypeAlias = bytes | bytearray | memoryview
Decode: TypeAlias = Callable[[Bytes, int], Frame]
"""`wire.frame.decode`, or one that refuses more: FrameError before the body of a frame is waited for."""

MAX_FRAME_BYTES: Final = HEADER_BYTES + MAX_BODY_BYTES
MAX_CHUNK_BYTES: Final = 1 << 20
"""A payload delays frames by at most this much; a carrier may cut smaller pieces."""
MAX_BUFFER_BYTES: Final = MAX_FRAME_BYTES
"""A reader holds at most one frame of the largest size, or as many smaller ones as fit into that."""
FIRST_BUFFER_BYTES: Final = 64 << 10
UNVERIFIED_BUFFER_BYTES: Final = 16 << 10
"""The same for a peer that has not authenticated, whose frames are small."""
_LEAST_ROOM_BYTES: Final = 16 << 10  # a TLS record; a read into less would cost a system call per few bytes
_CHUNK: Final = int(
    FrameKind.CHUNK
)  # plain numbers: looking a member up in an enum class costs as much as a small decode
_FINISH: Final = int(FrameKind.FINISH)
_BULK: Final = int(Lane.BULK)
_CONTROL: Final = int(Lane.CONTROL)
_ZEROS: Final = (0,) * 16  # the fields from `carrier` to `message`, which mean nothing in a chunk


def next_frame(buffer: Bytes, start: int, end: int, decode: Decode = decode) -> tuple[Frame, int, int] | int:
    """The frame at `start` and the bounds of its body, or how many bytes beyond `end` are still missing.

    Before the header is whole its missing bytes are counted, after that the frame's. Raises FrameError.
    """
    body = start + HEADER_BYTES
    if body > end:
        return body - end
    frame = decode(buffer, start)
    stop = body + frame.body
    return (frame, body, stop) if stop <= end else stop - end


def encode_chunk(transfer: int, offset: int, size: int) -> bytes:
    """Header of the piece of payload `transfer` at byte `offset`; an empty payload is one piece of no bytes."""
    return pack_header(VERSION, _CHUNK, _BULK, *_ZEROS, transfer, 0, offset, size)


def encode_finish(count: int) -> bytes:
    """Header of the last frame of a side; `count` is what its carrier checks at the other end."""
    return pack_header(VERSION, _FINISH, _CONTROL, *_ZEROS, 0, 0, count, 0)


class FrameReader:
    """The receiving end of one byte stream. Not thread-safe: it belongs to the thread that drives."""

    __slots__ = ("_end", "_first_bytes", "_pending", "_start", "_view", "decode")

    def __init__(self, decode: Decode = decode, first_bytes: int = FIRST_BUFFER_BYTES) -> None:
        """`first_bytes`: of the buffer while it is empty."""
        self.decode = decode
        """Judges the headers from now on; may be replaced at any time."""
        self._first_bytes = first_bytes
        self._view = memoryview(bytearray(first_bytes))
        self._start = 0  # _view[_start:_end] has arrived and was not handed out yet
        self._end = 0
        self._pending: Frame | None = None  # header at _start, decoded, while its body is incomplete

    def room(self) -> memoryview:
        """Where the next bytes go; never empty once `next()` has said None. Views handed out before are void."""
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
        """`count` bytes were written to the beginning of `room()`."""
        self._end += count

    def next(self) -> tuple[Frame, memoryview] | None:
        """The next frame and its body, or None while it is incomplete. Raises FrameError.

        The body is whole, except that of a CHUNK (see the module): its missing bytes are the carrier's to read.
        """
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
        """Bytes that arrived and are not part of a frame handed out: not 0 at the end of a stream means it was cut."""
        return self._end - self._start

    @property
    def buffer_bytes(self) -> int:
        """Memory held."""
        return len(self._view)

    def _incomplete(self, frame: Frame) -> tuple[Frame, memoryview] | None:
        if frame.kind != _CHUNK:
            self._pending = frame
            return None
        arrived = self._view[self._start + HEADER_BYTES : self._end]
        self._start = self._end
        return frame, arrived

    def _make_room(self) -> None:
        """Move what is there to the front; if that frees too little, the buffer is full of arrived bytes: double it."""
        held = self._end - self._start
        if len(self._view) - held < _LEAST_ROOM_BYTES and len(self._view) < MAX_BUFFER_BYTES:
            self._resize(min(2 * len(self._view), MAX_BUFFER_BYTES))
            return
        self._view[:held] = self._view[self._start : self._end]
        self._start, self._end = 0, held

    def _resize(self, size: int) -> None:
        # The old buffer lives on as long as somebody still holds a view of it; nothing is resized in place.
        held = self._end - self._start
        view = memoryview(bytearray(size))
        view[:held] = self._view[self._start : self._end]
        self._view = view
        self._start, self._end = 0, held
