"""One direction between two memory carriers, and the interface of the fault model (`testing.faults`).

Every change holds the lock, except that the driver pops frames from the left of a lane while senders append on its
right. Payload chunks are copied under the lock, so its holder knows that no other thread touches payload memory.
"""

from __future__ import annotations

import threading
from collections import deque
from enum import Enum
from typing import Final, NamedTuple, Protocol, TypeAlias

from nexar.transport.base import Redirected
from nexar.transport.payload_table import RecentTransfers
from nexar.wire.frame import MAX_CHUNK_BYTES, Lane


class Direction(NamedTuple):
    """From one node to another."""

    source: int
    destination: int


class DeliveryFault(Enum):
    """The fault model's decision about the next item."""

    PASS = "pass"
    HOLD = "hold"  # nothing is delivered until the model changes
    CUT = "cut"  # the carrier breaks; both ends are notified
    DOUBLE = "double"  # dials only: the listener gets two of them


class FaultModel(Protocol):
    """Decides what happens between sending and receiving. Any thread, without transport locks. Must not block.

    A protocol because only tests implement it.
    """

    def delay(self, direction: Direction) -> float:
        """Return the seconds from sending to delivery."""
        ...

    def decide(self, direction: Direction, frames: int, payload_bytes: int) -> DeliveryFault:
        """Decide about the next item after this much was delivered."""
        ...

    def decide_dial(self, direction: Direction) -> DeliveryFault:
        """CUT refuses a dial; HOLD gives no answer until the deadline."""
        ...


LANES: Final = len(Lane)
NEVER: Final = float("inf")


QueuedItem: TypeAlias = tuple[bytes, bytes, float]  # one frame: header, body, earliest delivery time (0: at once)


class PipeBroken(Exception):
    """The carrier cannot continue, for a reason other than its sink."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


class PipeEnd(NamedTuple):
    """The last item of a pipe: a half-close, without a reason, or the end of the carrier."""

    reason: str | None
    due: float


class OutgoingTransfer(NamedTuple):
    """A payload on the sender's side."""

    data: memoryview
    due: float


class IncomingTransfer:
    """A payload on the receiver's side."""

    __slots__ = ("arrived", "into", "size", "withdrawn")

    def __init__(self, into: memoryview) -> None:
        self.into: memoryview | None = into  # None: the rest is discarded
        self.size = len(into)
        self.arrived = 0
        self.withdrawn = False  # the sender cancelled it: no further byte comes


class Pipe:
    """Frames and payloads in one direction. Carriers also use its `lock`."""

    __slots__ = (
        "drained",
        "endings",
        "expected",
        "finished",
        "lanes",
        "lock",
        "outgoing",
        "payload_bytes",
        "recent",
        "sent_bytes",
        "sent_frames",
        "taken_bytes",
        "taken_frames",
        "unread",
    )

    def __init__(self) -> None:
        self.lock = threading.RLock()  # reentrant: the garbage collector may run a finaliser that uses the carrier
        # Written by senders, under the lock.
        self.lanes: tuple[deque[QueuedItem], ...] = tuple(deque() for _ in range(LANES))
        self.endings: deque[PipeEnd] = deque()
        self.outgoing: dict[int, OutgoingTransfer] = {}
        self.sent_frames = 0
        self.sent_bytes = [0] * LANES
        self.finished = False
        # Written by the receiver: expected, recent and unread under the lock, the rest by its driver.
        self.expected: dict[int, IncomingTransfer] = {}
        self.recent = RecentTransfers()
        self.unread = False  # the receiver has ended; sent items are dropped
        self.taken_frames = 0
        self.taken_bytes = [0] * LANES
        self.payload_bytes = 0
        self.drained = False  # the half-close and everything before it were delivered

    def put_frame(self, lane: int, item: QueuedItem) -> None:
        """The caller holds the lock."""
        if self.unread:
            return
        self.lanes[lane].append(item)
        self.sent_frames += 1
        self.sent_bytes[lane] += len(item[0]) + len(item[1])

    def take_frame(self) -> QueuedItem | None:
        """Take the oldest frame of the lowest non-empty lane. Driver only, without the lock."""
        for number, lane in enumerate(self.lanes):
            if lane:
                return self._take(number, lane)
        return None

    def take_due_frame(self, now: float) -> QueuedItem | None:
        """Like `take_frame`; a frame that is not due delays its own lane only."""
        for number, lane in enumerate(self.lanes):
            if _due(lane) <= now:
                return self._take(number, lane)
        return None

    def _take(self, number: int, lane: deque[QueuedItem]) -> QueuedItem | None:
        try:
            item = lane.popleft()
        except IndexError:  # another thread aborted the carrier and cleared its lanes
            return None
        self.taken_bytes[number] += len(item[0]) + len(item[1])
        self.taken_frames += 1
        return item

    def copy_chunk(self, limit: int = MAX_CHUNK_BYTES) -> int | None:
        """Copy part of the oldest payload. Returns the transfer if it is complete and wanted. Raises PipeBroken."""
        with self.lock:
            transfer = next(iter(self.outgoing), None)
            if transfer is None:
                return None
            data = self.outgoing[transfer].data
            incoming = self._expected_transfer(transfer, len(data))
            start, stop = incoming.arrived, min(incoming.arrived + limit, incoming.size)
            if incoming.into is not None:
                incoming.into[start:stop] = data[start:stop]
            incoming.arrived = stop
            self.payload_bytes += stop - start
            return self._complete(transfer, incoming) if stop == incoming.size else None

    def _expected_transfer(self, transfer: int, size: int) -> IncomingTransfer:
        incoming = self.expected.get(transfer)
        if incoming is None:
            raise PipeBroken("misbehaved", f"payload {transfer} arrived but was not expected")
        if incoming.size != size:
            raise PipeBroken("misbehaved", f"payload {transfer} has {size} bytes instead of {incoming.size}")
        return incoming

    def _complete(self, transfer: int, incoming: IncomingTransfer) -> int | None:
        del self.outgoing[transfer]
        del self.expected[transfer]
        if incoming.into is None:
            return None
        self.recent.add(transfer)
        return transfer

    def withdraw(self, transfer: int) -> None:
        with self.lock:
            if self.outgoing.pop(transfer, None) is None or transfer not in self.expected:
                return
            self.expected[transfer].withdrawn = True
            if self.expected[transfer].into is None:
                del self.expected[transfer]

    def expect(self, transfer: int, into: memoryview) -> None:
        """The caller holds the lock."""
        if transfer in self.expected:
            raise ValueError(f"payload {transfer} is expected already")
        self.expected[transfer] = IncomingTransfer(into)
        self.recent.forget(transfer)

    def redirect(self, transfer: int, into: memoryview | None) -> Redirected:
        """The caller holds the lock."""
        incoming = self.expected.get(transfer)
        if incoming is None or incoming.into is None:
            return Redirected.COMPLETE if transfer in self.recent else Redirected.UNKNOWN
        if into is not None:
            into[: incoming.arrived] = incoming.into[: incoming.arrived]
        incoming.into = into
        if into is None and incoming.withdrawn:
            del self.expected[transfer]
        return Redirected.MOVED

    def stop_sending(self) -> None:
        """The caller holds the lock. Frames sent before may still be taken."""
        self.outgoing.clear()

    def stop_receiving(self) -> None:
        with self.lock:
            self.unread = True
            self.expected.clear()
            self.recent.clear()
            self.outgoing.clear()
            for lane in self.lanes:
                lane.clear()

    def queued_bytes(self, lane: int) -> int:
        taken = self.taken_bytes[lane]  # read first, so that the difference is never negative
        return 0 if self.unread else self.sent_bytes[lane] - taken

    def waiting(self) -> bool:
        return bool(self.outgoing) or any(self.lanes)

    def rest_due(self) -> float:
        """Return when the next payload, or else the ending, is due."""
        with self.lock:
            first = next(iter(self.outgoing.values()), None)
        if first is not None:
            return first.due
        return self.endings[0].due if self.endings and not self.waiting() else NEVER

    def next_due(self) -> float:
        return min(self.rest_due(), *(_due(lane) for lane in self.lanes))


def _due(lane: deque[QueuedItem]) -> float:
    try:
        return lane[0][2]
    except IndexError:
        return NEVER
