"""What the inhabitants of a simulation share: time, ways, laws, and the directory of who lives where."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Final, Protocol

from nexar.cluster.decisions.own_delay import LONGEST
from nexar.cluster.decisions.succession_events import Word
from nexar.testing.simulator.laws import Laws
from nexar.testing.simulator.network import Network
from nexar.testing.simulator.timeline import Timeline
from nexar.types import NodeId
from nexar.wire.messages import Chosen

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


class Neighbour(Protocol):
    """What one inhabitant can see of another, if the network lets it."""

    @property
    def alive(self) -> bool:
        """Its process exists."""

    @property
    def running(self) -> bool:
        """It exists, and is not stopped."""

    def hear(self, sender: NodeId, word: Word) -> None:
        """A word arrives."""

    def felt(self, sender: NodeId, epoch: int) -> None:
        """A beat arrives."""

    def news_since(self, epoch: int) -> list[Chosen]:
        """What it tells who dials it, and is in an earlier epoch."""


@dataclass(slots=True)
class World:
    """Everything that is not one inhabitant's own."""

    timeline: Timeline
    network: Network
    laws: Laws
    random: Random
    most_events: int = 1_000_000
    """A run that has more does not come to rest."""
    inhabitants: dict[NodeId, Neighbour] = field(default_factory=dict)

    def say(self, source: NodeId, destination: NodeId, word: Word) -> None:
        """On its way, if there is one."""
        listener = self.inhabitants.get(destination)
        if listener is not None:
            self.network.send(source, destination, lambda: listener.hear(source, word))

    def beat(self, source: NodeId, destination: NodeId, epoch: int) -> None:
        """Arrives at once or not at all: a beat that is some milliseconds older tells nothing else."""
        listener = self.inhabitants.get(destination)
        if listener is None or not listener.running or not self.network.open(source, destination):
            return
        loss = self.network.weather.loss
        if not loss or self.random.random() >= loss:
            listener.felt(source, epoch)

    def reaches(self, source: NodeId, destination: NodeId) -> bool:
        """Whether a question would be answered."""
        asked = self.inhabitants.get(destination)
        return asked is not None and asked.running and self.network.both_ways(source, destination)

    def probe_takes(self, source: NodeId, destination: NodeId) -> tuple[float, str | None]:
        """How long a probe takes, and why it fails; None: it is answered."""
        quick = 0.001 + self.random.random() * 0.02 + self.network.lag(source, destination)
        delay = self.own_delay(source)
        asked = self.inhabitants.get(destination)
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
