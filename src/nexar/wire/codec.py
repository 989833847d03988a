"""Finding frames in a stream of bytes: FrameReader for tls, next_frame for quic (shared memory has its own records).

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

from collections.abc import Callable
from typing import Final, TypeAlias

from nexar.wire.frame import HEADER_BYTES, MAX_BODY_BYTES, VERSION, Frame, Kind, Lane, decode, pack_header

Bytes: TypeAlias = bytes | bytearray | memoryview
Decode: TypeAlias = Callable[[Bytes, int], Frame]
"""`wire.frame.decode`, or one that refuses more: FrameError before the body of a frame is waited for."""

MAX_FRAME_BYTES: Final = HEADER_BYTES + MAX_BODY_BYTES
MAX_CHUNK_BYTES: Final = 1 << 20
"""A payload delays frames by at most this much; a carrier may cut smaller pieces."""
MAX_BUFFER_BYTES: Final = MAX_FRAME_BYTES
"""A reader holds at most one frame of the largest size, or as many smaller ones as fit into that."""
FIRST_BUFFER_BYTES: Final = 64 << 10
STRANGER_BUFFER_BYTES: Final = 16 << 10
"""The same for a peer that has not authenticated, whose frames are small."""
_LEAST_ROOM_BYTES: Final = 16 << 10  # a TLS record; a read into less would cost a system call per few bytes
_CHUNK: Final = int(Kind.CHUNK)  # plain numbers: looking a member up in an enum class costs as much as a small decode
_FINISH: Final = int(Kind.FINISH)
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
