"""Which nodes are being tried, and what came of it. Pure.

Only what was found out after a question says anything about the answer. That a node was reached counts from when the
try began: it may have died since. That it was not counts until the try ended: it had all that time to answer.
"""

from __future__ import annotations

from collections.abc import Callable

from nexar.cluster.decisions.succession_events import Probe
from nexar.types import NodeId


class Probing:
    """The tries of one node. Wanted ones are collected until `drain`."""

    def __init__(self, timeout: float, own_delay: Callable[[], float] = lambda: 0.0) -> None:
        """`timeout`: how long a try takes at most, and `own_delay` longer if this node runs slowly. One without a
        result for twice that is made again.
        """
        self._timeout = timeout
        self._own_delay = own_delay
        self._begun: dict[NodeId, float] = {}  # under way
        self._reached: dict[NodeId, float] = {}  # by when the try began
        self._missed: dict[NodeId, float] = {}  # by when the try ended
        self._wanted: list[NodeId] = []

    def ask(self, node: NodeId, now: float) -> None:
        """Try it, unless that is under way."""
        begun = self._begun.get(node)
        if begun is None or now >= begun + 2 * (self._timeout + self._own_delay()):
            self._begun[node] = now
            self._wanted.append(node)

    def told(self, node: NodeId, now: float, *, reached: bool) -> None:
        """The result of a try. One that nobody asked for says only that it was missed."""
        begun = self._begun.pop(node, None)
        self._reached.pop(node, None)
        self._missed.pop(node, None)
        if not reached:
            self._missed[node] = now
        elif begun is not None:
            self._reached[node] = begun

    def found(self, node: NodeId) -> None:
        """It was reached by other means: that a try has missed it means nothing any more."""
        self._missed.pop(node, None)

    def reached_since(self, node: NodeId, moment: float) -> bool:
        """Whether a try that began at this moment or later has reached it."""
        return self._reached.get(node, float("-inf")) >= moment

    def missed_since(self, node: NodeId, moment: float) -> bool:
        """Whether a try that ended at this moment or later has not reached it."""
        return self._missed.get(node, float("-inf")) >= moment

    def forget(self) -> None:
        """Another epoch: results of the one before are of no use. What is under way will be told."""
        self._reached.clear()
        self._missed.clear()

    def drain(self) -> list[Probe]:
        """The tries to make now."""
        wanted, self._wanted = self._wanted, []
        return [Probe(node) for node in wanted]
