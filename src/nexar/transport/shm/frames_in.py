"""Frames on their way in: straight out of the ring, or joined from pieces when they were too large for it."""

from __future__ import annotations

from typing import Final

from nexar.transport.shm.frames_out import FINAL
from nexar.transport.shm.ring import LAST, MORE, Corrupt, RingReader
from nexar.wire.frame import HEADER_BYTES, MAX_BODY_BYTES, Frame, FrameError, decode

_MAX_FRAME_BYTES: Final = HEADER_BYTES + MAX_BODY_BYTES


class FrameReceiver:
    """Used by the driving thread only. `next`, deliver, `advance`; until then the bytes belong to the frame."""

    __slots__ = ("_joining", "_ring", "body", "bytes_received", "frames_received")

    def __init__(self, ring: RingReader) -> None:
        self._ring = ring
        self._joining: dict[int, bytearray] = {}  # lane → the pieces so far; grows only by bytes that arrived
        self.body = memoryview(b"")
        self.frames_received = 0
        self.bytes_received = 0

    def next(self) -> Frame | None:
        """The oldest frame, its body in `body`, or None. Corrupt."""
        ring = self._ring
        at = ring.next()
        while at >= 0 and ring.mark:
            whole = self._join(at)
            if whole is not None:
                return self._frame(whole, 0, len(whole))
            ring.advance()
            at = ring.next()
        return None if at < 0 else self._frame(ring.data, at, ring.size)

    def _frame(self, data: memoryview, at: int, size: int) -> Frame:
        if size < HEADER_BYTES:
            raise Corrupt(f"a frame of {size} bytes")
        try:
            frame = decode(data, at)  # copies the header out, then checks the copy: the peer may be writing here still
        except FrameError as error:
            raise Corrupt(str(error)) from error
        if frame.body != size - HEADER_BYTES:
            raise Corrupt(f"a frame with a body of {frame.body} bytes in a record of {size}")
        self.frames_received += 1
        self.bytes_received += size
        self.body = data[at + HEADER_BYTES : at + size]
        return frame

    def _join(self, at: int) -> memoryview | None:
        ring = self._ring
        kind, lane = ring.mark & 0xFF, ring.mark >> 8
        if kind not in (MORE, LAST) or lane > FINAL:
            raise Corrupt(f"a record of kind {kind} on lane {lane}")
        pieces = self._joining.setdefault(lane, bytearray())
        pieces += ring.data[at : at + ring.size]
        if len(pieces) > _MAX_FRAME_BYTES:
            raise Corrupt(f"pieces of more than {_MAX_FRAME_BYTES} bytes")
        return memoryview(self._joining.pop(lane)) if kind == LAST else None

    def advance(self) -> None:
        """The frame was delivered: its bytes may be overwritten."""
        self._ring.advance()

    def close(self) -> None:
        """Let go of the memory."""
        self.body = memoryview(b"")
        self._joining.clear()
