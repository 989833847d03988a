"""One relayed carrier's two directions: what is sent, numbered and kept until it is acknowledged; what arrives, put in
order. No I/O, no lock: both belong to their station's.

Hops are reliable as long as they live; when one dies, what it held is gone, and so may be what was on its way to it. So
the source keeps what it sent until the destination has it, and sends it again along another route when it hears that a
hop is gone, or when the destination, asked, says that it does not have it. Only so much is under way at a time. What
comes twice is dropped, what comes too early is held.

Lanes   A lower lane leaves first, payloads last, one chunk at a time: numbers are given when a frame leaves, so what
        is urgent waits for no more than what is under way already.

Where the payloads of a relayed carrier land. No I/O. Guarded by its station's lock, under which bytes are copied
too: who holds it knows that no memory is being written.

A carrier whose frames travel over other nodes. To its link it is one like any other: see transport.base.

Its station does the sending, and hands in what has arrived. Everything here changes under the station's lock; sinks are
called without it, by the driving thread alone. No sink runs after abort() has returned: who delivers holds
`_delivering` meanwhile and looks first whether the carrier has ended; who aborts ends it first and then waits for that.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final, NamedTuple, Protocol

from nexar.links.carrier_selection import RELAY
from nexar.transport.base import Buffer, Carrier, CarrierLost, Peer, Redirected, Sink
from nexar.transport.payload_table import RecentTransfers
from nexar.types import NodeId, format_node
from nexar.wire.frame import HEADER_BYTES, Frame, FrameError, FrameKind, Lane, decode, encode_chunk, encode_finish

WINDOW_BYTES: Final = 1 << 20
"""Under way at a time, from end to end. One frame always may be, however large."""
ACK_BYTES: Final = WINDOW_BYTES // 4
"""The destination says what it has after so many bytes; or when it is asked, or has something to say anyway."""
CHUNK_BYTES: Final = 64 << 10
_MAX_OUT_OF_ORDER: Final = 4096
_LANES: Final = len(Lane)


class RelaySegment(NamedTuple):
    """A frame with its number."""

    sequence: int
    data: bytes


class SendStream:
    """What this side sends."""

    def __init__(self) -> None:
        self._lanes: tuple[deque[bytes], ...] = tuple(deque() for _ in range(_LANES))
        self._queued = [0] * _LANES
        self._payloads: dict[int, tuple[memoryview, int]] = {}  # by transfer: what, and how much of it has left
        self._unacked: deque[RelaySegment] = deque()
        self._unacked_bytes = 0
        self._again: deque[RelaySegment] = deque()
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

    def take(self) -> RelaySegment | None:
        """What leaves next; None: nothing, or not now."""
        if self._again:
            self.resent += 1
            return self._again.popleft()
        if self._unacked_bytes >= WINDOW_BYTES:
            return None
        data = self._next_frame() or self._next_chunk() or self._last_word()
        if data is None:
            return None
        segment = RelaySegment(self._next, data)
        self._next += 1
        self._unacked.append(segment)
        self._unacked_bytes += len(data)
        return segment

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
        self._again = deque(segment for segment in self._unacked if segment.sequence < limit)

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


class ReceiveStream:
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
        if len(self._held) < _MAX_OUT_OF_ORDER and self._held_bytes < 2 * WINDOW_BYTES:
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


class UnexpectedChunk(Exception):
    """A chunk that nobody waits for: the peer broke the protocol."""


class _PayloadTarget:
    """Of one payload."""

    __slots__ = ("arrived", "into")

    def __init__(self, into: memoryview) -> None:
        self.into = into
        self.arrived = 0


class RelayPayloads:
    """By transfer."""

    def __init__(self) -> None:
        self._places: dict[int, _PayloadTarget] = {}
        self._recent_transfers = RecentTransfers()
        self._discarded = RecentTransfers()  # nobody wants the rest of these
        self.bytes = 0

    def expect(self, transfer: int, into: memoryview) -> None:
        """See Carrier."""
        if into.readonly:
            raise ValueError(f"payload {transfer} cannot land in memory that is read-only")
        if transfer in self._places:
            raise ValueError(f"payload {transfer} is expected already")
        self._places[transfer] = _PayloadTarget(into)
        self._recent_transfers.forget(transfer)
        self._discarded.forget(transfer)

    def redirect(self, transfer: int, into: memoryview | None) -> Redirected:
        """See Carrier."""
        place = self._places.get(transfer)
        if place is None:
            return Redirected.LANDED if transfer in self._recent_transfers else Redirected.UNKNOWN
        if into is None:
            del self._places[transfer]
            self._discarded.add(transfer)
        else:
            into[: place.arrived] = place.into[: place.arrived]
            place.into = into
        return Redirected.MOVED

    def take(self, frame: Frame, piece: memoryview) -> bool:
        """A chunk. True: that was the last byte. Raises Unexpected."""
        place = self._places.get(frame.transfer)
        if place is None:
            if frame.transfer in self._discarded:
                return False
            raise UnexpectedChunk(f"payload {frame.transfer} came, but nobody expects it")
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
        """No memory is written any more."""
        self._places.clear()
        self._recent_transfers.clear()
        self._discarded.clear()


_CHUNK: Final = int(FrameKind.CHUNK)
_FINISH: Final = int(FrameKind.FINISH)
_HELLO: Final = int(FrameKind.HELLO)
_BOTH_FINISHED: Final = "both sides have finished"


class RelayDispatcher(Protocol):
    """What a carrier asks of its station."""

    node: NodeId
    lock: threading.RLock

    def has_news(self, carrier: RelayedCarrier) -> None:
        """Under the lock: it may have something to send."""

    def flush(self) -> None:
        """Send what can be sent. Without the lock of the station, and without the node's."""

    def flush_later(self) -> None:
        """The same for who holds the node's lock: when that is released."""

    def deliver_later(self, carrier: RelayedCarrier) -> None:
        """The driving thread shall hand on what has arrived."""

    def ended(self, carrier: RelayedCarrier, reason: str | None) -> None:
        """Under the lock: it has. `reason`: tell the peer."""


class RelayedCarrier(Carrier):
    """One end. Made by its station."""

    scheme = RELAY

    def __init__(self, relay: RelayDispatcher, peer: NodeId, number: int, route: tuple[NodeId, ...]) -> None:
        self.peer = Peer(peer, None, verified=True, address=f"over {format_node(route[1])}")
        self.dialed = relay.node < peer
        self.number: Final = number
        """Which link of the two ends it serves."""
        self.route = route
        """From this node to the peer. This and what follows: under the lock."""
        self.avoid: frozenset[NodeId] = frozenset()
        """Nodes that could not be gone over since the last membership."""
        self.stranded: str | None = None
        """Why there is no way: nothing goes before there is a connection to the peer itself. None: there is one."""
        self.heard_over: tuple[NodeId, ...] | None = None
        """The way back along which the peer was heard last."""
        self.probe_at: float | None = None
        """When to ask what has arrived, if nothing is heard before."""
        self.probes = 0
        """Asked in vain."""
        self.outgoing: Final = SendStream()
        self.incoming: Final = ReceiveStream()
        self.error: CarrierLost | None = None
        """Why it ended."""
        self._landings = RelayPayloads()
        self._relay = relay
        self._lock = relay.lock
        self._sink: Sink | None = None  # looked up at every call: a sink may hand over to another
        self._arrived: deque[Buffer] = deque()  # in order, not handed on yet
        self._delivering = threading.RLock()
        self._peer_finished = False

    @property
    def peer_id(self) -> NodeId:
        """The node at the other end."""
        return self.peer.node

    def attach(self, sink: Sink) -> None:
        with self._lock:
            self._sink = sink
            early = bool(self._arrived)
        if early:
            self._relay.deliver_later(self)

    # -- sending: any thread ---------------------------------------------------------------------------

    def send_frame(self, lane: Lane, communicator: int, header: bytes, *body: Buffer) -> None:
        data = b"".join((header, *body))
        with self._lock:
            self._check_sending()
            self.outgoing.put(lane, data)
            self._relay.has_news(self)
        self._relay.flush()

    def queued_bytes(self, lane: Lane) -> int:
        with self._lock:
            self._check()
            return self.outgoing.queued_bytes(lane)

    def send_payload(self, transfer: int, data: memoryview) -> None:
        with self._lock:
            self._check_sending()
            self.outgoing.lend(transfer, data)
            self._relay.has_news(self)
        self._relay.flush_later()

    def withdraw_payload(self, transfer: int) -> None:
        with self._lock:
            self._check()
            self.outgoing.withdraw(transfer)
            self._relay.has_news(self)  # a half-close may have waited behind it
        self._relay.flush_later()

    def finish(self) -> None:
        with self._lock:
            self._check()
            self.outgoing.finish()
            self._relay.has_news(self)
        self._relay.flush()

    def _check(self) -> None:
        if self.error is not None:  # a new object each time: one raised twice would carry the first one's frames along
            raise CarrierLost(self.error.kind, self.error.reason)

    def _check_sending(self) -> None:
        self._check()
        if self.outgoing.finished:
            raise CarrierLost("closed", "this side has finished")

    # -- receiving: any thread ---------------------------------------------------------------------------

    def expect_payload(self, transfer: int, into: memoryview) -> None:
        with self._lock:
            self._check()
            self._landings.expect(transfer, into)

    def redirect_payload(self, transfer: int, into: memoryview | None) -> Redirected:
        with self._lock:
            self._check()
            return self._landings.redirect(transfer, into)

    # -- arriving: the driving thread ----------------------------------------------------------------------

    def arrived(self, sequence: int, data: memoryview) -> None:
        """Something of the peer's has come. Hand on what is next, as far as there is anybody to take it."""
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
        """Hand on what has arrived."""
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
            raise UnexpectedChunk(f"a frame of kind {frame.kind} with {len(body)} bytes where none belongs")
        if frame.kind == _CHUNK:
            with self._lock:
                whole = self.error is None and self._landings.take(frame, body)
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

    # -- the end -----------------------------------------------------------------------------------------

    def end_if_finished(self) -> None:
        """Under the lock: when both have said their last word, there is nothing left to do."""
        if self._peer_finished and self.outgoing.has_finished:
            self.end(CarrierLost("closed", _BOTH_FINISHED))

    def end(self, error: CarrierLost, tell: str | None = None) -> bool:
        """Under the lock: no memory is touched any more, nothing goes out. `tell`: the peer is told so. False: it had
        ended before.
        """
        if self.error is not None:
            return False
        self.error = error
        self.outgoing.stop()
        self._landings.stop()
        self.probe_at = None
        self._relay.ended(self, tell)
        return True

    def fail(self, error: CarrierLost, *, tell: bool = True) -> None:
        """Driving thread: it is lost, and the sink hears of it. `tell`: the peer too."""
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
        self._delivering.acquire()  # whoever is inside a sink leaves first
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
                "payload_bytes_received": self._landings.bytes,
                "resent": out.resent,
                "duplicates": into.duplicates,
                "hops": len(self.route) - 1,
            }
