"""What a node that is about to close still owes: its own frames must have arrived, those of others must have gone on.

Afterwards nothing depends on it: whatever reaches it then, its source still has, and sends along another way. No I/O,
guarded by the station's lock.

What a node itself says to the others about relaying: what has arrived, what it asks, what is broken or over.

A word may be lost: whoever needs an answer asks again. So for a neighbour that gives no room a few wait, and no more.
No I/O, guarded by the station's lock.

Where everything that is relayed passes: a node's own frames to peers that are no neighbours, and those of others.

What arrives is on a route that its source chose (see wire.relay). It is for this node, or it goes on to the next one
that the route names; if there is no way to that one, its source is told, who then takes another route and sends again
what may be lost. So no node on the way decides anything, and none can send in circles.

Sending  State changes under the station's lock. What can go is taken out in order and sent without it, by one thread
         at a time: whoever finds nobody at it, and that one does it for all.
Loss     When the link to a neighbour is lost, everybody whose frames went over it lately hears of it at once. What died
         inside a node that took it and passed nothing on is found by asking: a source that hears nothing of what it
         has sent asks the destination what it has.
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
    """Of one station, once."""

    def __init__(
        self, carriers: Mapping[NodeId, RelayedCarrier], ways: Neighbours, needless: Callable[[NodeId], bool]
    ) -> None:
        """`carriers` and `ways` are the station's. `needless`: what is for this node need not arrive."""
        self._carriers = carriers
        self._neighbours = ways
        self._needless = needless
        self._asked: dict[RelayedCarrier, tuple[int, tuple[NodeId, ...]]] = {}  # up to which number, and on which way

    def moves(self) -> bool:
        """Whether all is done, or somebody is to be asked."""
        owed = self._owed()
        return any(map(self._is_unasked, owed)) or not (owed or self._neighbours.hold_something)

    def questions(self) -> list[RelayedCarrier]:
        """Those whose peers are to be asked now what they have: they would say so of themselves, but not at once."""
        found = [carrier for carrier in self._owed() if self._is_unasked(carrier)]
        self._asked.update((carrier, _position(carrier)) for carrier in found)
        return found

    def _owed(self) -> list[RelayedCarrier]:
        return [
            each
            for each in self._carriers.values()
            if not each.outgoing.is_settled and not self._needless(each.peer_id)
        ]

    def _is_unasked(self, carrier: RelayedCarrier) -> bool:
        sent = carrier.stranded is None and carrier.outgoing.unacked
        return bool(sent) and self._asked.get(carrier) != _position(carrier)


def _position(carrier: RelayedCarrier) -> tuple[int, tuple[NodeId, ...]]:
    return carrier.outgoing.next, carrier.route


Route: TypeAlias = tuple[NodeId, ...]

_LONGEST_REASON: Final = 1000  # bytes


class RelayNotices:
    """Of one station."""

    def __init__(self, surroundings: MeshView, ways: Neighbours) -> None:
        """`ways` are the station's."""
        self._around = surroundings
        self._neighbours = ways

    def say(self, carrier: RelayedCarrier, kind: RelayKind, *, sequence: int = 0, route: Route = ()) -> None:
        """To the peer of a carrier. `route`: instead of the one that the carrier takes."""
        self._post(self.header(carrier, kind, sequence, route or carrier.route), b"")

    def header(self, carrier: RelayedCarrier, kind: RelayKind, sequence: int, route: Route) -> RelayHeader:
        """Of what goes to the peer of a carrier: it says as well what has arrived."""
        ack = carrier.incoming.ack()
        return RelayHeader(kind, 1, carrier.number, self._around.epoch(), sequence, ack, route)

    def tell_broken(self, back: Route, beyond: NodeId) -> None:
        """To the last of this route: it cannot go from here to that node."""
        self._post(RelayHeader(RelayKind.BROKEN, 1, 0, self._around.epoch(), 0, 0, back), encode_node(beyond))

    def tell_over(self, number: int, route: Route, reason: str) -> None:
        """To the last of this route: the link of this number is over here, or never was any."""
        header = RelayHeader(RelayKind.RESET, 1, number, self._around.epoch(), 0, 0, route)
        self._post(header, reason.encode()[:_LONGEST_REASON])

    def show_way(self, number: int, source: NodeId, node: NodeId) -> None:
        """To a source whose frames came over others, if there is a connection to it: this is the way. It says that
        nothing has arrived; who has no such link does not mind.
        """
        if self._around.link(source) is not None:
            self._post(RelayHeader(RelayKind.ACK, 1, number, self._around.epoch(), 0, 0, (node, source)), b"")

    def _post(self, header: RelayHeader, body: bytes) -> None:
        neighbour = self._neighbours.over(header.route[1])
        if neighbour is not None and neighbour.takes_words:
            self._neighbours.put(neighbour, QueuedFrame(1, encode_relay(header) + body, None))


FIRST_PROBE: Final = 1.0
"""Seconds without a word about what was sent, after which the destination is asked. Doubled each time it is in vain."""
_LONGEST_PROBE: Final = 8.0
_REPORTED_KINDS: Final = frozenset((int(RelayKind.FRAME), int(RelayKind.PROBE), int(RelayKind.ACK)))
_KINDS: Final = frozenset(map(int, RelayKind))
_OPENING_KINDS: Final = frozenset((int(RelayKind.FRAME), int(RelayKind.PROBE)))  # what the first word of a link may be


class Relay:
    """Of one node. Any thread, where nothing else is said."""

    def __init__(self, node: NodeId, progress: Progress, deferred_io: DeferredIO, surroundings: MeshView) -> None:
        self.node = node
        self.lock = threading.RLock()  # reentrant: the collector may run a finaliser that uses a carrier
        self._progress = progress
        self._deferred_io = deferred_io
        self._around = surroundings
        self._sending = threading.Lock()  # held by who sends, without waiting for it
        # All below under the lock.
        self._carriers: dict[NodeId, RelayedCarrier] = {}
        self._ready: dict[RelayedCarrier, None] = {}  # may have something to send
        self._neighbours = Neighbours(surroundings)
        self._notices = RelayNotices(surroundings, self._neighbours)
        self._rerouting = Rerouting(
            node, surroundings, self._carriers, has_news=self.has_news, run_soon=progress.run_soon
        )
        self._rested = threading.Condition(self.lock)  # notified when nothing can be sent now
        self.relayed = 0
        """Frames of others that went over this node."""
        self.refused = 0
        """Frames of others for which there was no way."""
        self.dropped = 0
        """Frames for this node that mean nothing, or that nobody here believes. What comes from afar may be wrong
        without any fault of who brings it, so nobody is blamed for them."""
        self._held = HeldFrames()

    @property
    def in_use(self) -> bool:
        """Whether anything has ever been relayed by, to or over this node. Also without the lock."""
        return bool(self._carriers or self._held or self.relayed)

    # -- carriers --------------------------------------------------------------------------------------

    def make(self, peer: NodeId, number: int, route: Route) -> RelayedCarrier:
        """One end of a relayed carrier; the other end is made where its first frame arrives."""
        carrier = RelayedCarrier(self, peer, number, route)
        with self.lock:
            self._carriers[peer] = carrier
        return carrier

    def has_news(self, carrier: RelayedCarrier) -> None:
        """See Dispatcher."""
        self._ready[carrier] = None

    def flush_later(self) -> None:
        """See Dispatcher."""
        self._deferred_io.add(self.flush)

    def deliver_later(self, carrier: RelayedCarrier) -> None:
        """See Dispatcher."""
        self._progress.run_soon(carrier.deliver)

    def ended(self, carrier: RelayedCarrier, reason: str | None) -> None:
        """See Dispatcher."""
        self._ready.pop(carrier, None)
        if reason is not None:
            self._notices.tell_over(carrier.number, carrier.route, reason)
        elif carrier.incoming.expected:
            self._notices.say(carrier, RelayKind.ACK)  # of its last word
        if self._carriers.get(carrier.peer_id) is carrier:
            del self._carriers[carrier.peer_id]
        self._rested.notify_all()

    # -- the membership and its links ------------------------------------------------------------------------

    def adopt(self, is_member: Callable[[NodeId], bool]) -> None:
        """The members have changed: everybody's route is looked for anew, and who is no member has none."""
        with self.lock:
            for node in self._neighbours.lost():  # among them those whose link this side has closed
                self._break(node)
            for peer, carrier in list(self._carriers.items()):
                carrier.avoid = frozenset()
                if is_member(peer):
                    self._rerouting.reroute(carrier, "this node has no neighbours any more")
                else:
                    self._rerouting.removed(carrier)
        self._reconsider()
        self.flush()

    def _reconsider(self, source: NodeId | None = None) -> None:
        """What could not be taken before: it may be another matter now. Without the lock."""
        with self.lock:
            held = self._held.take(source) if self._held else []
        for header, carried in held:
            self._progress.run_soon(partial(self._arrived, header, memoryview(carried)))
        if held:
            self._progress.run_soon(self.flush)

    def settle(self, deadline: float, needless: Callable[[NodeId], bool]) -> None:
        """Wait until all that was sent here has arrived and all that lies here has gone on, or until the deadline. What
        is for who is `needless` is not waited for. Not the driving thread.
        """
        settling = Drain(self._carriers, self._neighbours, needless)
        asked = True
        while asked:
            with self._rested:
                self._rested.wait_for(settling.moves, max(0.0, deadline - monotonic()))
                questions = settling.questions()
                for carrier in questions:
                    self._notices.say(carrier, RelayKind.PROBE, sequence=carrier.outgoing.next)
            asked = bool(questions)
            self.flush()

    def close(self) -> None:
        """Every carrier is over, without a word. Idempotent."""
        with self.lock:
            for carrier in list(self._carriers.values()):
                carrier.end(CarrierLost("closed", "this node is closed"))

    def opened(self, node: NodeId) -> None:
        """There is a link to a neighbour, or to whom there was no way."""
        with self.lock:
            neighbour = self._neighbours.get(node)
            if neighbour is not None and self._neighbours.is_usable(neighbour):
                self._wake(neighbour)
            self._rerouting.opened(node)
        self._reconsider(node)  # what came over others is shown this way
        self.flush()

    def lost(self, link: Link) -> None:
        """A link is lost. If it was one of a neighbour, others may have counted on it."""
        with self.lock:
            if self._neighbours.of(link) is not None:
                self._break(link.peer)
        self._reconsider(link.peer)
        self.flush()

    def unreachable(self, node: NodeId, cause: str) -> None:
        """The link to a neighbour, or to whom there was no way, could not be opened."""
        with self.lock:
            neighbour = self._neighbours.get(node)
            if neighbour is not None and not self._neighbours.is_usable(neighbour):
                self._break(node)
            self._rerouting.unreachable(node, cause)
        self._reconsider(node)
        self.flush()

    def tick(self, now: float) -> float | None:
        """Ask about what was sent and not heard of. When to call it next."""
        with self.lock:
            for carrier in list(self._carriers.values()):
                if carrier.probe_at is not None and carrier.probe_at <= now:
                    self._probe(carrier, now)
            due = min((each.probe_at for each in self._carriers.values() if each.probe_at is not None), default=None)
        self.flush()
        return due

    def _probe(self, carrier: RelayedCarrier, now: float) -> None:
        carrier.probe_at = now + min(_LONGEST_PROBE, FIRST_PROBE * 2**carrier.probes)
        carrier.probes += 1
        if carrier.probes > 1:
            self._rerouting.doubt(carrier)
        straight = self._around.link(carrier.peer_id) is not None  # only so can it know that this is who asks
        route = (self.node, carrier.peer_id) if straight else ()
        self._notices.say(carrier, RelayKind.PROBE, sequence=carrier.outgoing.next, route=route)

    # -- arriving: the driving thread ------------------------------------------------------------------------

    def take(self, link: Link, frame: Frame, body: memoryview) -> bool:
        """See Router.relay. FrameError: the peer gave us what it could not have had to give."""
        if frame.kind == FrameKind.RELAY:
            header, carried = decode_relay(body)
            if header.route[header.hops] != self.node or header.route[header.hops - 1] != link.peer:
                raise FrameError("hops", header.hops, "the place of this node in the route, behind who sent it")
            if header.is_there:
                with self.lock:
                    self._thank(link, header.hops, len(body))
                self._arrived(header, carried)
            else:
                self._pass_on(link, header, body)
        elif frame.kind == FrameKind.ROOM:
            with self.lock:
                neighbour = self._neighbours.of(link)
                if neighbour is not None:
                    neighbour.has_taken(frame.step, frame.length)
                    self._wake(neighbour)
        else:
            return False
        self.flush()
        return True

    def _pass_on(self, link: Link, header: RelayHeader, body: memoryview) -> None:
        hops, beyond, back = header.hops, header.route[header.hops + 1], header.route[header.hops :: -1]
        with self.lock:
            neighbour = self._neighbours.over(beyond) if len(header.route) - 1 <= self._around.hop_limit() else None
            if neighbour is None:
                self.refused += 1
                self._thank(link, hops, len(body))
                if header.kind in _REPORTED_KINDS:
                    self._notices.tell_broken(back, beyond)
                return
            came = self._behind(link)
            came.took_in(hops, len(body))
            moved = bytearray(body)
            advance(moved, hops + 1)
            self._neighbours.put(neighbour, QueuedFrame(hops + 1, moved, came))
            neighbour.remember(back)
            self.relayed += 1

    def _behind(self, link: Link) -> NeighbourQueue:
        """The neighbour that something came from. Under the lock."""
        known = self._neighbours.get(link.peer)
        if known is not None and known.link is not None and known.link is not link:
            self._break(link.peer)  # it has connected anew, and nobody has said so yet
        return self._neighbours.behind(link)

    def _thank(self, link: Link, hops: int, size_bytes: int) -> None:
        """For what does not lie here: it has arrived, or is dropped. Under the lock."""
        came = self._behind(link)
        came.took_in(hops, size_bytes)
        self._neighbours.thank(came, hops, size_bytes)

    def _arrived(self, header: RelayHeader, carried: memoryview) -> None:
        """Take it in. What raises here costs its source the relayed connection, and who brought it nothing."""
        try:
            self._take(header, carried)
        except Exception as fault:  # noqa: BLE001 - the boundary of what a relayed frame can do here
            reason = log_unhandled(describe_peer(None, header.source), fault)
            with self.lock:
                self.dropped += 1
                carrier = self._carriers.get(header.source)
            if carrier is not None:
                carrier.fail(CarrierLost("misbehaved", reason))

    def _take(self, header: RelayHeader, carried: memoryview) -> None:
        if header.kind == RelayKind.BROKEN:
            self._hear_of_break(header.source, carried)
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
            self._take_in(carrier, header, carried)

    def _welcome(self, header: RelayHeader, carried: memoryview) -> RelayedCarrier | None:
        answer = self._around.welcome(header)
        if isinstance(answer, RelayedCarrier):
            return answer
        with self.lock:
            if isinstance(answer, str):
                self._notices.tell_over(header.number, header.route[::-1], answer)
            elif answer is RefusedSource.NOT_YET:
                self._held.put(header, bytes(carried))
                self._notices.show_way(header.number, header.source, self.node)
            else:
                self.dropped += 1
        if answer is RefusedSource.NOT_YET and self._around.investigate(header):
            self._reconsider(header.source)
        return None

    def _hear_of_break(self, source: NodeId, carried: memoryview) -> None:
        with self.lock:
            try:
                self._rerouting.avoid(source, decode_node(carried))
            except FrameError:
                self.dropped += 1

    def _take_in(self, carrier: RelayedCarrier, header: RelayHeader, carried: memoryview) -> None:
        with self.lock:
            carrier.heard_over = header.route[::-1]
            if len(header.route) == 2:
                self._rerouting.straighten(carrier)
            if carrier.outgoing.acked(header.ack):
                carrier.probes = 0
                carrier.probe_at = monotonic() + FIRST_PROBE if carrier.outgoing.unacked else None
                self.has_news(carrier)
            if header.kind == RelayKind.ACK and header.sequence:
                carrier.probes = 0
                carrier.outgoing.send_again(header.sequence)
                self.has_news(carrier)
        if header.kind == RelayKind.FRAME:
            carrier.arrived(header.sequence, carried)
        with self.lock:
            if carrier.error is None and (header.kind == RelayKind.PROBE or carrier.incoming.owes_ack):
                asked = header.kind == RelayKind.PROBE  # on a way that leads here: there the answer goes back
                back: Route = header.route[::-1] if asked else ()
                self._notices.say(carrier, RelayKind.ACK, sequence=header.sequence if asked else 0, route=back)

    # -- ways, under the lock ----------------------------------------------------------------------------

    def _wake(self, neighbour: NeighbourQueue) -> None:
        """It may take more."""
        self._neighbours.wake(neighbour)
        for carrier in self._carriers.values():
            if carrier.route[1] == neighbour.node:
                self._ready[carrier] = None

    def _break(self, node: NodeId) -> None:
        for back in self._neighbours.forget(node):
            self._notices.tell_broken(back, node)
        self._rerouting.avoid(self.node, node)

    # -- sending -----------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send what can be sent, unless another thread is at it; it then does this too. Without any lock."""
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
                self._rested.notify_all()
        return step

    def _next_own(self, carrier: RelayedCarrier) -> Forward | None:
        """One frame, and then the turn of the next carrier."""
        self._ready.pop(carrier, None)
        if carrier.stranded is not None:
            return None
        neighbour = self._neighbours.over(carrier.route[1])
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
            self._around.wake_by(carrier.probe_at)

    def _send(self, step: Forward) -> None:
        try:
            if step.parts:
                step.link.pass_on(*step.parts)
            if step.thanks is not None:
                step.thanks.link.make_room(step.thanks.hops, step.thanks.amount)
        except (CarrierLost, NexarError):
            return  # whoever loses the link says so, and everything that matters is sent again
