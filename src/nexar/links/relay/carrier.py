"""RelayedCarrier: a carrier whose frames other nodes forward. No I/O: its relay sends and receives.

A hop that dies loses the frames that it holds. So the source keeps a frame until it is acknowledged. It resends the
frame on another route when a hop is gone, or a probe shows that the frame is missing. A window bounds unacknowledged
bytes.

Lower lanes go first; payloads go last, in chunks. A frame gets its number when it is sent, so an urgent frame waits
only for frames already sent.

The relay's lock guards everything. The driver calls sinks without it. No sink runs after abort(): delivery holds
`_delivering` and checks for the end first; abort() ends first and then acquires `_delivering`.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from nexar.links.carrier_selection import RELAY
from nexar.transport.base import Buffer, Carrier, CarrierLost, Peer, Redirected, Sink
from nexar.transport.payload_table import RecentTransfers
from nexar.types import NodeId, format_node
from nexar.wire.frame import HEADER_BYTES, Frame, FrameError, FrameKind, Lane, decode, encode_chunk, encode_finish

if TYPE_CHECKING:
    from nexar.links.relay.relay import Relay

WINDOW_BYTES: Final = 1 << 20  # unacknowledged bytes, end to end; one frame of any size is always allowed
# The destination acknowledges after this many bytes, when probed, or with other frames.
ACK_BYTES: Final = WINDOW_BYTES // 4
CHUNK_BYTES: Final = 64 << 10
_MAX_OUT_OF_ORDER: Final = 4096
_LANES: Final = len(Lane)


class RelaySegment(NamedTuple):
    """A numbered frame."""

    sequence: int
    data: bytes


class SendStream:
    """The sending direction."""

    def __init__(self) -> None:
        self._lanes: tuple[deque[bytes], ...] = tuple(deque() for _ in range(_LANES))
        self._queued = [0] * _LANES
        self._payloads: dict[int, tuple[memoryview, int]] = {}  # by transfer: data, and bytes already sent
        self._unacked: deque[RelaySegment] = deque()
        self._unacked_bytes = 0
        self._again: deque[RelaySegment] = deque()
        self._next = 0
        self._finished = 0  # 1: requested, 2: sent
        self.frames = 0
        self.frame_bytes = 0
        self.payload_bytes = 0
        self.resent = 0

    def put(self, lane: int, data: bytes) -> None:
        self._lanes[lane].append(data)
        self._queued[lane] += len(data)
        self.frames += 1
        self.frame_bytes += len(data)

    def queued_bytes(self, lane: int) -> int:
        return self._queued[lane]

    def lend(self, transfer: int, data: memoryview) -> None:
        """Read `data` until all is sent, or it is withdrawn."""
        if transfer in self._payloads:
            raise ValueError(f"payload {transfer} is being sent already")
        self._payloads[transfer] = data, 0

    def withdraw(self, transfer: int) -> None:
        self._payloads.pop(transfer, None)

    def finish(self) -> None:
        self._finished = self._finished or 1

    @property
    def finished(self) -> bool:
        return bool(self._finished)

    @property
    def has_finished(self) -> bool:
        return self._finished == 2

    @property
    def unacked(self) -> int:
        return len(self._unacked)

    @property
    def is_settled(self) -> bool:
        """Whether all has arrived, or the stream is finished."""
        return bool(self._finished) or not (self._unacked or self._payloads or any(self._lanes))

    def take(self) -> RelaySegment | None:
        """Return the next segment; None if nothing waits, or the window is full."""
        if self._again:
            self.resent += 1
            return self._again.popleft()
        if self._unacked_bytes >= WINDOW_BYTES:
            return None
        data = self._next_frame() or self._next_chunk() or self._finish_frame()
        if data is None:
            return None
        segment = RelaySegment(self._next, data)
        self._next += 1
        self._unacked.append(segment)
        self._unacked_bytes += len(data)
        return segment

    def acked(self, ack: int) -> bool:
        """Return True if it acknowledges new segments. Ignore an acknowledgement of unused numbers."""
        if ack > self._next:
            return False
        before = len(self._unacked)
        while self._unacked and self._unacked[0].sequence < ack:
            self._unacked_bytes -= len(self._unacked.popleft().data)
        while self._again and self._again[0].sequence < ack:
            self._again.popleft()
        return len(self._unacked) < before

    def send_again(self, below: int | None = None) -> None:
        """Queue unacknowledged segments (below `below`) again, before new ones."""
        limit = self._next if below is None else below
        self._again = deque(segment for segment in self._unacked if segment.sequence < limit)

    @property
    def next(self) -> int:
        return self._next

    def stop(self) -> None:
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
        """Return a copy, because an unacknowledged chunk outlives the lent memory."""
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

    def _finish_frame(self) -> bytes | None:
        if self._finished != 1:
            return None
        self._finished = 2
        return encode_finish(self._next)


class ReceiveStream:
    """The receiving direction."""

    def __init__(self) -> None:
        self.expected = 0  # all below have arrived and are acknowledged
        self._held: dict[int, bytes] = {}  # arrived early
        self._held_bytes = 0
        self._owed = 0  # bytes since the last acknowledgement
        self.duplicates = 0
        self.frames = 0
        self.bytes = 0

    def arrived(self, sequence: int, data: Buffer) -> list[Buffer]:
        """Return the segments next in order: `data` itself first, then copies."""
        if sequence < self.expected or sequence in self._held:
            self.duplicates += 1
            self._owed = max(self._owed, ACK_BYTES)  # the source does not know that it has arrived
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
        """Hold an early segment, within a bound that a correct source never reaches."""
        if len(self._held) < _MAX_OUT_OF_ORDER and self._held_bytes < 2 * WINDOW_BYTES:
            self._held[sequence] = data
            self._held_bytes += len(data)

    @property
    def owes_ack(self) -> bool:
        return self._owed >= ACK_BYTES

    def ack(self) -> int:
        self._owed = 0
        return self.expected


class UnexpectedChunk(Exception):
    """The peer broke the protocol."""


class _PayloadTarget:
    """The destination of one payload."""

    __slots__ = ("arrived", "into")

    def __init__(self, into: memoryview) -> None:
        self.into = into
        self.arrived = 0


class RelayPayloads:
    """The payloads of one carrier, by transfer."""

    def __init__(self) -> None:
        self._places: dict[int, _PayloadTarget] = {}
        self._recent_transfers = RecentTransfers()
        self._discarded = RecentTransfers()  # transfers whose remaining chunks are dropped
        self.bytes = 0

    def expect(self, transfer: int, into: memoryview) -> None:
        if into.readonly:
            raise ValueError(f"payload {transfer} cannot be received into read-only memory")
        if transfer in self._places:
            raise ValueError(f"payload {transfer} is expected already")
        self._places[transfer] = _PayloadTarget(into)
        self._recent_transfers.forget(transfer)
        self._discarded.forget(transfer)

    def redirect(self, transfer: int, into: memoryview | None) -> Redirected:
        place = self._places.get(transfer)
        if place is None:
            return Redirected.COMPLETE if transfer in self._recent_transfers else Redirected.UNKNOWN
        if into is None:
            del self._places[transfer]
            self._discarded.add(transfer)
        else:
            into[: place.arrived] = place.into[: place.arrived]
            place.into = into
        return Redirected.MOVED

    def take(self, frame: Frame, piece: memoryview) -> bool:
        """Return True if the payload is complete. Raise UnexpectedChunk."""
        place = self._places.get(frame.transfer)
        if place is None:
            if frame.transfer in self._discarded:
                return False
            raise UnexpectedChunk(f"payload {frame.transfer} is not expected")
        stop = place.arrived + len(piece)
        if frame.count != place.arrived or stop > len(place.into):
            raise UnexpectedChunk(
                f"a chunk of payload {frame.transfer} at byte {frame.count} instead of {place.arrived}"
            )
        place.into[place.arrived : stop] = piece
        place.arrived = stop
        self.bytes += len(piece)
        if stop < len(place.into):
            return False
        del self._places[frame.transfer]
        self._recent_transfers.add(frame.transfer)
        return True

    def stop(self) -> None:
        self._places.clear()
        self._recent_transfers.clear()
        self._discarded.clear()


_CHUNK: Final = int(FrameKind.CHUNK)
_FINISH: Final = int(FrameKind.FINISH)
_HELLO: Final = int(FrameKind.HELLO)
_BOTH_FINISHED: Final = "both sides have finished"


class RelayedCarrier(Carrier):
    """One end of a relayed link. Its relay creates it."""

    scheme = RELAY

    def __init__(self, relay: Relay, peer: NodeId, number: int, route: tuple[NodeId, ...]) -> None:
        self.peer = Peer(peer, None, verified=True, address=f"over {format_node(route[1])}")
        self.dialed = relay.node < peer
        self.number: Final = number  # number of the link between the two ends
        self.route = route  # from this node to the peer; this and the following: under the lock
        self.avoid: frozenset[NodeId] = frozenset()  # nodes that could not forward since the last membership
        # Why there is no route: nothing is sent before a direct connection to the peer exists. None if there is a
        # route.
        self.no_route: str | None = None
        self.last_heard_route: tuple[NodeId, ...] | None = None  # the reverse route of the last frame from the peer
        self.probe_at: float | None = None  # when to probe, if nothing is acknowledged before
        self.probes = 0  # unanswered probes
        self.outgoing: Final = SendStream()
        self.incoming: Final = ReceiveStream()
        self.error: CarrierLost | None = None  # why it ended
        self._payload_table = RelayPayloads()
        self._relay = relay
        self._lock = relay.lock
        self._sink: Sink | None = None  # looked up at every call: a sink may be replaced
        self._arrived: deque[Buffer] = deque()  # in order, not delivered yet
        self._delivering = threading.RLock()
        self._peer_finished = False

    @property
    def peer_id(self) -> NodeId:
        return self.peer.node

    def attach(self, sink: Sink) -> None:
        with self._lock:
            self._sink = sink
            has_arrived = bool(self._arrived)
        if has_arrived:
            self._relay.deliver_later(self)

    # -- sending: any thread ---------------------------------------------------------------------------

    def send_frame(self, lane: Lane, communicator: int, header: bytes, *body: Buffer) -> None:
        data = b"".join((header, *body))
        with self._lock:
            self._check_sending()
            self.outgoing.put(lane, data)
            self._relay.mark_ready(self)
        self._relay.flush()

    def queued_bytes(self, lane: Lane) -> int:
        with self._lock:
            self._check()
            return self.outgoing.queued_bytes(lane)

    def send_payload(self, transfer: int, data: memoryview) -> None:
        with self._lock:
            self._check_sending()
            self.outgoing.lend(transfer, data)
            self._relay.mark_ready(self)
        self._relay.flush_later()

    def withdraw_payload(self, transfer: int) -> None:
        with self._lock:
            self._check()
            self.outgoing.withdraw(transfer)
            self._relay.mark_ready(self)  # a half-close may have waited for it
        self._relay.flush_later()

    def finish(self) -> None:
        with self._lock:
            self._check()
            self.outgoing.finish()
            self._relay.mark_ready(self)
        self._relay.flush()

    def _check(self) -> None:
        if self.error is not None:  # a new object each time: one raised twice would keep the frames of the first
            raise CarrierLost(self.error.kind, self.error.reason)

    def _check_sending(self) -> None:
        self._check()
        if self.outgoing.finished:
            raise CarrierLost("closed", "this side has finished")

    # -- receiving: any thread ---------------------------------------------------------------------------

    def expect_payload(self, transfer: int, into: memoryview) -> None:
        with self._lock:
            self._check()
            self._payload_table.expect(transfer, into)

    def redirect_payload(self, transfer: int, into: memoryview | None) -> Redirected:
        with self._lock:
            self._check()
            return self._payload_table.redirect(transfer, into)

    # -- arrival: the driver thread ----------------------------------------------------------------------

    def arrived(self, sequence: int, data: memoryview) -> None:
        with self._lock:
            if self.error is not None:
                return
            ready = self.incoming.arrived(sequence, data)
            if self._sink is None or self._arrived:
                self._arrived.extend(bytes(each) for each in ready)
                return
            self._arrived.extend(ready)
        self.deliver()

    def deliver(self) -> None:
        with self._delivering:
            while self.error is None and self._sink is not None and self._arrived:
                try:
                    self._hand_on(memoryview(self._arrived.popleft()), self._sink)
                except (FrameError, UnexpectedChunk) as fault:
                    self.fail(CarrierLost("misbehaved", str(fault)))
                except BaseException as error:
                    self.fail(CarrierLost("fault", f"its sink raised {error!r}"))
                    raise

    def _hand_on(self, data: memoryview, sink: Sink) -> None:
        if len(data) < HEADER_BYTES:
            raise UnexpectedChunk(f"a frame of {len(data)} bytes")
        frame, body = decode(data, 0), data[HEADER_BYTES:]
        if frame.body != len(body) or frame.kind == _HELLO or self._peer_finished:
            raise UnexpectedChunk(f"an unexpected frame of kind {frame.kind} with {len(body)} bytes")
        if frame.kind == _CHUNK:
            with self._lock:
                whole = self.error is None and self._payload_table.take(frame, body)
            if whole:
                sink.payload_arrived(self, frame.transfer)
        elif frame.kind == _FINISH:
            with self._lock:
                self._peer_finished = True
            sink.carrier_finished(self)
            with self._lock:
                self.end_if_finished()
        else:
            sink.frame_arrived(self, frame, body)

    # -- ending ------------------------------------------------------------------------------------------

    def end_if_finished(self) -> None:
        """Under the lock."""
        if self._peer_finished and self.outgoing.has_finished:
            self.end(CarrierLost("closed", _BOTH_FINISHED))

    def end(self, error: CarrierLost, tell: str | None = None) -> bool:
        """Stop sending and touching memory. `tell` goes to the peer. Return False if ended before. Under the lock."""
        if self.error is not None:
            return False
        self.error = error
        self.outgoing.stop()
        self._payload_table.stop()
        self.probe_at = None
        self._relay.ended(self, tell)
        return True

    def fail(self, error: CarrierLost, *, tell: bool = True) -> None:
        """End, and report the error to the sink and, with `tell`, to the peer. Driver thread."""
        with self._lock:
            ended = self.end(error, error.reason if tell else None)
            sink = self._sink
        self._relay.flush()
        if ended and sink is not None:
            with self._delivering:
                sink.carrier_lost(self, CarrierLost(error.kind, error.reason))

    def abort(self, reason: str) -> None:
        with self._lock:
            self.end(CarrierLost("closed", reason), reason)
        self._relay.flush()
        self._delivering.acquire()  # wait for a running sink
        self._delivering.release()

    def stats(self) -> dict[str, float]:
        with self._lock:
            out, into = self.outgoing, self.incoming
            return {
                "bytes_sent": out.frame_bytes + out.payload_bytes,
                "bytes_received": into.bytes,
                "frames_sent": out.frames,
                "frames_received": into.frames,
                "payload_bytes_sent": out.payload_bytes,
                "payload_bytes_received": self._payload_table.bytes,
                "resent": out.resent,
                "duplicates": into.duplicates,
                "hops": len(self.route) - 1,
            }
