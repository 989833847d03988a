"""The network of a simulation: who hears whom, when, how often, and in which order.

Two ways join each pair of nodes, and each can be closed by itself. A word that is under way arrives although its way
was closed behind it: words that are older than what happened since are what the machines have to withstand. Loss,
doubling and delay are those of the moment at which a word is said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

from nexar.testing.simulator.timeline import Timeline
from nexar.types import NodeId

_FASTEST: Final = 0.0002
_USUAL: Final = 0.01
_COPIES: Final = (0.1, 1.0, 5.0)


@dataclass(frozen=True, slots=True)
class Weather:
    """What becomes of a word that has a way."""

    loss: float = 0.0
    doubled: float = 0.0
    slowest: float = _USUAL
    """Seconds; most words are faster."""


@dataclass(frozen=True, slots=True, eq=False)
class Wall:
    """Closes every way from one set of nodes to another. Two of them make a symmetric partition."""

    source: frozenset[NodeId]
    destination: frozenset[NodeId]


class Network:
    """Ways between nodes. `random` decides about each word."""

    def __init__(self, timeline: Timeline, random: Random) -> None:
        self.weather = Weather()
        self.walls: list[Wall] = []
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
        self.weather = Weather()

    @property
    def cuts(self) -> frozenset[tuple[NodeId, NodeId]]:
        """Pairs that are cut, the lower node first."""
        return frozenset(pair for pair in self._cut if pair[0] < pair[1])

    def open(self, source: NodeId, destination: NodeId) -> bool:
        """Whether what `source` says now can arrive."""
        if self._cut and (source, destination) in self._cut:
            return False
        return not any(source in wall.source and destination in wall.destination for wall in self.walls)

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
        weather, random = self.weather, self._random
        if weather.loss and random.random() < weather.loss:
            return
        self._deliver(source, destination, weather.slowest, arrive)
        if weather.doubled and random.random() < weather.doubled:
            # The copy may come very late: into another ballot, or another epoch.
            self._deliver(source, destination, random.choice(_COPIES), arrive)

    def _deliver(self, source: NodeId, destination: NodeId, slowest: float, arrive: Callable[[], None]) -> None:
        share = self._random.random()
        seconds = _FASTEST + slowest * share * share + self.lag(source, destination)
        self._timeline.after(seconds, arrive)
