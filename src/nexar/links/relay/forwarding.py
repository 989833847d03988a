"""Queues per neighbour, held frames, and rerouting. No I/O; the relay's lock guards all of it.

Deadlock freedom: frames are buffered in classes by hops travelled. A frame that arrived after h hops stays in class h
until class h + 1 of the next node has room. So a class waits only for higher ones, and the highest for none: a
destination accepts everything. Each class of each neighbour holds CLASS_BYTES plus the frame that exceeds it.

Held frames: their source is not a member here yet, or may be an impostor. Holding is an optimisation, because sources
resend. It is bounded per delivering neighbour, so no neighbour can displace frames of others.

Rerouting: hops fail long before the membership changes, so a broken route is replaced. If no route is left, this node
connects directly: a live member must not be lost because others fail. Meanwhile the carrier's frames wait.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from typing import Final, NamedTuple, Protocol

from nexar.links.link import Link
from nexar.links.relay.carrier import RelayedCarrier
from nexar.transport.base import Buffer, CarrierLost
from nexar.types import NodeId, format_node
from nexar.wire.frame import FrameError
from nexar.wire.relay import RelayHeader


class RefusedSource(Enum):
    """Why a frame is not accepted; its source gets no answer."""

    NOT_YET = "not yet"  # may be accepted after a membership change, or when the connection to its source is lost
    NEVER = "never"


class MeshView(Protocol):
    """The mesh, as a relay sees it. Never blocks. Called under the relay's lock, except `accept_link`, `investigate`.

    A protocol because cluster/, a higher layer, implements it.
    """

    def epoch(self) -> int: ...

    def route(self, destination: NodeId, avoid: frozenset[NodeId]) -> tuple[NodeId, ...] | None:
        """Return a route from this node, both ends included. It is not direct if `avoid` contains the destination."""

    def hop_limit(self) -> int:
        """No valid route is longer."""

    def link(self, node: NodeId) -> Link | None:
        """Return None for a neighbour without its own connection."""

    def open(self, node: NodeId) -> bool:
        """Begin to open: `opened` or `unreachable` follows. Return False if not a neighbour."""

    def connect(self, node: NodeId, why: str) -> bool:
        """Begin to connect directly: `opened` or `unreachable` follows. Return False if it is not a member, or this
        node closes.
        """

    def accept_link(self, header: RelayHeader) -> RelayedCarrier | str | RefusedSource:
        """Accept the first frame of a link: return its carrier, or a reason for the source. Driver thread."""

    def investigate(self, header: RelayHeader) -> bool:
        """Begin to check a held frame; `lost`, `unreachable` or the next membership follows. Return True if acceptable
        now. Driver thread.
        """

    def wake_by(self, due: float) -> None:
        """Call `tick` at that time."""


HELD_BYTES: Final = 512 << 10  # per neighbour; the newest frame is held even if it is larger
_FRAME_BYTES: Final = 256  # overhead of one held frame


class HeldFrame(NamedTuple):
    """A frame with a copy of its content."""

    header: RelayHeader
    carried: bytes

    @property
    def size_bytes(self) -> int:
        return _FRAME_BYTES + 8 * len(self.header.route) + len(self.carried)


class HeldFrames:
    """Frames that cannot be accepted yet."""

    def __init__(self) -> None:
        self._frames: dict[NodeId, deque[HeldFrame]] = {}  # by the neighbour that delivered them
        self._bytes: dict[NodeId, int] = {}
        self.displaced = 0  # frames dropped to make room

    def __bool__(self) -> bool:
        return bool(self._frames)

    def put(self, header: RelayHeader, carried: bytes) -> None:
        before, frame = header.route[-2], HeldFrame(header, carried)
        frames = self._frames.setdefault(before, deque())
        frames.append(frame)
        held = self._bytes.get(before, 0) + frame.size_bytes
        while held > HELD_BYTES and len(frames) > 1:
            held -= frames.popleft().size_bytes
            self.displaced += 1
        self._bytes[before] = held

    def take(self, source: NodeId | None = None) -> list[HeldFrame]:
        """Remove and return all, or those of one source, in order per neighbour."""
        held = [frame for frames in self._frames.values() for frame in frames]
        self._frames.clear()
        self._bytes.clear()
        if source is None:
            return held
        for frame in held:
            if frame.header.source != source:
                self.put(*frame)
        return [frame for frame in held if frame.header.source == source]


CLASS_BYTES: Final = 512 << 10
RETURN_BYTES: Final = CLASS_BYTES // 4  # Credit is returned in amounts of this size; a sender never waits for less.
NOTICE_BYTES: Final = CLASS_BYTES  # notices of this node that may wait for a neighbour without credit
MAX_SOURCES: Final = 4096  # remembered for each pair of neighbours


class QueuedFrame(NamedTuple):
    """A frame to forward."""

    hops: int  # travelled when it arrives there
    body: bytearray | bytes
    received_from: NeighbourQueue | None  # gets the credit back; None for a notice of this node


class NeighbourQueue:
    """The queue to one neighbour."""

    def __init__(self, node: NodeId) -> None:
        self.node = node
        self.link: Link | None = None  # None: not open yet
        self._sent: Counter[int] = Counter()  # bytes by class, sent there and not forwarded yet
        self._waiting: dict[int, deque[QueuedFrame]] = {}
        self._received: Counter[int] = Counter()  # bytes by class, received from there and not forwarded yet
        self._forwarded: Counter[int] = Counter()  # bytes by class, forwarded but not credited yet
        self._notice_bytes = 0  # of this node's waiting notices
        # The sources of forwarded frames, with the route back to each. Grouped by the neighbour that delivered them, so
        # that invented sources displace only those of the same neighbour.
        self._sources: dict[NodeId, dict[NodeId, tuple[NodeId, ...]]] = {}

    def has_room(self, hops: int) -> bool:
        return self.link is not None and self._sent[hops] < CLASS_BYTES

    @property
    def accepts_notices(self) -> bool:
        """False for a peer that probes and returns no credit."""
        return self._notice_bytes < NOTICE_BYTES

    def put(self, waiting: QueuedFrame) -> None:
        self._waiting.setdefault(waiting.hops, deque()).append(waiting)
        if waiting.received_from is None:
            self._notice_bytes += len(waiting.body)

    def take(self) -> QueuedFrame | None:
        """Return the frame to send now, most hops first."""
        for hops in sorted(self._waiting, reverse=True):
            if self.has_room(hops):
                found = self._waiting[hops].popleft()
                if not self._waiting[hops]:
                    del self._waiting[hops]
                if found.received_from is None:
                    self._notice_bytes -= len(found.body)
                self.sent(hops, len(found.body))
                return found
        return None

    def sent(self, hops: int, size_bytes: int) -> None:
        self._sent[hops] += size_bytes

    def credit_returned(self, hops: int, size_bytes: int) -> None:
        """Free the room of forwarded bytes. Ignore credit for frames never sent."""
        left = self._sent.pop(hops, 0) - size_bytes
        if left > 0:
            self._sent[hops] = left

    def count_received(self, hops: int, size_bytes: int) -> None:
        """Raise FrameError if its class is full."""
        if self._received[hops] >= CLASS_BYTES:
            raise FrameError("body", size_bytes, f"no more than {CLASS_BYTES} bytes at a time after {hops} hops")
        self._received[hops] += size_bytes

    def count_forwarded(self, hops: int, size_bytes: int) -> int:
        """Return the credit to send back."""
        self._received[hops] -= size_bytes
        self._forwarded[hops] += size_bytes
        if self._forwarded[hops] < RETURN_BYTES:
            return 0
        return self._forwarded.pop(hops)

    def drain(self) -> list[QueuedFrame]:
        found = [each for hops in sorted(self._waiting) for each in self._waiting[hops]]
        self._waiting.clear()
        self._notice_bytes = 0
        return found

    def remember(self, back: tuple[NodeId, ...]) -> None:
        """Remember the route back to a source. The least recent source makes room; its next frame restores it."""
        known = self._sources.setdefault(back[1], {})
        known.pop(back[-1], None)
        if len(known) >= MAX_SOURCES:
            del known[next(iter(known))]
        known[back[-1]] = back

    @property
    def sources(self) -> list[tuple[NodeId, ...]]:
        return [back for known in self._sources.values() for back in known.values()]

    @property
    def waits(self) -> int:
        return sum(map(len, self._waiting.values()))


class ReturnedCredit(NamedTuple):
    """Credit for a neighbour."""

    link: Link
    hops: int
    amount: int


class Forward(NamedTuple):
    """Bytes to send, and the credit to return for them."""

    link: Link
    parts: tuple[Buffer, ...]
    credit: ReturnedCredit | None = None


class Neighbours:
    """The queues of all neighbours."""

    def __init__(self, mesh: MeshView) -> None:
        self._mesh = mesh
        self._hops: dict[NodeId, NeighbourQueue] = {}
        self._busy: dict[NeighbourQueue, None] = {}  # may have a frame to send
        self._credits: deque[ReturnedCredit] = deque()  # for frames that were not forwarded

    @property
    def is_busy(self) -> bool:
        """Also without the lock."""
        return bool(self._busy or self._credits)

    @property
    def has_waiting(self) -> bool:
        return any(neighbour.waits for neighbour in self._hops.values())

    def get_or_open(self, node: NodeId) -> NeighbourQueue | None:
        """None if its link is lost or cannot be opened."""
        neighbour = self._hops.get(node)
        if neighbour is None:
            neighbour = NeighbourQueue(node)
            if not self.is_usable(neighbour) and not self._mesh.open(node):
                return None
            self._hops[node] = neighbour
        elif neighbour.link is not None and neighbour.link.failure is not None:
            return None  # lost; the report of the loss handles the rest
        return neighbour

    def get(self, node: NodeId) -> NeighbourQueue | None:
        return self._hops.get(node)

    def using(self, link: Link) -> NeighbourQueue | None:
        neighbour = self._hops.get(link.peer)
        return neighbour if neighbour is not None and neighbour.link is link else None

    def attach(self, link: Link) -> NeighbourQueue:
        """The caller has handled the loss of an earlier link."""
        neighbour = self._hops.setdefault(link.peer, NeighbourQueue(link.peer))
        neighbour.link = link
        return neighbour

    def is_usable(self, neighbour: NeighbourQueue) -> bool:
        if neighbour.link is None:
            neighbour.link = self._mesh.link(neighbour.node)
        return neighbour.link is not None and neighbour.link.failure is None

    def put(self, neighbour: NeighbourQueue, waiting: QueuedFrame) -> None:
        neighbour.put(waiting)
        self._busy[neighbour] = None

    def wake(self, neighbour: NeighbourQueue) -> None:
        self._busy[neighbour] = None

    def forget(self, node: NodeId) -> list[tuple[NodeId, ...]]:
        """Remove a lost neighbour. Return the routes back to its sources."""
        neighbour = self._hops.pop(node, None)
        if neighbour is None:
            return []
        self._busy.pop(neighbour, None)
        for waiting in neighbour.drain():
            credit = _returned_credit(waiting)
            if credit is not None:
                self._credits.append(credit)
        return neighbour.sources

    def lost(self) -> list[NodeId]:
        return [
            neighbour.node
            for neighbour in self._hops.values()
            if neighbour.link is not None and neighbour.link.failure is not None
        ]

    def return_credit(self, neighbour: NeighbourQueue, hops: int, size_bytes: int) -> None:
        amount = neighbour.count_forwarded(hops, size_bytes)
        if amount and neighbour.link is not None:
            self._credits.append(ReturnedCredit(neighbour.link, hops, amount))

    def next(self) -> Forward | None:
        if self._credits:
            credit = self._credits.popleft()
            return Forward(credit.link, (), credit)
        while self._busy:
            neighbour = next(iter(self._busy))
            found = neighbour.take() if self.is_usable(neighbour) else None
            if found is not None and neighbour.link is not None:
                return Forward(neighbour.link, (found.body,), _returned_credit(found))
            del self._busy[neighbour]
        return None


def _returned_credit(waiting: QueuedFrame) -> ReturnedCredit | None:
    neighbour, hops = waiting.received_from, waiting.hops - 1
    amount = 0 if neighbour is None else neighbour.count_forwarded(hops, len(waiting.body))
    return (
        ReturnedCredit(neighbour.link, hops, amount)
        if amount and neighbour is not None and neighbour.link is not None
        else None
    )


class Rerouting:
    """Chooses routes for the carriers of one relay."""

    def __init__(
        self,
        node: NodeId,
        mesh: MeshView,
        carriers: Mapping[NodeId, RelayedCarrier],
        *,
        mark_ready: Callable[[RelayedCarrier], None],
        run_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        """`run_soon` lets the driver report a carrier's loss."""
        self._node = node
        self._mesh = mesh
        self._carriers = carriers
        self._mark_ready = mark_ready
        self._run_soon = run_soon

    def avoid(self, before: NodeId, beyond: NodeId) -> None:
        """Reroute carriers that use this broken hop."""
        for carrier in list(self._carriers.values()):
            route = carrier.route
            if before in route[:-1] and route[route.index(before) + 1] == beyond:
                straight = before == self._node or beyond != route[-1]
                carrier.avoid |= {beyond} if straight else {before}
                where = f"{format_node(before)} cannot reach {format_node(beyond)}"
                self.reroute(
                    carrier, f"node {where}" if before != self._node else f"node {format_node(beyond)} is gone"
                )

    def reroute(self, carrier: RelayedCarrier, why: str) -> None:
        route = self._mesh.route(carrier.peer_id, carrier.avoid)
        if route is None and carrier.last_heard_route != carrier.route:
            route = carrier.last_heard_route  # the peer reaches this node through there
        if route is not None:
            self._take(carrier, route)
        elif carrier.no_route is None:
            self._strand(carrier, why)

    def take_last_heard(self, carrier: RelayedCarrier) -> None:
        """A probe is unanswered: take the route on which the peer was last heard."""
        if carrier.last_heard_route is not None and carrier.last_heard_route != carrier.route:
            self._take(carrier, carrier.last_heard_route)

    def take_direct(self, carrier: RelayedCarrier) -> None:
        """The peer sent directly: the best route, and maybe the only one on which it trusts this node."""
        straight = self._node, carrier.peer_id
        if carrier.route != straight or carrier.no_route is not None:
            self._take(carrier, straight)

    def opened(self, node: NodeId) -> None:
        carrier = self._carriers.get(node)
        if carrier is not None and carrier.no_route is not None:
            carrier.avoid -= {node}
            self.reroute(carrier, carrier.no_route)

    def unreachable(self, node: NodeId, cause: str) -> None:
        carrier = self._carriers.get(node)
        if carrier is not None and carrier.no_route is not None:
            self._lose(carrier, f"{carrier.no_route}, and the direct connection failed: {cause}")

    def removed(self, carrier: RelayedCarrier) -> None:
        self._run_soon(partial(carrier.fail, CarrierLost("peer", "it is no longer a member")))

    def _take(self, carrier: RelayedCarrier, route: tuple[NodeId, ...]) -> None:
        """Resend frames that the old route may have lost. A carrier that had no route always resends."""
        if route != carrier.route or carrier.no_route is not None:
            carrier.route = route
            carrier.outgoing.send_again()
        carrier.no_route = None
        self._mark_ready(carrier)

    def _strand(self, carrier: RelayedCarrier, why: str) -> None:
        carrier.no_route = why
        if not self._mesh.connect(carrier.peer_id, why):
            self._lose(carrier, why)

    def _lose(self, carrier: RelayedCarrier, why: str) -> None:
        self._run_soon(partial(carrier.fail, CarrierLost("peer", f"no route over other nodes is left: {why}")))
