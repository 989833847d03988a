"""Frames on their way out: into the ring at once, or into a queue per lane while the ring is full."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from nexar.transport.base import Buffer
from nexar.transport.shm.ring import LAST, MORE, RingWriter
from nexar.wire.frame import Lane

FINAL: Final = len(Lane)
"""The queue behind every lane: FINISH waits there until all else has left."""


def flat(part: Buffer) -> Buffer:
    """The same bytes as a plain row of bytes; a view of floats or of a matrix would not count them."""
    if not isinstance(part, memoryview) or (part.format == "B" and part.ndim == 1):
        return part
    return part.cast("B") if part.nbytes else b""


class FrameSender:
    """Called from any thread. Frames of one lane leave in the order they came; of several that wait, the lowest lane
    first.
    """

    __slots__ = (
        "_acquire",
        "_largest",
        "_limit",
        "_positions",
        "_queued",
        "_queues",
        "_release",
        "_ring",
        "frames_sent",
        "waiting",
    )

    def __init__(self, ring: RingWriter) -> None:
        lock = threading.Lock()  # over everything below and the ring; bound once, it is taken for every frame
        self._acquire = lock.acquire
        self._release = lock.release
        self._ring = ring
        self._largest = ring.largest
        self._limit = ring.largest  # -1 after send_last or close: nothing fits, so that needs no question of its own
        self._queues: tuple[deque[bytes], ...] = tuple(deque() for _ in range(FINAL + 1))
        self._queued = [0] * (FINAL + 1)  # bytes in each queue
        self._positions = [0] * (FINAL + 1)  # how much of the first frame in each queue is in the ring already
        self.waiting = False  # some queue is not empty; written under the lock, read without it
        self.frames_sent = 0

    def send(self, lane: int, header: bytes, body: tuple[Buffer, ...], size: int) -> bool:
        """Copy one frame of `size` bytes in all. True: it is in the ring, False: it waits. Corrupt; ValueError after
        send_last or close.
        """
        self._acquire()
        try:
            self.frames_sent += 1
            if not self.waiting and size <= self._limit and self._ring.write(header, body, size):
                return True
            if self._limit < 0:
                raise ValueError("nothing more can be sent")
            self._queues[lane].append(b"".join((header, *body)))
            self._queued[lane] += size
            self.waiting = True
            return self._flush()
        finally:
            self._release()  # also the fence between the new head and the look at the peer's sleeping word

    def send_last(self, header: bytes) -> None:
        """Let this frame follow all that were sent, and none follow it. Corrupt."""
        self._acquire()
        try:
            self._limit = -1
            self._queues[FINAL].append(header)
            self._queued[FINAL] += len(header)
            self.waiting = True
            self._flush()
        finally:
            self._release()

    def flush(self) -> bool:
        """Move what fits now; True if anything moved. Corrupt."""
        self._acquire()
        try:
            before = sum(self._queued)
            self._flush()
            return sum(self._queued) != before
        finally:
            self._release()

    def _flush(self) -> bool:
        for lane, queue in enumerate(self._queues):
            while queue:
                if not self._write(lane, queue[0]):
                    return False  # what waits behind must not overtake for ever, so nobody passes
                queue.popleft()
                self._positions[lane] = 0
        self.waiting = False
        return True

    def _write(self, lane: int, frame: bytes) -> bool:
        if len(frame) > self._largest:
            return self._write_pieces(lane, frame)
        if not self._ring.write(frame, (), len(frame)):
            return False
        self._queued[lane] -= len(frame)
        return True

    def _write_pieces(self, lane: int, frame: bytes) -> bool:
        start = self._positions[lane]
        while start < len(frame):
            end = min(start + self._largest, len(frame))
            kind = LAST if end == len(frame) else MORE
            if not self._ring.write(memoryview(frame)[start:end], (), end - start, kind << 32 | lane << 40):
                return False
            self._queued[lane] -= end - start
            self._positions[lane] = start = end
        return True

    @property
    def bytes_sent(self) -> int:
        """What went into the ring."""
        return self._ring.written

    def queued_bytes(self, lane: int) -> int:
        """Bytes of this lane that are not in the ring yet."""
        return self._queued[lane]

    def can_move(self) -> bool:
        """Whether a flush may get further than the last one."""
        return self.waiting and self._ring.room_grew()

    def close(self) -> None:
        """Forget what waits. When this returns nobody touches the ring, nor will: `send` raises ValueError."""
        self._acquire()
        try:
            self._limit = -1
            for queue in self._queues:
                queue.clear()
            self._queued = [0] * (FINAL + 1)
            self.waiting = False
        finally:
            self._release()
