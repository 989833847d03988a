"""Who is told that a node cannot be reached, and by whom. Pure.

A few hear of it first: the lowest ranks, which propose first. As long as nothing comes of it more and more do, for
those few may be gone as well, and nobody knows it yet. The suspect hears of it through those who reach it.
"""

from __future__ import annotations

from typing import Final

from nexar.cluster.decisions.succession_events import Say
from nexar.cluster.decisions.suspicions import Suspicions
from nexar.cluster.membership import Membership
from nexar.types import NodeId
from nexar.wire.messages import MAX_CAUSE_CHARACTERS, Suspect

_FIRST: Final = 4  # members that hear of it first; doubles each time
_AGAIN: Final = 1.0  # seconds until the next time; doubles, too
_LONGEST: Final = 8.0


class Complaints:
    """Of one node, in one epoch."""

    def __init__(self, me: NodeId, membership: Membership, suspicions: Suspicions) -> None:
        """Those that were carried here from the epoch before are still to be told."""
        self._me = me
        self._membership = membership
        self._suspicions = suspicions
        self._untold: list[NodeId] = list(suspicions.urgent)
        self._audience = _FIRST
        self._pause = _AGAIN
        self.again: float | None = None
        """When what was told is told again."""
        self._forwarded: set[tuple[NodeId, NodeId]] = set()

    def add(self, node: NodeId) -> None:
        """A suspicion is new."""
        self._untold.append(node)

    def tell(self, now: float, *, insist: bool) -> list[Say]:
        """What is to be told now. `insist`: and again later, while it is urgent."""
        nodes, self._untold = self._untold, []
        if self.again is not None and now >= self.again:
            self._audience, self._pause = 2 * self._audience, min(2 * self._pause, _LONGEST)
            self.again, nodes = None, list(self._suspicions.urgent)
        if not insist or self._suspicions.urgent_since is None:
            self.again = None
        elif self.again is None:
            self.again = now + self._pause
        listeners = self._lowest() if nodes else []
        words = [self._word(node) for node in nodes if node in self._suspicions]
        return [Say(listener, word) for word in words for listener in listeners]

    def forward(self, word: Suspect) -> list[Say]:
        """The suspect is to know who complains. Once: it may be told by many."""
        if (word.node, word.by) in self._forwarded:
            return []
        self._forwarded.add((word.node, word.by))
        return [Say(word.node, word)]

    def _word(self, node: NodeId) -> Suspect:
        cause = self._suspicions[node].cause[-MAX_CAUSE_CHARACTERS:]
        return Suspect(self._membership.epoch, node, self._me, cause)

    def _lowest(self) -> list[NodeId]:
        """The lowest ranks that are reached, without mine."""
        found: list[NodeId] = []
        for member in self._membership.members:
            if len(found) == self._audience:
                break
            if member.node != self._me and member.node not in self._suspicions:
                found.append(member.node)
        return found
