"""What can happen to things on their way, in the memory network's words. `testing.faults` makes the weather.

One direction between two memory carriers: what was sent and has not been taken yet.

Law: whoever changes a pipe holds its lock, with one exception: the receiving node's driving thread takes frames off
the left of a lane while senders append on its right, which a deque allows. The bytes of a payload are copied under
the lock, so who holds it knows that nobody is touching the memory of a payload; a copy is one chunk, so nobody waits
for longer than that.

Nothing is buffered but frames, which the sender's credit bounds. A payload stays in its sender's memory until the
receiver copies it, chunk by chunk, to where it belongs.
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
    """What becomes of the next thing on a way."""

    PASS = "pass"
    HOLD = "hold"  # nothing is delivered until the weather changes
    CUT = "cut"  # the carrier breaks, and both ends are told
    DOUBLE = "double"  # dials only: the listener sees two of them


class FaultModel(Protocol):
    """Decides what happens between sending and taking. A network without weather delivers everything at once.

    Called from any thread, under no lock of the transport; answers at once.
    """

    def delay(self, way: Direction) -> float:
        """Seconds between sending a frame, a payload or an end, and the moment it may be taken."""
        ...

    def judge(self, way: Direction, frames: int, payload_bytes: int) -> DeliveryFault:
        """The fate of what comes next on a carrier that has delivered so much on this way."""
        ...

    def judge_dial(self, way: Direction) -> DeliveryFault:
        """CUT: refused. HOLD: no answer until the dialer's deadline."""
        ...


LANES: Final = len(Lane)
NEVER: Final = float("inf")


QueuedItem: TypeAlias = tuple[bytes, bytes, float]
"""One frame on its way: header, body, and when it may be taken (0 where nothing delays it)."""


class PipeBroken(Exception):
    """The carrier cannot go on. Never raised by a sink, so a carrier can tell its own end from a sink's error."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


class PipeEnd(NamedTuple):
    """The last thing in a pipe: a half-close (`reason` is None) or the end of the carrier."""

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
        self.withdrawn = False  # the sender took it back: no further byte will come


class Pipe:
    """See the module's law. `lock` is public: a carrier takes it together with its own decisions."""

    __slots__ = (
        "departures",
        "drained",
        "endings",
        "finished",
        "landed",
        "landings",
        "lanes",
        "lock",
        "payload_bytes",
        "sent_bytes",
        "sent_frames",
        "taken_bytes",
        "taken_frames",
        "unread",
    )

    def __init__(self) -> None:
        self.lock = threading.RLock()  # reentrant: the collector may run a finaliser that uses the carrier meanwhile
        # Written by senders, under the lock.
        self.lanes: tuple[deque[QueuedItem], ...] = tuple(deque() for _ in range(LANES))
        self.endings: deque[PipeEnd] = deque()
        self.departures: dict[int, OutgoingTransfer] = {}
        self.sent_frames = 0
        self.sent_bytes = [0] * LANES
        self.finished = False
        # Written by the receiving side: landings, landed and unread under the lock, the rest by its driving thread.
        self.landings: dict[int, IncomingTransfer] = {}
        self.landed = RecentTransfers()
        self.unread = False  # the receiver has ended: whatever is sent now goes nowhere
        self.taken_frames = 0
        self.taken_bytes = [0] * LANES
        self.payload_bytes = 0
        self.drained = False  # the half-close has been delivered, and everything before it

    def put_frame(self, lane: int, item: QueuedItem) -> None:
        """Under the lock. The receiver will find it."""
        if self.unread:
            return
        self.lanes[lane].append(item)
        self.sent_frames += 1
        self.sent_bytes[lane] += len(item[0]) + len(item[1])

    def take_frame(self) -> QueuedItem | None:
        """Driving thread only, without the lock: the oldest frame of the lowest lane that has one."""
        for number, lane in enumerate(self.lanes):
            if lane:
                return self._take(number, lane)
        return None

    def take_due_frame(self, now: float) -> QueuedItem | None:
        """The same, on a network with weather: what is not due yet stays, and holds up its own lane only."""
        for number, lane in enumerate(self.lanes):
            if _due(lane) <= now:
                return self._take(number, lane)
        return None

    def _take(self, number: int, lane: deque[QueuedItem]) -> QueuedItem | None:
        try:
            item = lane.popleft()
        except IndexError:  # another thread aborted the carrier, which emptied its lanes
            return None
        self.taken_bytes[number] += len(item[0]) + len(item[1])
        self.taken_frames += 1
        return item

    def copy_chunk(self, limit: int = MAX_CHUNK_BYTES) -> int | None:
        """Move up to `limit` bytes of the oldest payload. The transfer, if that was its last byte and it is wanted.

        Raises Broken if the peer sends what nobody expects.
        """
        with self.lock:
            transfer = next(iter(self.departures), None)
            if transfer is None:
                return None
            data = self.departures[transfer].data
            landing = self._landing_of(transfer, len(data))
            start, stop = landing.arrived, min(landing.arrived + limit, landing.size)
            if landing.into is not None:
                landing.into[start:stop] = data[start:stop]
            landing.arrived = stop
            self.payload_bytes += stop - start
            return self._recent_transfers(transfer, landing) if stop == landing.size else None

    def _landing_of(self, transfer: int, size: int) -> IncomingTransfer:
        landing = self.landings.get(transfer)
        if landing is None:
            raise PipeBroken("misbehaved", f"payload {transfer} came, but nobody expects it")
        if landing.size != size:
            raise PipeBroken("misbehaved", f"payload {transfer} has {size} bytes instead of {landing.size}")
        return landing

    def _recent_transfers(self, transfer: int, landing: IncomingTransfer) -> int | None:
        del self.departures[transfer]
        del self.landings[transfer]
        if landing.into is None:
            return None
        self.landed.add(transfer)
        return transfer

    def withdraw(self, transfer: int) -> None:
        """The sender takes a payload back."""
        with self.lock:
            if self.departures.pop(transfer, None) is None or transfer not in self.landings:
                return
            self.landings[transfer].withdrawn = True
            if self.landings[transfer].into is None:
                del self.landings[transfer]

    def expect(self, transfer: int, into: memoryview) -> None:
        """Under the lock: the receiver names the memory for a payload."""
        if transfer in self.landings:
            raise ValueError(f"payload {transfer} is expected already")
        self.landings[transfer] = IncomingTransfer(into)
        self.landed.forget(transfer)

    def redirect(self, transfer: int, into: memoryview | None) -> Redirected:
        """Under the lock: the receiver wants the rest elsewhere, or not at all."""
        landing = self.landings.get(transfer)
        if landing is None or landing.into is None:
            return Redirected.LANDED if transfer in self.landed else Redirected.UNKNOWN
        if into is not None:
            into[: landing.arrived] = landing.into[: landing.arrived]
        landing.into = into
        if into is None and landing.withdrawn:
            del self.landings[transfer]
        return Redirected.MOVED

    def stop_sending(self) -> None:
        """Under the lock: the sender's memory is not read any more. Frames sent before may still be taken."""
        self.departures.clear()

    def stop_receiving(self) -> None:
        """The receiver's memory is not written any more, and what was on its way is dropped."""
        with self.lock:
            self.unread = True
            self.landings.clear()
            self.landed.clear()
            self.departures.clear()
            for lane in self.lanes:
                lane.clear()

    def queued_bytes(self, lane: int) -> int:
        """Frames of this lane that were sent and not taken."""
        taken = self.taken_bytes[lane]  # before what was sent: the difference is never negative
        return 0 if self.unread else self.sent_bytes[lane] - taken

    def waiting(self) -> bool:
        """Whether anything before the ending is still to be taken."""
        return bool(self.departures) or any(self.lanes)

    def rest_due(self) -> float:
        """When the next payload, or the ending if nothing comes before it, may be taken."""
        with self.lock:
            departure = next(iter(self.departures.values()), None)
        if departure is not None:
            return departure.due
        return self.endings[0].due if self.endings and not self.waiting() else NEVER

    def next_due(self) -> float:
        """When the next thing of any kind may be taken."""
        return min(self.rest_due(), *(_due(lane) for lane in self.lanes))


def _due(lane: deque[QueuedItem]) -> float:
    try:
        return lane[0][2]
    except IndexError:
        return NEVER
