"""One relayed carrier's two directions: what is sent, numbered and kept until it is acknowledged; what arrives, put in
order. No I/O, no lock: both belong to their station's.

Hops are reliable as long as they live; when one dies, what it held is gone, and so may be what was on its way to it. So
the source keeps what it sent until the destination has it, and sends it again along another route when it hears that a
hop is gone, or when the destination, asked, says that it does not have it. Only so much is under way at a time. What
comes twice is dropped, what comes too early is held.

Lanes   A lower lane leaves first, payloads last, one chunk at a time: numbers are given when a frame leaves, so what
        is urgent waits for no more than what is under way already.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from nexar.transport.base import Buffer
from nexar.wire.codec import encode_chunk, encode_finish
from nexar.wire.frame import Lane

WINDOW_BYTES: Final = 1 << 20
"""Under way at a time, from end to end. One frame always may be, however large."""
ACK_BYTES: Final = WINDOW_BYTES // 4
"""The destination says what it has after so many bytes; or when it is asked, or has something to say anyway."""
CHUNK_BYTES: Final = 64 << 10
_MOST_EARLY: Final = 4096
_LANES: Final = len(Lane)


class Parcel(NamedTuple):
    """A frame with its number."""

    sequence: int
    data: bytes


class Outgoing:
    """What this side sends."""

    def __init__(self) -> None:
        self._lanes: tuple[deque[bytes], ...] = tuple(deque() for _ in range(_LANES))
        self._queued = [0] * _LANES
        self._payloads: dict[int, tuple[memoryview, int]] = {}  # by transfer: what, and how much of it has left
        self._unacked: deque[Parcel] = deque()
        self._unacked_bytes = 0
        self._again: deque[Parcel] = deque()
        self._next = 0
        self._finished = 0  # 1: asked for, 2: it has left
        self.frames = 0
        self.frame_bytes = 0
        self.payload_bytes = 0
        self.resent = 0

    def put(self, lane: int, data: bytes) -> None:
        """A frame, header and body."""
        self._lanes[lane].append(data)
        self._queued[lane] += len(data)
        self.frames += 1
        self.frame_bytes += len(data)

    def queued_bytes(self, lane: int) -> int:
        """Frames of this lane that have not left yet."""
        return self._queued[lane]

    def lend(self, transfer: int, data: memoryview) -> None:
        """A payload; its memory is read until it has left, or is withdrawn."""
        if transfer in self._payloads:
            raise ValueError(f"payload {transfer} is being sent already")
        self._payloads[transfer] = data, 0

    def withdraw(self, transfer: int) -> None:
        """What has left of it has left."""
        self._payloads.pop(transfer, None)

    def finish(self) -> None:
        """Behind everything else: nothing follows."""
        self._finished = self._finished or 1

    @property
    def finished(self) -> bool:
        """Whether it has been asked for."""
        return bool(self._finished)

    @property
    def has_finished(self) -> bool:
        """Whether the last word has left."""
        return self._finished == 2

    @property
    def unacked(self) -> int:
        """How many have left and may not have arrived."""
        return len(self._unacked)

    @property
    def is_settled(self) -> bool:
        """Whether all of it has arrived; of what has finished, all that anybody waits for."""
        return bool(self._finished) or not (self._unacked or self._payloads or any(self._lanes))

    def take(self) -> Parcel | None:
        """What leaves next; None: nothing, or not now."""
        if self._again:
            self.resent += 1
            return self._again.popleft()
        if self._unacked_bytes >= WINDOW_BYTES:
            return None
        data = self._next_frame() or self._next_chunk() or self._last_word()
        if data is None:
            return None
        parcel = Parcel(self._next, data)
        self._next += 1
        self._unacked.append(parcel)
        self._unacked_bytes += len(data)
        return parcel

    def acked(self, ack: int) -> bool:
        """The destination has everything below this number. True: that is news. A number that has not been given yet
        is nobody's, and says nothing.
        """
        if ack > self._next:
            return False
        before = len(self._unacked)
        while self._unacked and self._unacked[0].sequence < ack:
            self._unacked_bytes -= len(self._unacked.popleft().data)
        while self._again and self._again[0].sequence < ack:
            self._again.popleft()
        return len(self._unacked) < before

    def send_again(self, below: int | None = None) -> None:
        """Everything that has not been acknowledged, or of that what has a lower number than `below`: in order, before
        anything new.
        """
        limit = self._next if below is None else below
        self._again = deque(parcel for parcel in self._unacked if parcel.sequence < limit)

    @property
    def next(self) -> int:
        """The number of what leaves next."""
        return self._next

    def stop(self) -> None:
        """Nothing leaves any more, and no memory is read."""
        for lane in self._lanes:
            lane.clear()
        self._queued = [0] * _LANES
        self._payloads.clear()
        self._unacked.clear()
        self._again.clear()
        self._unacked_bytes = 0

    def _next_frame(self) -> bytes | None:
        for number, lane in enumerate(self._lanes):
            if lane:
                data = lane.popleft()
                self._queued[number] -= len(data)
                return data
        return None

    def _next_chunk(self) -> bytes | None:
        """Copied: what is under way must outlive the memory that was lent, or the sender could never have it back."""
        transfer = next(iter(self._payloads), None)
        if transfer is None:
            return None
        data, start = self._payloads[transfer]
        piece = data[start : start + CHUNK_BYTES]
        if start + len(piece) == len(data):
            del self._payloads[transfer]
        else:
            self._payloads[transfer] = data, start + len(piece)
        self.payload_bytes += len(piece)
        return encode_chunk(transfer, start, len(piece)) + bytes(piece)

    def _last_word(self) -> bytes | None:
        if self._finished != 1:
            return None
        self._finished = 2
        return encode_finish(self._next)


class Incoming:
    """What arrives."""

    def __init__(self) -> None:
        self.expected = 0
        """All below have arrived: what is acknowledged."""
        self._held: dict[int, bytes] = {}  # came too early
        self._held_bytes = 0
        self._owed = 0  # bytes that arrived since the last acknowledgement
        self.duplicates = 0
        self.frames = 0
        self.bytes = 0

    def arrived(self, sequence: int, data: Buffer) -> list[Buffer]:
        """What can be handed on now, in order. The first may be `data` itself, the others are copies."""
        if sequence < self.expected or sequence in self._held:
            self.duplicates += 1
            self._owed = max(self._owed, ACK_BYTES)  # the source does not know yet that it has arrived
            return []
        if sequence > self.expected:
            self._hold(sequence, bytes(data))
            return []
        ready: list[Buffer] = [data]
        self.expected += 1
        while (held := self._held.pop(self.expected, None)) is not None:
            self._held_bytes -= len(held)
            self.expected += 1
            ready.append(held)
        size = sum(map(len, ready))
        self.frames += len(ready)
        self.bytes += size
        self._owed += size
        return ready

    def _hold(self, sequence: int, data: bytes) -> None:
        """Within a bound that who keeps to the window never meets; beyond it, it has to be sent again."""
        if len(self._held) < _MOST_EARLY and self._held_bytes < 2 * WINDOW_BYTES:
            self._held[sequence] = data
            self._held_bytes += len(data)

    @property
    def owes_ack(self) -> bool:
        """Whether it is time to say what has arrived."""
        return self._owed >= ACK_BYTES

    def ack(self) -> int:
        """What has arrived, said now."""
        self._owed = 0
        return self.expected
