"""Whom one node cannot reach, in one epoch. Pure; each change costs the same, however many there are.

An urgent suspicion is to be acted on. Who left willingly goes quietly: it has no vote any more, and nobody is disturbed
by that, until somebody needs it, which makes it urgent. A disputed one rests for a while: others reach that node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nexar.cluster.decisions.electorate import Electorate
from nexar.cluster.membership import Membership
from nexar.types import NodeId


@dataclass(slots=True)
class Suspicion:
    """One of them."""

    cause: str
    willing: bool
    since: float
    disputes: int = 0
    """How often so many reached it that its removal failed."""
    rests_until: float = 0.0
    """When its dispute is over, if the probe of it has a result by then."""


class Suspicions(Mapping[NodeId, Suspicion]):
    """By node: members, and the seed, which is never removed but whose vote may be missing."""

    def __init__(self, me: NodeId, membership: Membership) -> None:
        """None so far. `me` is a member."""
        self._membership = membership
        self._electorate = Electorate(membership)
        self._my_rank = membership.rank_of(me)
        self._all: dict[NodeId, Suspicion] = {}
        self._urgent: dict[NodeId, float] = {}  # members, by when it became urgent, the earliest first
        self._willing: dict[NodeId, float] = {}  # members that are not urgent, the earliest first
        self._disputed: dict[NodeId, float] = {}  # until when
        self.lower = 0
        """Suspected members of a lower rank than mine."""
        self.votes = 0
        """Voters among the suspected."""
        self.newest = float("-inf")
        """When the last one was added."""

    def __getitem__(self, node: NodeId) -> Suspicion:
        return self._all[node]

    def __iter__(self) -> Iterator[NodeId]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def urgent_since(self) -> float | None:
        """When the first became urgent that still is."""
        return next(iter(self._urgent.values()), None)

    @property
    def willing_since(self) -> float | None:
        """When the first left willingly of those that are not urgent."""
        return next(iter(self._willing.values()), None)

    @property
    def disputed_until(self) -> float | None:
        """When the next dispute is over."""
        return min(self._disputed.values(), default=None)

    @property
    def urgent(self) -> tuple[NodeId, ...]:
        """Members that are to be removed, and not disputed."""
        return tuple(self._urgent)

    @property
    def leave_majority(self) -> bool:
        """Whether enough voters are not suspected to decide anything."""
        return len(self._electorate) - self.votes >= self._electorate.needed

    def removable(self, *, lost: bool = True) -> list[NodeId]:
        """Members to remove when something is proposed, in order of rank; `lost`: not only who left willingly."""
        nodes = [*(self._urgent if lost else ()), *self._willing]
        return sorted(nodes, key=lambda node: self._membership.rank_of(node) or 0)

    def is_quiet(self, node: NodeId) -> bool:
        """Whether it left willingly, and nobody here needs it."""
        return node in self._willing

    def add(self, node: NodeId, cause: str, now: float, *, willing: bool = False) -> bool:
        """Whether that is news. What a node says itself about why it leaves is the better cause."""
        known = self._all.get(node)
        if known is None:
            self._all[node] = Suspicion(cause, willing, now)
            self._count(node, 1)
            self.newest = now
        elif willing and not known.willing:
            known.cause, known.willing = cause, True
        return self._sort_in(node, now, urgent=not willing)

    def drop(self, node: NodeId) -> bool:
        """It can be reached after all. Whether it was suspected."""
        if self._all.pop(node, None) is None:
            return False
        self._count(node, -1)
        for sort in (self._urgent, self._willing, self._disputed):
            sort.pop(node, None)
        return True

    def dispute(self, node: NodeId, until: float, *, latest: float | None = None) -> int:
        """Others reach it. How often that has happened. The dispute lasts until it was `looked` for, at least to
        `until` and at most to `latest`.
        """
        self._urgent.pop(node, None)
        self._disputed[node] = until if latest is None else latest
        self._all[node].rests_until = until
        self._all[node].disputes += 1
        return self._all[node].disputes

    def looked(self, node: NodeId) -> None:
        """A probe has not reached it: its dispute need not last longer for that."""
        if node in self._disputed:
            self._disputed[node] = min(self._disputed[node], self._all[node].rests_until)

    def wake(self, now: float) -> bool:
        """Disputes that are over become urgent again. Whether there were some."""
        over = [node for node, until in self._disputed.items() if until <= now] if self._disputed else []
        for node in over:
            del self._disputed[node]
            self._urgent[node] = now
        return bool(over)

    def hurry(self, now: float) -> None:
        """Who left willingly is to be removed now, too."""
        for node in list(self._willing):
            self._sort_in(node, now, urgent=True)

    def carried(self, me: NodeId, membership: Membership, now: float) -> Suspicions:
        """Those that still mean something in the next membership: as new there."""
        seed = membership.seed.node if membership.seed else None
        kept = Suspicions(me, membership)
        for node, each in self._all.items():
            if node == seed or membership.rank_of(node) is not None:
                kept.add(node, each.cause, now, willing=each.willing and node in self._willing)
                kept._all[node].willing = each.willing
        return kept

    def _sort_in(self, node: NodeId, now: float, *, urgent: bool) -> bool:
        """Whether it is in another place than before."""
        is_member = self._membership.rank_of(node) is not None
        if not is_member or node in self._urgent or node in self._disputed:
            return False
        if urgent:
            self._willing.pop(node, None)
            self._urgent[node] = now
            return True
        is_new = node not in self._willing
        self._willing.setdefault(node, now)
        return is_new

    def _count(self, node: NodeId, one: int) -> None:
        rank = self._membership.rank_of(node)
        if rank is not None and self._my_rank is not None and rank < self._my_rank:
            self.lower += one
        if node in self._electorate:
            self.votes += one
