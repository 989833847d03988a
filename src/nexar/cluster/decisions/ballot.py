"""One attempt of a proposer to have a value chosen: who has answered what. Pure.

Two phases: until `value` is set, promises are collected; then votes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from nexar.types import NodeId
from nexar.wire.messages import Number

_NOTHING = Number(-1, 0)  # below every ballot


@dataclass(slots=True)
class Ballot:
    """Each answer costs the same, however many voters there are; `binding` and `unanswered` look at all."""

    number: Number
    again: float
    """When words without an answer are repeated."""
    interval: float
    value: bytes | None = None
    """What the voters are asked to accept, in the second phase."""
    inherited: bool = False
    """It was found in promises: the proposer had no choice."""
    settle: float | None = None
    """Until when promises are awaited that bind less than those at hand."""
    promises: dict[NodeId, tuple[Number, bytes]] = field(default_factory=dict)
    accepted: set[NodeId] = field(default_factory=set)
    rejected: dict[NodeId, tuple[NodeId, ...]] = field(default_factory=dict)
    """Who will not accept the value, with the nodes that it reaches."""
    _bound: int = 0  # promises with an accepted value

    def promised(self, voter: NodeId, accepted: Number | None, value: bytes) -> None:
        """A voter has promised, and tells what it accepted before. What a repetition says is the same."""
        if self.value is None and voter not in self.promises:
            self.promises[voter] = (_NOTHING if accepted is None else accepted, value)
            self._bound += accepted is not None

    def is_free(self, needed: int) -> bool:
        """Whether so many have promised that had accepted nothing."""
        return len(self.promises) - self._bound >= needed

    def binding(self, needed: int) -> bytes | None:
        """What must be proposed; None: anything may be, as a majority of the promises binds to nothing.

        Otherwise the highest ballot of all decides, so that proposers come to want the same.
        """
        return None if self.is_free(needed) else max(self.promises.values())[1]

    def ask(self, value: bytes, *, inherited: bool, again: float, interval: float) -> None:
        """The second phase begins."""
        self.value, self.inherited, self.settle = value, inherited, None
        self.again, self.interval = again, interval

    def agreed(self, voter: NodeId) -> None:
        """A voter has accepted the value."""
        if self.value is not None:
            self.accepted.add(voter)
            self.rejected.pop(voter, None)

    def refused(self, voter: NodeId, reachable: tuple[NodeId, ...]) -> None:
        """A voter does not accept the value. A word that was overtaken by its consent does not count."""
        if self.value is not None and voter not in self.accepted:
            self.rejected[voter] = reachable

    def reached(self) -> set[NodeId]:
        """The nodes that those who refused can reach."""
        return {node for reachable in self.rejected.values() for node in reachable}

    def unanswered(self, voters: Collection[NodeId]) -> list[NodeId]:
        """Who has not given what this phase asks for. Who refused may think better of it."""
        done: Collection[NodeId] = self.promises if self.value is None else self.accepted
        return [voter for voter in voters if voter not in done]
