"""What a station needs of the mesh around it.

Frames for this node that it cannot take yet: of who is no member here yet, or of who may not be who it says.

All of it is a convenience, for a source sends again what was not acknowledged. So what is held has a bound, for each
neighbour that brings it, and the oldest makes room: whoever fills it takes nothing from who comes over others. No I/O,
guarded by the station's lock.

One neighbour, as a way to others: what waits to go over it, and how much it takes. No I/O, no lock of its own.

Law: what is relayed is held in buffers classed by the hops that it has travelled. What arrives after h hops lies in
class h until it goes on, and it goes on as soon as class h + 1 of the next node has room. So a class waits only for
higher classes, the highest of which wait for nobody: their frames have arrived, and a destination takes everything. No
circle of waits can form, however the routes cross.

Each class of each neighbour holds CLASS_BYTES, and the frame with which that is exceeded. Who sends counts, who has
passed it on gives the room back.

The neighbours of one node, as ways to others: what waits at each, and what is to be said to whom. No I/O.

Guarded by the station's lock.

Which way each relayed carrier takes, and what becomes of it when there is none. No I/O, guarded by the station's
lock.

Hops end long before the members have agreed on a world without them: a way that is broken is replaced by another. When
none is left, this node connects to the peer itself, neighbour or not, for nobody who lives may be lost because others
have gone. Meanwhile the carrier is stranded: what it has to send waits. Only if the peer cannot be reached so either,
the carrier is lost, and the hop is named that was missed.
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
    """What becomes of a frame that is not taken, and whose source is told nothing."""

    NOT_YET = "not yet"  # it may be taken when the members change, or the connection to its source is lost
    NEVER = "never"


class MeshView(Protocol):
    """What a station asks of its mesh. Called under the station's lock, but for `welcome` and `look_into`; none may
    block.
    """

    def epoch(self) -> int:
        """Of the membership."""

    def route(self, destination: NodeId, avoid: frozenset[NodeId]) -> tuple[NodeId, ...] | None:
        """From this node, both ends included. If the destination itself is avoided: not straight to it."""

    def hop_limit(self) -> int:
        """No route that makes sense is longer."""

    def link(self, node: NodeId) -> Link | None:
        """The link to a neighbour, if it can be spoken on without others."""

    def open(self, node: NodeId) -> bool:
        """Begin to open it: `opened` or `unreachable` follows. False: this is no neighbour."""

    def connect(self, node: NodeId, why: str) -> bool:
        """There is no way over others, and why: begin to connect to this peer itself, neighbour or not. `opened` or
        `unreachable` follows. False: it is no member any more, or this node closes.
        """

    def welcome(self, header: RelayHeader) -> RelayedCarrier | str | RefusedSource:
        """The first frame of a link has come: what takes it; or why not, for the source; or nothing is said.
        Driving thread.
        """

    def investigate(self, header: RelayHeader) -> bool:
        """What was not to be taken yet is held: begin to find out whether it can be. `lost` or `unreachable` follows
        if so, or the next membership. True: it can be by now, for that has come already. Driving thread.
        """

    def wake_by(self, due: float) -> None:
        """Call `tick` then."""


HELD_BYTES: Final = 512 << 10
"""For each neighbour; the newest frame is held even if it is larger."""
_FRAME_BYTES: Final = 256  # that one takes, however little it carries


class HeldFrame(NamedTuple):
    """With a copy of what it carries."""

    header: RelayHeader
    carried: bytes

    @property
    def size_bytes(self) -> int:
        """What it counts for."""
        return _FRAME_BYTES + 8 * len(self.header.route) + len(self.carried)


class HeldFrames:
    """Of one station."""

    def __init__(self) -> None:
        self._frames: dict[NodeId, deque[HeldFrame]] = {}  # by who brought them
        self._bytes: dict[NodeId, int] = {}
        self.displaced = 0
        """How many had to make room."""

    def __bool__(self) -> bool:
        return bool(self._frames)

    def put(self, header: RelayHeader, carried: bytes) -> None:
        """It came over the last node but one of its route."""
        before, frame = header.route[-2], HeldFrame(header, carried)
        frames = self._frames.setdefault(before, deque())
        frames.append(frame)
        held = self._bytes.get(before, 0) + frame.size_bytes
        while held > HELD_BYTES and len(frames) > 1:
            held -= frames.popleft().size_bytes
            self.displaced += 1
        self._bytes[before] = held

    def take(self, source: NodeId | None = None) -> list[HeldFrame]:
        """All of them, or those of one source, in the order in which each neighbour brought them."""
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
RETURN_BYTES: Final = CLASS_BYTES // 4
"""Room is given back in amounts of this size: less than that is never what a sender waits for."""
NOTICE_BYTES: Final = CLASS_BYTES
"""So many words of this node's own wait for a neighbour that gives no room, and no more."""
MOST_SOURCES: Final = 4096
"""Remembered for each two neighbours."""


class QueuedFrame(NamedTuple):
    """Something that is to go on."""

    hops: int
    """That it will have travelled when it arrives there."""
    body: bytearray | bytes
    came_over: NeighbourQueue | None
    """Who is to get the room back; None: it is this node's own."""


class NeighbourQueue:
    """A neighbour. Guarded by its station's lock."""

    def __init__(self, node: NodeId) -> None:
        self.node = node
        self.link: Link | None = None
        """None: not open yet."""
        self._under_way: Counter[int] = Counter()  # bytes by class, sent there and not passed on yet
        self._waiting: dict[int, deque[QueuedFrame]] = {}
        self._lying: Counter[int] = Counter()  # bytes by class, that came from there and lie here
        self._passed_on: Counter[int] = Counter()  # bytes by class, that have gone on, and it has not been told
        self._notice_bytes = 0  # of those that wait and are this node's own
        # Whose frames have gone over it, with the route from here back to each: by the neighbour that brought them, so
        # that whoever invents sources keeps none from being remembered but those that come over the same neighbour.
        self._sources: dict[NodeId, dict[NodeId, tuple[NodeId, ...]]] = {}

    def has_room(self, hops: int) -> bool:
        """For one more frame of this class."""
        return self.link is not None and self._under_way[hops] < CLASS_BYTES

    @property
    def takes_words(self) -> bool:
        """Whether one more word of this node's own may wait. Who asks and gives no room gets no more answers."""
        return self._notice_bytes < NOTICE_BYTES

    def put(self, waiting: QueuedFrame) -> None:
        """It goes when there is room."""
        self._waiting.setdefault(waiting.hops, deque()).append(waiting)
        if waiting.came_over is None:
            self._notice_bytes += len(waiting.body)

    def take(self) -> QueuedFrame | None:
        """What goes now, those that have come the farthest first; None: nothing can."""
        for hops in sorted(self._waiting, reverse=True):
            if self.has_room(hops):
                found = self._waiting[hops].popleft()
                if not self._waiting[hops]:
                    del self._waiting[hops]
                if found.came_over is None:
                    self._notice_bytes -= len(found.body)
                self.sent(hops, len(found.body))
                return found
        return None

    def sent(self, hops: int, size_bytes: int) -> None:
        """So much is under way."""
        self._under_way[hops] += size_bytes

    def has_taken(self, hops: int, size_bytes: int) -> None:
        """The neighbour has passed it on. Of what never went there it says nothing."""
        left = self._under_way.pop(hops, 0) - size_bytes
        if left > 0:
            self._under_way[hops] = left

    def took_in(self, hops: int, size_bytes: int) -> None:
        """Something has come from there. FrameError: more than it may give us."""
        if self._lying[hops] >= CLASS_BYTES:
            raise FrameError("body", size_bytes, f"no more than {CLASS_BYTES} bytes at a time after {hops} hops")
        self._lying[hops] += size_bytes

    def passed_on(self, hops: int, size_bytes: int) -> int:
        """What came from there has gone on. Returns what the neighbour is to be told now; 0: nothing yet."""
        self._lying[hops] -= size_bytes
        self._passed_on[hops] += size_bytes
        if self._passed_on[hops] < RETURN_BYTES:
            return 0
        return self._passed_on.pop(hops)

    def drain(self) -> list[QueuedFrame]:
        """All that waits, and does not any more."""
        found = [each for hops in sorted(self._waiting) for each in self._waiting[hops]]
        self._waiting.clear()
        self._notice_bytes = 0
        return found

    def remember(self, back: tuple[NodeId, ...]) -> None:
        """Frames of the last one of this route go over it; the route leads back from here. The one that was heard of
        longest ago makes room: it will be remembered with its next frame.
        """
        known = self._sources.setdefault(back[1], {})
        known.pop(back[-1], None)
        if len(known) >= MOST_SOURCES:
            del known[next(iter(known))]
        known[back[-1]] = back

    @property
    def sources(self) -> list[tuple[NodeId, ...]]:
        """The ways back to everybody whose frames have gone over it."""
        return [back for known in self._sources.values() for back in known.values()]

    @property
    def waits(self) -> int:
        """How many frames wait."""
        return sum(map(len, self._waiting.values()))


class ReturnedCredit(NamedTuple):
    """Room that is given back."""

    link: Link
    hops: int
    amount: int


class Forward(NamedTuple):
    """What to send over a link; and whom to thank for it."""

    link: Link
    parts: tuple[Buffer, ...]
    thanks: ReturnedCredit | None = None


class Neighbours:
    """By neighbour."""

    def __init__(self, surroundings: MeshView) -> None:
        self._around = surroundings
        self._hops: dict[NodeId, NeighbourQueue] = {}
        self._busy: dict[NeighbourQueue, None] = {}  # may take something that waits
        self._thanks: deque[ReturnedCredit] = deque()  # for what was not sent on

    @property
    def is_busy(self) -> bool:
        """Whether `next` may find something. Also without the lock."""
        return bool(self._busy or self._thanks)

    @property
    def hold_something(self) -> bool:
        """Whether anything waits to go on."""
        return any(neighbour.waits for neighbour in self._hops.values())

    def over(self, node: NodeId) -> NeighbourQueue | None:
        """A neighbour to which there is a link, or is about to be one."""
        neighbour = self._hops.get(node)
        if neighbour is None:
            neighbour = NeighbourQueue(node)
            if not self.is_usable(neighbour) and not self._around.open(node):
                return None
            self._hops[node] = neighbour
        elif neighbour.link is not None and neighbour.link.failure is not None:
            return None  # lost; whoever tells us so sees to the rest
        return neighbour

    def get(self, node: NodeId) -> NeighbourQueue | None:
        """If anything has gone over it."""
        return self._hops.get(node)

    def of(self, link: Link) -> NeighbourQueue | None:
        """The neighbour that this link leads to, if it is the one that is used. None: it never was, or is not now."""
        neighbour = self._hops.get(link.peer)
        return neighbour if neighbour is not None and neighbour.link is link else None

    def behind(self, link: Link) -> NeighbourQueue:
        """The neighbour that something has come from. `of` it has been looked for before."""
        neighbour = self._hops.setdefault(link.peer, NeighbourQueue(link.peer))
        neighbour.link = link
        return neighbour

    def is_usable(self, neighbour: NeighbourQueue) -> bool:
        """Whether there is a link."""
        if neighbour.link is None:
            neighbour.link = self._around.link(neighbour.node)
        return neighbour.link is not None and neighbour.link.failure is None

    def put(self, neighbour: NeighbourQueue, waiting: QueuedFrame) -> None:
        """It goes when it can."""
        neighbour.put(waiting)
        self._busy[neighbour] = None

    def wake(self, neighbour: NeighbourQueue) -> None:
        """It may take more."""
        self._busy[neighbour] = None

    def forget(self, node: NodeId) -> list[tuple[NodeId, ...]]:
        """It is gone, with what waits there. Returns the routes back to those whose frames went over it."""
        neighbour = self._hops.pop(node, None)
        if neighbour is None:
            return []
        self._busy.pop(neighbour, None)
        for waiting in neighbour.drain():
            thanks = _returned_credit(waiting)
            if thanks is not None:
                self._thanks.append(thanks)
        return neighbour.sources

    def lost(self) -> list[NodeId]:
        """Those to which there was a link, and is none now."""
        return [
            neighbour.node
            for neighbour in self._hops.values()
            if neighbour.link is not None and neighbour.link.failure is not None
        ]

    def thank(self, neighbour: NeighbourQueue, hops: int, size_bytes: int) -> None:
        """What came from there has gone from here, wherever to."""
        amount = neighbour.passed_on(hops, size_bytes)
        if amount and neighbour.link is not None:
            self._thanks.append(ReturnedCredit(neighbour.link, hops, amount))

    def next(self) -> Forward | None:
        """What to send now."""
        if self._thanks:
            thanks = self._thanks.popleft()
            return Forward(thanks.link, (), thanks)
        while self._busy:
            neighbour = next(iter(self._busy))
            found = neighbour.take() if self.is_usable(neighbour) else None
            if found is not None and neighbour.link is not None:
                return Forward(neighbour.link, (found.body,), _returned_credit(found))
            del self._busy[neighbour]
        return None


def _returned_credit(waiting: QueuedFrame) -> ReturnedCredit | None:
    """It goes from here: what is to be said to who sent it."""
    neighbour, hops = waiting.came_over, waiting.hops - 1
    amount = 0 if neighbour is None else neighbour.passed_on(hops, len(waiting.body))
    return (
        ReturnedCredit(neighbour.link, hops, amount)
        if amount and neighbour is not None and neighbour.link is not None
        else None
    )


class Rerouting:
    """Of one station."""

    def __init__(
        self,
        node: NodeId,
        surroundings: MeshView,
        carriers: Mapping[NodeId, RelayedCarrier],
        *,
        has_news: Callable[[RelayedCarrier], None],
        run_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        """`carriers` are the station's, by peer. `run_soon` lets the driving thread tell a carrier that it is lost."""
        self._node = node
        self._around = surroundings
        self._carriers = carriers
        self._has_news = has_news
        self._run_soon = run_soon

    def avoid(self, before: NodeId, beyond: NodeId) -> None:
        """The hop from one node to another is broken: whatever of ours goes over it takes another way."""
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
        """Look for another way; `why` there is need of one."""
        route = self._around.route(carrier.peer_id, carrier.avoid)
        if route is None and carrier.heard_over != carrier.route:
            route = carrier.heard_over  # whatever is wrong elsewhere: the peer comes through there
        if route is not None:
            self._take(carrier, route)
        elif carrier.stranded is None:
            self._strand(carrier, why)

    def doubt(self, carrier: RelayedCarrier) -> None:
        """The peer was asked and does not answer: if it comes on another way, that one is taken. On the present one
        there may be somebody who takes everything and passes nothing on, and has not been missed yet.
        """
        if carrier.heard_over is not None and carrier.heard_over != carrier.route:
            self._take(carrier, carrier.heard_over)

    def straighten(self, carrier: RelayedCarrier) -> None:
        """The peer speaks over a connection of its own. There is no better way, and on no other may it believe this
        node: what is under way on others goes again.
        """
        straight = self._node, carrier.peer_id
        if carrier.route != straight or carrier.stranded is not None:
            self._take(carrier, straight)

    def opened(self, node: NodeId) -> None:
        """There is a connection to this node itself: whoever waited for that goes on."""
        carrier = self._carriers.get(node)
        if carrier is not None and carrier.stranded is not None:
            carrier.avoid -= {node}
            self.reroute(carrier, carrier.stranded)

    def unreachable(self, node: NodeId, cause: str) -> None:
        """No connection to this node itself came about."""
        carrier = self._carriers.get(node)
        if carrier is not None and carrier.stranded is not None:
            self._lose(carrier, f"{carrier.stranded}, and no connection of its own came about: {cause}")

    def removed(self, carrier: RelayedCarrier) -> None:
        """Its peer is no member any more."""
        self._run_soon(partial(carrier.fail, CarrierLost("peer", "it is no member any more")))

    def _take(self, carrier: RelayedCarrier, route: tuple[NodeId, ...]) -> None:
        """What may be lost on the old way goes again. One that was stranded has lost it there, whatever the new way."""
        if route != carrier.route or carrier.stranded is not None:
            carrier.route = route
            carrier.outgoing.send_again()
        carrier.stranded = None
        self._has_news(carrier)

    def _strand(self, carrier: RelayedCarrier, why: str) -> None:
        carrier.stranded = why
        if not self._around.connect(carrier.peer_id, why):
            self._lose(carrier, why)

    def _lose(self, carrier: RelayedCarrier, why: str) -> None:
        self._run_soon(partial(carrier.fail, CarrierLost("peer", f"no way is left over other nodes: {why}")))
