"""The relay of one node: frames of pairs without a connection, its own and those that it forwards.

A frame follows the route that its source chose. A node that cannot reach the next hop tells the source, which takes
another route and resends. So forwarding nodes decide nothing, and no frame loops. Probes find frames that a node lost.

State changes under the relay's lock; one thread at a time sends, in order, without it.

Before a node closes, its own frames must have arrived, and frames of others must be forwarded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic
from typing import Final, TypeAlias

from nexar.errors import NexarError
from nexar.links.link import Link
from nexar.links.operation import DeferredIO
from nexar.links.progress import Progress
from nexar.links.relay.carrier import RelayedCarrier
from nexar.links.relay.forwarding import (
    Forward,
    HeldFrames,
    MeshView,
    NeighbourQueue,
    Neighbours,
    QueuedFrame,
    RefusedSource,
    Rerouting,
)
from nexar.transport.base import CarrierLost
from nexar.transport.registry import log_unhandled
from nexar.types import NodeId, describe_peer
from nexar.wire.frame import Frame, FrameError, FrameKind
from nexar.wire.relay import RelayHeader, RelayKind, advance, decode_node, decode_relay, encode_node, encode_relay
from nexar.wire.text import foreign_line


class Drain:
    """The frames that a closing relay still has to send."""

    def __init__(
        self, carriers: Mapping[NodeId, RelayedCarrier], neighbours: Neighbours, unneeded: Callable[[NodeId], bool]
    ) -> None:
        """Frames to `unneeded` nodes need not arrive."""
        self._carriers = carriers
        self._neighbours = neighbours
        self._unneeded = unneeded
        self._probed: dict[RelayedCarrier, tuple[int, tuple[NodeId, ...]]] = {}  # number and route of the last probe

    def is_ready(self) -> bool:
        """Whether all is done, or a peer must be probed."""
        unacknowledged = self._unacknowledged()
        return any(map(self._needs_probe, unacknowledged)) or not (unacknowledged or self._neighbours.has_waiting)

    def carriers_to_probe(self) -> list[RelayedCarrier]:
        """Return them once per position. Their peers would acknowledge by themselves, but later."""
        found = [carrier for carrier in self._unacknowledged() if self._needs_probe(carrier)]
        self._probed.update((carrier, _position(carrier)) for carrier in found)
        return found

    def _unacknowledged(self) -> list[RelayedCarrier]:
        return [
            each
            for each in self._carriers.values()
            if not each.outgoing.is_settled and not self._unneeded(each.peer_id)
        ]

    def _needs_probe(self, carrier: RelayedCarrier) -> bool:
        sent = carrier.no_route is None and carrier.outgoing.unacked
        return bool(sent) and self._probed.get(carrier) != _position(carrier)


def _position(carrier: RelayedCarrier) -> tuple[int, tuple[NodeId, ...]]:
    return carrier.outgoing.next, carrier.route


Route: TypeAlias = tuple[NodeId, ...]

_LONGEST_REASON: Final = 1000  # bytes


class RelayNotices:
    """Sends acknowledgements, probes, broken hops and resets. Few notices wait for a neighbour without credit, others
    are lost: a node that needs an answer asks again.
    """

    def __init__(self, mesh: MeshView, neighbours: Neighbours) -> None:
        self._mesh = mesh
        self._neighbours = neighbours

    def send(self, carrier: RelayedCarrier, kind: RelayKind, *, sequence: int = 0, route: Route = ()) -> None:
        self._post(self.header(carrier, kind, sequence, route or carrier.route), b"")

    def header(self, carrier: RelayedCarrier, kind: RelayKind, sequence: int, route: Route) -> RelayHeader:
        """Return a header, including an acknowledgement."""
        ack = carrier.incoming.ack()
        return RelayHeader(kind, 1, carrier.number, self._mesh.epoch(), sequence, ack, route)

    def send_broken(self, back: Route, beyond: NodeId) -> None:
        self._post(RelayHeader(RelayKind.BROKEN, 1, 0, self._mesh.epoch(), 0, 0, back), encode_node(beyond))

    def send_reset(self, number: int, route: Route, reason: str) -> None:
        """The link is over here, or never existed."""
        header = RelayHeader(RelayKind.RESET, 1, number, self._mesh.epoch(), 0, 0, route)
        self._post(header, reason.encode()[:_LONGEST_REASON])

    def announce_connection(self, number: int, source: NodeId, node: NodeId) -> None:
        """Tell a source that a direct connection exists, with an empty acknowledgement."""
        if self._mesh.link(source) is not None:
            self._post(RelayHeader(RelayKind.ACK, 1, number, self._mesh.epoch(), 0, 0, (node, source)), b"")

    def _post(self, header: RelayHeader, body: bytes) -> None:
        neighbour = self._neighbours.get_or_open(header.route[1])
        if neighbour is not None and neighbour.accepts_notices:
            self._neighbours.put(neighbour, QueuedFrame(1, encode_relay(header) + body, None))


FIRST_PROBE: Final = 1.0  # seconds without an acknowledgement before a probe; doubles with each unanswered one
_LONGEST_PROBE: Final = 8.0
_REPORTED_KINDS: Final = frozenset((int(RelayKind.FRAME), int(RelayKind.PROBE), int(RelayKind.ACK)))
_KINDS: Final = frozenset(map(int, RelayKind))
_OPENING_KINDS: Final = frozenset((int(RelayKind.FRAME), int(RelayKind.PROBE)))  # kinds that may open a link


class Relay:
    """The relay of one node. Any thread, except where stated."""

    def __init__(self, node: NodeId, progress: Progress, deferred_io: DeferredIO, mesh: MeshView) -> None:
        self.node = node
        self.lock = threading.RLock()  # reentrant: garbage collection may run a finaliser that uses a carrier
        self._progress = progress
        self._deferred_io = deferred_io
        self._mesh = mesh
        self._sending = threading.Lock()  # held by the sending thread, never waited for
        # All below is guarded by the lock.
        self._carriers: dict[NodeId, RelayedCarrier] = {}
        self._ready: dict[RelayedCarrier, None] = {}  # may have frames to send
        self._neighbours = Neighbours(mesh)
        self._notices = RelayNotices(mesh, self._neighbours)
        self._rerouting = Rerouting(node, mesh, self._carriers, mark_ready=self.mark_ready, run_soon=progress.run_soon)
        self._idle = threading.Condition(self.lock)  # notified when nothing can be sent now
        self.forwarded = 0  # frames of others; in stats() "passed_on", a public key
        self.refused = 0  # frames of others without a next hop
        # Invalid or untrusted frames for this node. The neighbour that delivers them may be innocent, so nobody is
        # blamed.
        self.dropped = 0
        self._held = HeldFrames()

    @property
    def in_use(self) -> bool:
        """Whether it ever forwarded or sent anything. Also without the lock."""
        return bool(self._carriers or self._held or self.forwarded)

    # -- carriers --------------------------------------------------------------------------------------

    def make(self, peer: NodeId, number: int, route: Route) -> RelayedCarrier:
        """The peer makes the other end when the first frame arrives."""
        carrier = RelayedCarrier(self, peer, number, route)
        with self.lock:
            self._carriers[peer] = carrier
        return carrier

    def mark_ready(self, carrier: RelayedCarrier) -> None:
        """Under the lock."""
        self._ready[carrier] = None

    def flush_later(self) -> None:
        """Flush after the node's lock is released."""
        self._deferred_io.add(self.flush)

    def deliver_later(self, carrier: RelayedCarrier) -> None:
        self._progress.run_soon(carrier.deliver)

    def ended(self, carrier: RelayedCarrier, reason: str | None) -> None:
        """Forget a carrier; send a `reason` to the peer. Under the lock."""
        self._ready.pop(carrier, None)
        if reason is not None:
            self._notices.send_reset(carrier.number, carrier.route, reason)
        elif carrier.incoming.expected:
            self._notices.send(carrier, RelayKind.ACK)  # for its FINISH
        if self._carriers.get(carrier.peer_id) is carrier:
            del self._carriers[carrier.peer_id]
        self._idle.notify_all()

    # -- membership and links ------------------------------------------------------------------------------

    def adopt(self, is_member: Callable[[NodeId], bool]) -> None:
        """The membership changed: choose all routes again."""
        with self.lock:
            for node in self._neighbours.lost():  # includes links that this side closed
                self._break(node)
            for peer, carrier in list(self._carriers.items()):
                carrier.avoid = frozenset()
                if is_member(peer):
                    self._rerouting.reroute(carrier, "this node has no neighbours")
                else:
                    self._rerouting.removed(carrier)
        self._retry_held()
        self.flush()

    def _retry_held(self, source: NodeId | None = None) -> None:
        """Without the lock."""
        with self.lock:
            held = self._held.take(source) if self._held else []
        for header, carried in held:
            self._progress.run_soon(partial(self._arrived, header, memoryview(carried)))
        if held:
            self._progress.run_soon(self.flush)

    def settle(self, deadline: float, unneeded: Callable[[NodeId], bool]) -> None:
        """Block until all sent frames have arrived and queued ones are forwarded, or the deadline. Not on the driver
        thread.
        """
        drain = Drain(self._carriers, self._neighbours, unneeded)
        probed = True
        while probed:
            with self._idle:
                self._idle.wait_for(drain.is_ready, max(0.0, deadline - monotonic()))
                carriers = drain.carriers_to_probe()
                for carrier in carriers:
                    self._notices.send(carrier, RelayKind.PROBE, sequence=carrier.outgoing.next)
            probed = bool(carriers)
            self.flush()

    def close(self) -> None:
        """Close without telling peers. Idempotent."""
        with self.lock:
            for carrier in list(self._carriers.values()):
                carrier.end(CarrierLost("closed", "this node is closed"))

    def opened(self, node: NodeId) -> None:
        with self.lock:
            neighbour = self._neighbours.get(node)
            if neighbour is not None and self._neighbours.is_usable(neighbour):
                self._wake(neighbour)
            self._rerouting.opened(node)
        self._retry_held(node)  # their sources learn of this connection
        self.flush()

    def lost(self, link: Link) -> None:
        """Tell the recent sources that used this link."""
        with self.lock:
            if self._neighbours.using(link) is not None:
                self._break(link.peer)
        self._retry_held(link.peer)
        self.flush()

    def unreachable(self, node: NodeId, cause: str) -> None:
        with self.lock:
            neighbour = self._neighbours.get(node)
            if neighbour is not None and not self._neighbours.is_usable(neighbour):
                self._break(node)
            self._rerouting.unreachable(node, cause)
        self._retry_held(node)
        self.flush()

    def tick(self, now: float) -> float | None:
        """Probe for unacknowledged frames. Return when to call it next. Never block: the driver sends, because other
        threads may keep a sender busy.
        """
        with self.lock:
            for carrier in list(self._carriers.values()):
                if carrier.probe_at is not None and carrier.probe_at <= now:
                    self._probe(carrier, now)
            due = min((each.probe_at for each in self._carriers.values() if each.probe_at is not None), default=None)
        self._progress.run_soon(self.flush)
        return due

    def _probe(self, carrier: RelayedCarrier, now: float) -> None:
        carrier.probe_at = now + min(_LONGEST_PROBE, FIRST_PROBE * 2**carrier.probes)
        carrier.probes += 1
        if carrier.probes > 1:
            self._rerouting.take_last_heard(carrier)
        # only a direct connection proves to the peer who asks
        straight = self._mesh.link(carrier.peer_id) is not None
        route = (self.node, carrier.peer_id) if straight else ()
        self._notices.send(carrier, RelayKind.PROBE, sequence=carrier.outgoing.next, route=route)

    # -- arrival: the driver thread ------------------------------------------------------------------------

    def take(self, link: Link, frame: Frame, body: memoryview) -> bool:
        """For Router.relay. Raise FrameError if the peer cannot be the previous hop."""
        if frame.kind == FrameKind.RELAY:
            header, carried = decode_relay(body)
            if header.route[header.hops] != self.node or header.route[header.hops - 1] != link.peer:
                raise FrameError("hops", header.hops, "the position of this node in the route, after the sender")
            if header.is_at_destination:
                with self.lock:
                    self._return_credit(link, header.hops, len(body))
                self._arrived(header, carried)
            else:
                self._forward(link, header, body)
        elif frame.kind == FrameKind.RELAY_CREDIT:
            with self.lock:
                neighbour = self._neighbours.using(link)
                if neighbour is not None:
                    neighbour.credit_returned(frame.step, frame.length)
                    self._wake(neighbour)
        else:
            return False
        self.flush()
        return True

    def _forward(self, link: Link, header: RelayHeader, body: memoryview) -> None:
        hops, beyond, back = header.hops, header.route[header.hops + 1], header.route[header.hops :: -1]
        with self.lock:
            neighbour = (
                self._neighbours.get_or_open(beyond) if len(header.route) - 1 <= self._mesh.hop_limit() else None
            )
            if neighbour is None:
                self.refused += 1
                self._return_credit(link, hops, len(body))
                if header.kind in _REPORTED_KINDS:
                    self._notices.send_broken(back, beyond)
                return
            sender = self._sender_of(link)
            sender.count_received(hops, len(body))
            moved = bytearray(body)
            advance(moved, hops + 1)
            self._neighbours.put(neighbour, QueuedFrame(hops + 1, moved, sender))
            neighbour.remember(back)
            self.forwarded += 1

    def _sender_of(self, link: Link) -> NeighbourQueue:
        """Under the lock."""
        known = self._neighbours.get(link.peer)
        if known is not None and known.link is not None and known.link is not link:
            self._break(link.peer)  # it reconnected before the loss was reported
        return self._neighbours.attach(link)

    def _return_credit(self, link: Link, hops: int, size_bytes: int) -> None:
        """Under the lock."""
        sender = self._sender_of(link)
        sender.count_received(hops, size_bytes)
        self._neighbours.return_credit(sender, hops, size_bytes)

    def _arrived(self, header: RelayHeader, carried: memoryview) -> None:
        """An exception ends the source's carrier, not the link to the neighbour that delivered the frame."""
        try:
            self._take(header, carried)
        except Exception as fault:  # noqa: BLE001 - a relayed frame must not break more than its carrier
            reason = log_unhandled(describe_peer(None, header.source), fault)
            with self.lock:
                self.dropped += 1
                carrier = self._carriers.get(header.source)
            if carrier is not None:
                carrier.fail(CarrierLost("misbehaved", reason))

    def _take(self, header: RelayHeader, carried: memoryview) -> None:
        if header.kind == RelayKind.BROKEN:
            self._handle_broken(header.source, carried)
            return
        with self.lock:
            self.dropped += header.kind not in _KINDS
            carrier = self._carriers.get(header.source)
        if header.kind == RelayKind.RESET:
            if carrier is not None and carrier.number == header.number:
                carrier.fail(CarrierLost("peer", foreign_line(bytes(carried).decode(errors="replace"))), tell=False)
            return
        if carrier is None or carrier.number != header.number:
            if header.kind not in _OPENING_KINDS:
                return
            carrier = self._welcome(header, carried)
        if carrier is not None:
            self._handle_frame(carrier, header, carried)

    def _welcome(self, header: RelayHeader, carried: memoryview) -> RelayedCarrier | None:
        answer = self._mesh.accept_link(header)
        if isinstance(answer, RelayedCarrier):
            return answer
        with self.lock:
            if isinstance(answer, str):
                self._notices.send_reset(header.number, header.route[::-1], answer)
            elif answer is RefusedSource.NOT_YET:
                self._held.put(header, bytes(carried))
                self._notices.announce_connection(header.number, header.source, self.node)
            else:
                self.dropped += 1
        if answer is RefusedSource.NOT_YET and self._mesh.investigate(header):
            self._retry_held(header.source)
        return None

    def _handle_broken(self, source: NodeId, carried: memoryview) -> None:
        with self.lock:
            try:
                self._rerouting.avoid(source, decode_node(carried))
            except FrameError:
                self.dropped += 1

    def _handle_frame(self, carrier: RelayedCarrier, header: RelayHeader, carried: memoryview) -> None:
        with self.lock:
            carrier.last_heard_route = header.route[::-1]
            if len(header.route) == 2:
                self._rerouting.take_direct(carrier)
            if carrier.outgoing.acked(header.ack):
                carrier.probes = 0
                carrier.probe_at = monotonic() + FIRST_PROBE if carrier.outgoing.unacked else None
                self.mark_ready(carrier)
            if header.kind == RelayKind.ACK and header.sequence:
                carrier.probes = 0
                carrier.outgoing.send_again(header.sequence)
                self.mark_ready(carrier)
        if header.kind == RelayKind.FRAME:
            carrier.arrived(header.sequence, carried)
        with self.lock:
            if carrier.error is None and (header.kind == RelayKind.PROBE or carrier.incoming.owes_ack):
                asked = header.kind == RelayKind.PROBE  # the answer takes the probe's route back, which works
                back: Route = header.route[::-1] if asked else ()
                self._notices.send(carrier, RelayKind.ACK, sequence=header.sequence if asked else 0, route=back)

    # -- neighbours, under the lock ------------------------------------------------------------------------

    def _wake(self, neighbour: NeighbourQueue) -> None:
        self._neighbours.wake(neighbour)
        for carrier in self._carriers.values():
            if carrier.route[1] == neighbour.node:
                self._ready[carrier] = None

    def _break(self, node: NodeId) -> None:
        for back in self._neighbours.forget(node):
            self._notices.send_broken(back, node)
        self._rerouting.avoid(self.node, node)

    # -- sending -----------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send all that can be sent, unless another thread is sending. The caller holds no lock."""
        while (self._ready or self._neighbours.is_busy) and self._sending.acquire(blocking=False):
            try:
                while (step := self._next()) is not None:
                    self._send(step)
            finally:
                self._sending.release()

    def _next(self) -> Forward | None:
        with self.lock:
            step = self._neighbours.next()
            while step is None and self._ready:
                step = self._next_own(next(iter(self._ready)))
            if step is None:
                self._idle.notify_all()
        return step

    def _next_own(self, carrier: RelayedCarrier) -> Forward | None:
        """Return one frame; carriers take turns."""
        self._ready.pop(carrier, None)
        if carrier.no_route is not None:
            return None
        neighbour = self._neighbours.get_or_open(carrier.route[1])
        if neighbour is None:
            self._rerouting.avoid(self.node, carrier.route[1])
            return None
        if carrier.error is not None or not neighbour.has_room(1):
            return None
        segment = carrier.outgoing.take()
        if segment is None or neighbour.link is None:
            return None
        self._ready[carrier] = None
        header = encode_relay(self._notices.header(carrier, RelayKind.FRAME, segment.sequence, carrier.route))
        neighbour.sent(1, len(header) + len(segment.data))
        self._expect_ack(carrier)
        if carrier.outgoing.has_finished:
            carrier.end_if_finished()
        return Forward(neighbour.link, (header, segment.data))

    def _expect_ack(self, carrier: RelayedCarrier) -> None:
        if carrier.probe_at is None:
            carrier.probe_at = monotonic() + FIRST_PROBE
            self._mesh.wake_by(carrier.probe_at)

    def _send(self, step: Forward) -> None:
        try:
            if step.parts:
                step.link.send_relayed(*step.parts)
            if step.credit is not None:
                step.credit.link.return_relay_credit(step.credit.hops, step.credit.amount)
        except (CarrierLost, NexarError):
            return  # the link reports its loss, and sources resend unacknowledged frames
