"""Frames on their way in: straight out of the ring, or joined from pieces when they were too large for it."""

from __future__ import annotations

import struct
from typing import Final

from nexar.transport.shm.frames_out import FINAL
from nexar.transport.shm.ring import DOWN, LAST, MORE, PAD, PREFIX_BYTES, UP, Corrupt, RingReader, largest_record
from nexar.wire.frame import HEADER_BYTES, MAX_BODY_BYTES, Frame, FrameError, decode

_MAX_FRAME_BYTES: Final = HEADER_BYTES + MAX_BODY_BYTES
_NO_BODY: Final = memoryview(b"")


class FrameReader(RingReader):
    """A ring reader that knows what records are. `next_frame`, deliver, `advance`; until then the bytes stay."""

    __slots__ = ("_joining", "_largest", "body", "frames_received")

    def __init__(self, counters: memoryview, head_word: int, tail_word: int, data: memoryview) -> None:
        super().__init__(counters, head_word, tail_word, data)
        self._largest = largest_record(len(data))
        self._joining: dict[int, bytearray] = {}  # lane → the pieces so far; grows only by bytes that arrived
        self.body = _NO_BODY
        self.frames_received = 0

    def next_frame(self) -> Frame | None:
        """The frame that the oldest record brings, its body in `body`; None if it brings none yet. Corrupt.

        A plain frame's word is just its size, so one comparison tells it from everything else.
        """
        at = self.tail & self._mask
        size: int = self._words[at >> 3]
        if size > self._largest:
            return self._unusual()
        self._span = span = (size + UP) & DOWN
        if at + span > self._capacity or self.tail + span > self.head:
            raise Corrupt(f"record of {size} bytes at {at} reaches beyond what was written")
        return self._decode(self.data, at + PREFIX_BYTES, size)

    def _decode(self, data: memoryview, at: int, size: int) -> Frame:
        try:
            frame = decode(data, at)  # copies the header out, then checks the copy: the peer may be writing here still
        except (FrameError, struct.error) as error:
            raise Corrupt(f"a record of {size} bytes that is no frame: {error}") from error
        if frame.body != size - HEADER_BYTES:
            raise Corrupt(f"a frame with a body of {frame.body} bytes in a record of {size}")
        self.frames_received += 1
        self.body = data[at + HEADER_BYTES : at + size]
        return frame

    def _unusual(self) -> Frame | None:
        at = self.next()
        self.body = _NO_BODY
        if self.mark == PAD:
            self._check_padding(at - PREFIX_BYTES)
            return None
        kind, lane = self.mark & 0xFF, self.mark >> 8
        if kind not in (MORE, LAST) or lane > FINAL or self.size > self._largest:
            raise Corrupt(f"a record of kind {kind}, lane {lane} and {self.size} bytes")
        return self._join(lane, self.data[at : at + self.size], last=kind == LAST)

    def _check_padding(self, at: int) -> None:
        if at == 0 or at + self._span != self._capacity:
            raise Corrupt(f"padding of {self._span} bytes at {at}")

    def _join(self, lane: int, piece: memoryview, *, last: bool) -> Frame | None:
        pieces = self._joining.setdefault(lane, bytearray())
        pieces += piece
        if len(pieces) > _MAX_FRAME_BYTES:
            raise Corrupt(f"pieces of more than {_MAX_FRAME_BYTES} bytes")
        if not last:
            return None
        del self._joining[lane]
        return self._decode(memoryview(pieces), 0, len(pieces))

    def release(self) -> None:
        """Let go of the memory."""
        self.body = _NO_BODY
        self._joining.clear()
        super().release()
