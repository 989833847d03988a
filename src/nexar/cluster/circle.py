"""Whom a node may have a link with: the members of its membership, and guests who are about to become members. Pure.

A member that waits to be let in knows the members, and is none itself: it holds no rank yet. Who was a member once and
is none any more is remembered, so that it can be told why nobody speaks to it.

Law: two nodes at the same epoch must agree on their ranks, or one of them is not who it says. At different epochs there
is nothing to compare: one of them has not heard yet, and every frame is fenced by its generation anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from nexar.cluster.change import Change
from nexar.cluster.membership import Member, Membership
from nexar.types import NodeId, Rank
from nexar.wire.messages import Introduce, Introduced

GUEST: Final[Rank] = -1
"""The rank of who holds none yet."""
_MOST_FORMER: Final = 4096


@dataclass(frozen=True, slots=True)
class Former:
    """Somebody who was a member."""

    epoch: int
    """Of the first membership without it."""
    reason: str


@dataclass(frozen=True, slots=True)
class Circle:
    """Immutable: a change makes another."""

    me: NodeId
    membership: Membership
    guests: Mapping[NodeId, Member] = field(default_factory=lambda: MappingProxyType({}))
    former: Mapping[NodeId, Former] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def rank(self) -> Rank:
        """Mine; GUEST if I hold none."""
        rank = self.membership.rank_of(self.me)
        return GUEST if rank is None else rank

    def find(self, node: NodeId) -> Member | None:
        """A member or a guest."""
        rank = self.membership.rank_of(node)
        return self.guests.get(node) if rank is None else self.membership.members[rank]

    def rank_of(self, node: NodeId) -> Rank:
        """GUEST for who holds none."""
        rank = self.membership.rank_of(node)
        return GUEST if rank is None else rank

    def shares_host(self, node: NodeId) -> bool:
        """Whether this node runs on our host."""
        mine, other = self.find(self.me), self.find(node)
        return mine is not None and other is not None and mine.host == other.host

    def introduction(self) -> Introduce:
        """Of me, to anybody."""
        return Introduce(rank=self.rank, epoch=self.membership.epoch)

    def fault_of(self, node: NodeId, claim: Introduce | Introduced) -> str | None:
        """What is wrong with what this node says of itself; None: nothing."""
        rank, epoch = self.rank_of(node), self.membership.epoch
        if self.find(node) is None:
            return f"it has no place in the membership of epoch {epoch}"
        if claim.epoch != epoch or claim.rank == rank:
            return None
        return f"it claims rank {claim.rank} at epoch {claim.epoch}, the membership gives it rank {rank}"

    # -- changes -----------------------------------------------------------------------------------------

    def moved_to(self, membership: Membership, change: Change | None = None) -> Circle:
        """The next membership; who is in it is no guest any more. `change`: says why those who left are gone."""
        guests = {node: guest for node, guest in self.guests.items() if membership.rank_of(node) is None}
        former = {**self.former}
        if change is not None:
            former |= {departure.node: Former(change.epoch, departure.cause) for departure in change.left}
        while len(former) > _MOST_FORMER:
            del former[next(iter(former))]
        return replace(self, membership=membership, guests=MappingProxyType(guests), former=MappingProxyType(former))

    def with_guests(self, guests: Iterable[Member]) -> Circle:
        """These, and no others, wait to be let in."""
        found = {guest.node: guest for guest in guests if self.membership.rank_of(guest.node) is None}
        return replace(self, guests=MappingProxyType(found))
