"""The data links between members: each delivers every frame once and in order, or breaks.

A link delivers what a blocked path held up, as TCP and QUIC do. It breaks if the path stays blocked for `IDLE_TIMEOUT`,
if an end gives up the other one, or if a fault breaks it; then frames under way are lost. Both ends are told as soon as
the path allows. A new link between the same nodes replaces a broken one; the node that dials it reports it as severed.
Frames of a process that left or was killed still arrive, and then the end of its link. A host that dies sends no end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from random import Random
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from nexar.cluster.decisions.successor_events import GenerationKey
from nexar.types import NodeId

if TYPE_CHECKING:
    from nexar.testing.simulator.world import SimulatedNetwork, Timeline

IDLE_TIMEOUT: Final = 6.0
"""Seconds after which a link whose path is blocked breaks."""
_RETRY_INTERVAL: Final = 0.4
_RETRANSMISSION: Final = 0.2  # seconds that a lost packet costs
_NO_KEY: Final = GenerationKey(-1, 0)


class LinkFrame(NamedTuple):
    """One message on a data link, fenced by `key`."""

    kind: str  # "call", "build", "question", "closed", or "end" of the link
    key: GenerationKey
    number: int = 0  # of the call; for "end": whether the node left
    step: int = 0
    content: object = None


class LinkEnd(Protocol):
    """One end of the links of a member."""

    node: NodeId
    alive: bool
    broken: set[NodeId]
    """Peers whose link this node knows to be broken."""

    def frame_received(self, sender: NodeId, frame: LinkFrame) -> None: ...

    def link_ended(self, peer: NodeId, cause: str, *, left: bool = False) -> None:
        """The link to this peer broke, or ended because the peer left."""


class _Direction:
    """Frames from one node to another."""

    __slots__ = ("blocked_since", "last_arrival", "number", "waiting")

    def __init__(self) -> None:
        self.number = 0  # of the link; frames of an older one are lost
        self.last_arrival = 0.0
        self.waiting: deque[LinkFrame] = deque()  # held up by a blocked path
        self.blocked_since = 0.0


class DataLinks:
    """All links of a simulation."""

    def __init__(self, timeline: Timeline, network: SimulatedNetwork, random: Random) -> None:
        self.ends: dict[NodeId, LinkEnd] = {}
        self._silent: set[NodeId] = set()  # nodes whose host died
        self._timeline = timeline
        self._network = network
        self._random = random
        self._directions: dict[tuple[NodeId, NodeId], _Direction] = {}

    def send(self, source: NodeId, destination: NodeId, frame: LinkFrame) -> bool:
        """False: the link is broken as far as `source` knows."""
        if destination in self.ends[source].broken:
            return False
        direction = self._direction(source, destination)
        if not direction.waiting and self._is_open(source, destination):
            self._transmit(source, destination, direction, frame)
            return True
        direction.waiting.append(frame)
        if len(direction.waiting) == 1:
            direction.blocked_since = self._timeline.now
            self._retry(source, destination, direction, direction.number)
        return True

    def _direction(self, source: NodeId, destination: NodeId) -> _Direction:
        found = self._directions.get((source, destination))
        if found is None:
            found = self._directions[source, destination] = _Direction()
        return found

    def _is_open(self, source: NodeId, destination: NodeId) -> bool:
        return (
            destination not in self._silent
            and source not in self.ends[destination].broken
            and self._network.both_ways(source, destination)
        )

    def _transmit(self, source: NodeId, destination: NodeId, direction: _Direction, frame: LinkFrame) -> None:
        number, end = direction.number, self.ends[destination]
        arrival = max(self._timeline.now + self._latency(source, destination), direction.last_arrival)
        direction.last_arrival = arrival

        def arrive() -> None:
            if not end.alive:
                self._end(source, destination, "its process has ended")
            elif direction.number == number and source not in end.broken:
                if frame.kind == "end":
                    self._end(destination, source, str(frame.content), left=bool(frame.number))
                else:
                    end.frame_received(source, frame)

        self._timeline.at(arrival, arrive)

    def _latency(self, source: NodeId, destination: NodeId) -> float:
        conditions, random = self._network.fault_model, self._random
        seconds = 0.0002 + conditions.slowest * random.random() ** 2 + self._network.lag(source, destination)
        while conditions.loss and random.random() < conditions.loss:
            seconds += _RETRANSMISSION
        return seconds

    def _retry(self, source: NodeId, destination: NodeId, direction: _Direction, number: int) -> None:
        """Sends what waits once the path is open; breaks the link if that takes too long."""
        if direction.number != number or not direction.waiting:
            return
        if self._is_open(source, destination):
            while direction.waiting:
                self._transmit(source, destination, direction, direction.waiting.popleft())
        elif self._timeline.now - direction.blocked_since >= IDLE_TIMEOUT:
            self.lose(source, destination, "nothing arrives on the link")
        else:
            self._timeline.after(_RETRY_INTERVAL, lambda: self._retry(source, destination, direction, number))

    # -- ends of links

    def lose(self, node: NodeId, peer: NodeId, cause: str) -> None:
        """`node` gives up its link to `peer`, which learns it once the path is open."""
        if peer in self.ends[node].broken:
            return
        self._drop(node, peer)
        self._end(node, peer, cause)
        self._timeline.after(0.001 + 0.02 * self._random.random(), lambda: self._tell(peer, node, cause))

    def _tell(self, node: NodeId, peer: NodeId, cause: str) -> None:
        if peer in self.ends[node].broken or not (self.ends[node].alive and self._is_broken_at(peer, node)):
            return
        if self._network.both_ways(node, peer):
            self._end(node, peer, cause)
        else:
            self._timeline.after(_RETRY_INTERVAL, lambda: self._tell(node, peer, cause))

    def _is_broken_at(self, node: NodeId, peer: NodeId) -> bool:
        return not self.ends[node].alive or peer in self.ends[node].broken

    def _end(self, node: NodeId, peer: NodeId, cause: str, *, left: bool = False) -> None:
        end = self.ends[node]
        if peer not in end.broken:
            end.broken.add(peer)
            if end.alive:
                end.link_ended(peer, cause, left=left)

    def _drop(self, one: NodeId, other: NodeId) -> None:
        for pair in ((one, other), (other, one)):
            direction = self._direction(*pair)
            direction.number += 1
            direction.waiting.clear()

    def replace(self, node: NodeId, peer: NodeId) -> bool:
        """`node` dialed `peer` again. Returns whether its link was broken."""
        one, other = self.ends[node], self.ends[peer]
        severed = peer in one.broken
        if severed:
            self._drop(node, peer)
            self._end(peer, node, "its link was replaced")
            one.broken.discard(peer)
            other.broken.discard(node)
        return severed

    def host_died(self, node: NodeId) -> None:
        self._silent.add(node)

    def process_ended(self, node: NodeId, cause: str, *, left: bool = False, peers: Iterable[NodeId] = ()) -> None:
        """Ends its links after the frames that it sent: those in use, and those to `peers`. `left`: it says so."""
        used = {pair[1] for pair in self._directions if pair[0] == node}
        used |= {pair[0] for pair in self._directions if pair[1] == node}
        for peer in sorted(used.union(peers) - {node}):
            self.send(node, peer, LinkFrame("end", _NO_KEY, int(left), content=cause))
