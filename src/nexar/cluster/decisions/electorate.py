"""Who votes on what comes after a membership. Pure.

The members do; the seed, too, when their number is even, so that no split of them leaves two halves of equal right.
A majority of these voters decides. No set is built: a world of thousands asks its membership.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from nexar.cluster.membership import Membership
from nexar.types import NodeId


def majority(voters: Collection[NodeId]) -> int:
    """The fewest of them that are more than half."""
    return len(voters) // 2 + 1


class Electorate(Collection[NodeId]):
    """The voters of one membership, as a collection of nodes: the members in order of rank, then the witness."""

    __slots__ = ("_members", "witness")

    def __init__(self, membership: Membership) -> None:
        """Of the epoch of this membership, for the change to the next."""
        self._members = membership
        seed = membership.seed
        self.witness: NodeId | None = None if seed is None or membership.size % 2 else seed.node
        """The seed, if it votes."""

    def __contains__(self, node: object) -> bool:
        return isinstance(node, int) and (self._members.rank_of(node) is not None or node == self.witness)

    def __iter__(self) -> Iterator[NodeId]:
        for member in self._members.members:
            yield member.node
        if self.witness is not None:
            yield self.witness

    def __len__(self) -> int:
        return self._members.size + (self.witness is not None)

    @property
    def needed(self) -> int:
        """Votes for a decision."""
        return majority(self)
