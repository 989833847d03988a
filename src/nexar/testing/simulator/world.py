"""Virtual time: one heap of what is due, and the record of what happened.

Law: nothing here reads a clock, and ties are broken by the order of scheduling. So a run is a function of its seed, and
the record of two runs of one seed has the same digest.

The network of a simulation: who hears whom, when, how often, and in which order.

Two ways join each pair of nodes, and each can be closed by itself. A word that is under way arrives although its way
was closed behind it: words that are older than what happened since are what the machines have to withstand. Loss,
doubling and delay are those of the moment at which a word is said.

One line for each event, for the record.

What the inhabitants of a simulation share: time, ways, laws, and the directory of who lives where.
"""

from __future__ import annotations

import heapq
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final, Protocol

from nexar.cluster.decisions.failure_detector import LONGEST
from nexar.cluster.decisions.membership_events import (
    ChangeRequested,
    MembershipInput,
    MembershipMessage,
    MessageReceived,
    PeerLossFound,
    PeerReachable,
    ProbeFinished,
)
from nexar.testing.simulator.laws import Laws
from nexar.types import NodeId
from nexar.wire.control import Chosen, Suspect

REMEMBERED: Final = 30
"""So many of the last lines are shown when a law is broken."""


class Timeline:
    """Time that passes from one scheduled moment to the next."""

    def __init__(self, remembered: int | None = REMEMBERED) -> None:
        """`remembered`: so many of the last lines are kept; None: all."""
        self.now = 0.0
        self.events = 0
        """How many were recorded."""
        self._due: list[tuple[float, int, Callable[[], None]]] = []  # heap
        self._scheduled = 0
        self._last: deque[str] = deque(maxlen=remembered)
        self._digest = 0

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do it when the time is `when`; a time that has passed means next."""
        self._scheduled += 1
        heapq.heappush(self._due, (when, self._scheduled, action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do it so many seconds from now."""
        self.at(self.now + seconds, action)

    def run_until(self, end: float) -> None:
        """Do all that is due before `end`, in order, each at its own time."""
        due = self._due
        while due and due[0][0] <= end:
            when, _, action = heapq.heappop(due)
            self.now = max(self.now, when)
            action()
        self.now = max(self.now, end)

    def record(self, line: str) -> None:
        """This has happened now."""
        stamped = f"{self.now:10.4f}  {line}"
        self.events += 1
        self._digest = zlib.crc32(stamped.encode(), self._digest)
        self._last.append(stamped)

    @property
    def digest(self) -> int:
        """Of everything that was recorded, in order."""
        return self._digest

    @property
    def last(self) -> tuple[str, ...]:
        """The last lines of the record."""
        return tuple(self._last)


_FASTEST: Final = 0.0002
_USUAL: Final = 0.01
_COPIES: Final = (0.1, 1.0, 5.0)


@dataclass(frozen=True, slots=True)
class NetworkConditions:
    """What becomes of a word that has a way."""

    loss: float = 0.0
    doubled: float = 0.0
    slowest: float = _USUAL
    """Seconds; most words are faster."""


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """Closes every way from one set of nodes to another. Two of them make a symmetric partition."""

    source: frozenset[NodeId]
    destination: frozenset[NodeId]


class SimulatedNetwork:
    """Ways between nodes. `random` decides about each word."""

    def __init__(self, timeline: Timeline, random: Random) -> None:
        self.fault_model = NetworkConditions()
        self.partitions: list[Partition] = []
        self.slow: dict[NodeId, float] = {}
        """Nodes whose words leave, and are read, so many seconds late."""
        self._cut: set[tuple[NodeId, NodeId]] = set()
        self._timeline = timeline
        self._random = random

    def cut(self, one: NodeId, other: NodeId) -> None:
        """From now on these two cannot reach each other, whatever else is open."""
        self._cut |= {(one, other), (other, one)}

    def mend(self, one: NodeId, other: NodeId) -> None:
        """The opposite of `cut`."""
        self._cut -= {(one, other), (other, one)}

    def hurry(self, node: NodeId) -> None:
        """A slow node is as fast as the others again."""
        self.slow.pop(node, None)

    def clear_up(self) -> None:
        """The weather is fine again."""
        self.fault_model = NetworkConditions()

    @property
    def cuts(self) -> frozenset[tuple[NodeId, NodeId]]:
        """Pairs that are cut, the lower node first."""
        return frozenset(pair for pair in self._cut if pair[0] < pair[1])

    def open(self, source: NodeId, destination: NodeId) -> bool:
        """Whether what `source` says now can arrive."""
        if self._cut and (source, destination) in self._cut:
            return False
        return not any(source in wall.source and destination in wall.destination for wall in self.partitions)

    def both_ways(self, one: NodeId, other: NodeId) -> bool:
        """Whether a question of one can be answered by the other."""
        return self.open(one, other) and self.open(other, one)

    def lag(self, *nodes: NodeId) -> float:
        """Seconds that slow nodes among these add."""
        return sum(self.slow.get(node, 0.0) for node in nodes) if self.slow else 0.0

    def send(self, source: NodeId, destination: NodeId, arrive: Callable[[], None]) -> None:
        """Let `arrive` happen later; or never, or twice."""
        if not self.open(source, destination):
            return
        fault_model, random = self.fault_model, self._random
        if fault_model.loss and random.random() < fault_model.loss:
            return
        self._deliver(source, destination, fault_model.slowest, arrive)
        if fault_model.doubled and random.random() < fault_model.doubled:
            # The copy may come very late: into another ballot, or another epoch.
            self._deliver(source, destination, random.choice(_COPIES), arrive)

    def _deliver(self, source: NodeId, destination: NodeId, slowest: float, arrive: Callable[[], None]) -> None:
        share = self._random.random()
        seconds = _FASTEST + slowest * share * share + self.lag(source, destination)
        self._timeline.after(seconds, arrive)


def describe_event(node: NodeId, event: MembershipInput) -> str:
    """What happens to a node."""
    match event:
        case MessageReceived(sender=sender, message=message):
            return f"{node} ← {sender}: {describe_message(message)}"
        case PeerLossFound(node=lost, willing=willing, cause=cause):
            return f"{node} loses {lost}{' (willing)' if willing else ''}: {cause}"
        case PeerReachable(node=found, severed=severed):
            return f"{node} finds {found}{' (severed)' if severed else ''}"
        case ProbeFinished(node=probed, cause=cause):
            return f"{node} has probed {probed}: {cause or 'it answers'}"
        case ChangeRequested():
            joined, left = [each.node for each in event.joined], [each.node for each in event.left]
            return f"{node} wants {joined} in, {left} out"
        case _:
            return f"{node}: {type(event).__name__}"


def describe_message(message: MembershipMessage) -> str:
    """A word, without its value."""
    if isinstance(message, Suspect):
        return f"Suspect {message.node} by {message.by} in epoch {message.epoch}"
    ballot = getattr(message, "ballot", None)
    number = f" {ballot.round}.{ballot.node}" if ballot is not None else ""
    return f"{type(message).__name__}{number} of epoch {message.instance[1]}"


INTERVAL: Final = 2.0
TIMEOUT: Final = 6.0
STUCK_TIMEOUT: Final = 60.0
PROBE_TIMEOUT: Final = 1.0
LONGEST_PROBE: Final = 3.0
RECOVERY_TIMEOUT: Final = 15.0
"""Seconds: of heartbeats, of probes, of agreement. Coarser than in the product, in the same order. The longest probe is
one of a process that exists and does not answer."""
_STEPS: Final = 10.0
"""Times the lateness of its timers that a node gives the others: as the product does."""


class NodeView(Protocol):
    """What one inhabitant can see of another, if the network lets it."""

    @property
    def alive(self) -> bool:
        """Its process exists."""

    @property
    def running(self) -> bool:
        """It exists, and is not stopped."""

    def hear(self, sender: NodeId, message: MembershipMessage) -> None:
        """A word arrives."""

    def felt(self, sender: NodeId, epoch: int) -> None:
        """A beat arrives."""

    def news_since(self, epoch: int) -> list[Chosen]:
        """What it tells who dials it, and is in an earlier epoch."""


@dataclass(slots=True)
class SimulationContext:
    """Everything that is not one inhabitant's own."""

    timeline: Timeline
    network: SimulatedNetwork
    laws: Laws
    random: Random
    most_events: int = 1_000_000
    """A run that has more does not come to rest."""
    nodes: dict[NodeId, NodeView] = field(default_factory=dict)

    def say(self, source: NodeId, destination: NodeId, message: MembershipMessage) -> None:
        """On its way, if there is one."""
        listener = self.nodes.get(destination)
        if listener is not None:
            self.network.send(source, destination, lambda: listener.hear(source, message))

    def beat(self, source: NodeId, destination: NodeId, epoch: int) -> None:
        """Arrives at once or not at all: a beat that is some milliseconds older tells nothing else."""
        listener = self.nodes.get(destination)
        if listener is None or not listener.running or not self.network.open(source, destination):
            return
        loss = self.network.fault_model.loss
        if not loss or self.random.random() >= loss:
            listener.felt(source, epoch)

    def reaches(self, source: NodeId, destination: NodeId) -> bool:
        """Whether a question would be answered."""
        asked = self.nodes.get(destination)
        return asked is not None and asked.running and self.network.both_ways(source, destination)

    def probe_takes(self, source: NodeId, destination: NodeId) -> tuple[float, str | None]:
        """How long a probe takes, and why it fails; None: it is answered."""
        quick = 0.001 + self.random.random() * 0.02 + self.network.lag(source, destination)
        delay = self.own_delay(source)
        asked = self.nodes.get(destination)
        if asked is None or not self.network.both_ways(source, destination):
            return PROBE_TIMEOUT + delay, "no answer"
        if not asked.alive:
            return quick, "its process has ended"
        if not asked.running or quick > LONGEST_PROBE + delay:
            return LONGEST_PROBE + delay, "no answer"
        return quick, None

    def own_delay(self, node: NodeId) -> float:
        """What a node measures as its own delay: that its timers run late."""
        return min(LONGEST, _STEPS * self.network.lag(node))
