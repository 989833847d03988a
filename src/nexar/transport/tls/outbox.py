"""What one connection still has to send, in the order in which it leaves. No I/O.

Law: what has begun is finished first. Then the lowest lane that has a frame; only when no lane has one, a chunk of the
next payload, the payloads taking turns; and when nothing at all is left, the farewell.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from nexar.wire.codec import encode_chunk
from nexar.wire.frame import Lane

_NO_LANE: Final = -1


@dataclass(slots=True)
class _Payload:
    transfer: int
    data: memoryview
    sent: int = 0

    def next_chunk(self, size_bytes: int) -> tuple[bytes, memoryview]:
        body = self.data[self.sent : self.sent + size_bytes]
        header = encode_chunk(self.transfer, self.sent, len(body))
        self.sent += len(body)
        return header, body

    @property
    def done(self) -> bool:
        return self.sent >= len(self.data)


class Outbox:
    """Frames and payloads waiting for one connection. Guarded by that connection's lock."""

    def __init__(self, chunk_bytes: int) -> None:
        """Payloads leave in chunks of that size."""
        self._chunk_bytes = chunk_bytes
        self._lanes: tuple[deque[bytes], ...] = tuple(deque() for _ in Lane)
        self._bytes = [0] * len(Lane)
        self._frames = 0  # in all lanes together
        self._payloads: deque[_Payload] = deque()
        self._begun: deque[memoryview] = deque()  # parts of the one frame or chunk that is on its way
        self._begun_lane = _NO_LANE
        self._begun_transfer: int | None = None
        self._farewell: bytes | None = None

    @property
    def empty(self) -> bool:
        """Nothing waits."""
        return not (self._begun or self._frames or self._payloads or self._farewell)

    def queued_bytes(self, lane: int) -> int:
        """Bytes of this lane's frames that were not taken yet."""
        return self._bytes[lane]

    def push(self, lane: int, frame: bytes | memoryview) -> None:
        """A frame, behind those of its lane."""
        self._lanes[lane].append(frame)  # type: ignore[arg-type]
        self._bytes[lane] += len(frame)
        self._frames += 1

    def resume(self, lane: int, rest: memoryview) -> None:
        """The rest of a frame whose beginning has left already; only when nothing waits."""
        self._begun.append(rest)
        self._begun_lane = lane
        self._bytes[lane] += len(rest)

    def push_payload(self, transfer: int, data: memoryview) -> None:
        """A payload, which takes its turn among the others. ValueError if it is here already."""
        if any(payload.transfer == transfer for payload in self._payloads):
            raise ValueError(f"payload {transfer} is being sent already")
        self._payloads.append(_Payload(transfer, data))

    def withdraw(self, transfer: int) -> None:
        """Let the payload's memory go. A chunk that has begun must be finished, so its rest is copied."""
        self._payloads = deque(p for p in self._payloads if p.transfer != transfer)
        if self._begun_transfer == transfer:
            self._begun = deque(memoryview(bytes(part)) for part in self._begun)
            self._begun_transfer = None

    def say_farewell(self, frame: bytes) -> None:
        """The last frame: leaves when nothing else is left."""
        self._farewell = frame

    def next(self) -> tuple[memoryview, bool] | None:
        """What leaves next, and whether more of the same follows at once. None when empty."""
        if not self._begun and not self._begin():
            return None
        return self._begun[0], len(self._begun) > 1

    def taken(self, count: int) -> None:
        """`count` bytes of what `next` gave have left."""
        part = self._begun[0]
        if count < len(part):
            self._begun[0] = part[count:]
        else:
            self._begun.popleft()
        if self._begun_lane != _NO_LANE:
            self._bytes[self._begun_lane] -= count

    def clear(self) -> None:
        """Forget everything; no memory of anybody is held any more."""
        for frames in self._lanes:
            frames.clear()
        self._bytes = [0] * len(Lane)
        self._frames = 0
        self._payloads.clear()
        self._begun.clear()
        self._begun_lane, self._begun_transfer = _NO_LANE, None
        self._farewell = None

    def _begin(self) -> bool:
        self._begun_lane, self._begun_transfer = _NO_LANE, None
        if self._frames:
            self._begin_frame()
        elif self._payloads:
            self._begin_chunk()
        elif self._farewell is not None:
            self._begun.append(memoryview(self._farewell))
            self._farewell = None
        return bool(self._begun)

    def _begin_frame(self) -> None:
        lane = next(number for number, frames in enumerate(self._lanes) if frames)
        self._begun.append(memoryview(self._lanes[lane].popleft()))
        self._begun_lane = lane
        self._frames -= 1

    def _begin_chunk(self) -> None:
        payload = self._payloads.popleft()
        header, body = payload.next_chunk(self._chunk_bytes)
        self._begun.append(memoryview(header))
        if len(body):
            self._begun.append(body)
        self._begun_transfer = payload.transfer
        if not payload.done:
            self._payloads.append(payload)
