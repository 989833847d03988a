"""A carrier whose frames travel over other nodes. To its link it is one like any other: see transport.base.

Its station does the sending, and hands in what has arrived. Everything here changes under the station's lock; sinks are
called without it, by the driving thread alone. No sink runs after abort() has returned: who delivers holds
`_delivering` meanwhile and looks first whether the carrier has ended; who aborts ends it first and then waits for that.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final, Protocol

from nexar.links.carrier import RELAY
from nexar.links.relay.landing import Landings, Unexpected
from nexar.links.relay.stream import Incoming, Outgoing
from nexar.transport.base import Buffer, Carrier, CarrierLost, Peer, Redirected, Sink
from nexar.types import NodeId, format_node
from nexar.wire.frame import HEADER_BYTES, FrameError, Kind, Lane, decode

_CHUNK: Final = int(Kind.CHUNK)
_FINISH: Final = int(Kind.FINISH)
_HELLO: Final = int(Kind.HELLO)
_BOTH_FINISHED: Final = "both sides have finished"


class Dispatcher(Protocol):
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

    def __init__(self, station: Dispatcher, peer: NodeId, number: int, route: tuple[NodeId, ...]) -> None:
        self.peer = Peer(peer, None, verified=True, address=f"over {format_node(route[1])}")
        self.dialed = station.node < peer
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
        self.outgoing: Final = Outgoing()
        self.incoming: Final = Incoming()
        self.error: CarrierLost | None = None
        """Why it ended."""
        self._landings = Landings()
        self._station = station
        self._lock = station.lock
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
            self._station.deliver_later(self)

    # -- sending: any thread ---------------------------------------------------------------------------

    def send_frame(self, lane: Lane, communicator: int, header: bytes, *body: Buffer) -> None:
        data = b"".join((header, *body))
        with self._lock:
            self._check_sending()
            self.outgoing.put(lane, data)
            self._station.has_news(self)
        self._station.flush()

    def queued_bytes(self, lane: Lane) -> int:
        with self._lock:
            self._check()
            return self.outgoing.queued_bytes(lane)

    def send_payload(self, transfer: int, data: memoryview) -> None:
        with self._lock:
            self._check_sending()
            self.outgoing.lend(transfer, data)
            self._station.has_news(self)
        self._station.flush_later()

    def withdraw_payload(self, transfer: int) -> None:
        with self._lock:
            self._check()
            self.outgoing.withdraw(transfer)
            self._station.has_news(self)  # a half-close may have waited behind it
        self._station.flush_later()

    def finish(self) -> None:
        with self._lock:
            self._check()
            self.outgoing.finish()
            self._station.has_news(self)
        self._station.flush()

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
                except (FrameError, Unexpected) as fault:
                    self.fail(CarrierLost("misbehaved", str(fault)))
                except BaseException as error:
                    self.fail(CarrierLost("fault", f"its sink raised {error!r}"))
                    raise

    def _hand_on(self, data: memoryview, sink: Sink) -> None:
        if len(data) < HEADER_BYTES:
            raise Unexpected(f"a frame of {len(data)} bytes")
        frame, body = decode(data, 0), data[HEADER_BYTES:]
        if frame.body != len(body) or frame.kind == _HELLO or self._peer_finished:
            raise Unexpected(f"a frame of kind {frame.kind} with {len(body)} bytes where none belongs")
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
        self._station.ended(self, tell)
        return True

    def fail(self, error: CarrierLost, *, tell: bool = True) -> None:
        """Driving thread: it is lost, and the sink hears of it. `tell`: the peer too."""
        with self._lock:
            ended = self.end(error, error.reason if tell else None)
            sink = self._sink
        self._station.flush()
        if ended and sink is not None:
            with self._delivering:
                sink.carrier_lost(self, CarrierLost(error.kind, error.reason))

    def abort(self, reason: str) -> None:
        with self._lock:
            self.end(CarrierLost("closed", reason), reason)
        self._station.flush()
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
