"""Which rank of the world a node had, for what tells of the ranks of other communicators. Pure.

People know ranks of the world: logs, launchers and pages have those. A rank of a communicator that came of a split is
another number for the same node, so whatever is shown names nodes by their rank in the world.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

from nexar.types import Rank

NodeT = TypeVar("NodeT", bound=Hashable)


class Seen(NamedTuple, Generic[NodeT]):
    """One node in one generation of the world."""

    generation: int
    node: NodeT
    rank: Rank


def world_ranks(seen: Iterable[Seen[NodeT]], generation: int) -> dict[NodeT, Rank]:
    """By node: its rank in the world at this generation of any communicator, as near as is known. A generation is the
    epoch in which it was made, so what counts is the world's last one up to it; else the first one after it.
    """

    def nearness(each: Seen[NodeT]) -> tuple[bool, int]:
        before = each.generation <= generation
        return before, each.generation if before else -each.generation

    return {each.node: each.rank for each in sorted(seen, key=nearness)}
