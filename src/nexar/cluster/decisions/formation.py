"""A membership in the making: who has been let in so far, and what was promised to them. Pure.

Admission decides whether somebody may come in at all; here it is decided whether there is a place, and, when everybody
is there, which one it is.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from nexar.cluster.decisions.ranks import Block, Places
from nexar.cluster.decisions.refusals import Refusal
from nexar.cluster.membership import Attendant, Member, Membership, allowed_share_bytes, share_bytes
from nexar.types import NodeId, Rank, format_node

_FIRST_EPOCH: Final = 1


class Formation:
    """Candidates and launchers of a cluster that is not yet complete. Each node comes in once."""

    def __init__(self, cluster: str, size: int, seed: Attendant | None) -> None:
        self._cluster = cluster
        self._seed = seed
        self._places = Places(size)
        self._allowed_bytes = allowed_share_bytes(size)
        self._candidates: dict[NodeId, Member] = {}  # in the order of arrival, like the launchers
        self._launchers: dict[NodeId, Attendant] = {}
        self._ready: set[NodeId] = set()  # candidates that show their certificate

    @property
    def is_complete(self) -> bool:
        """Everybody is there, and can be dialed."""
        return self._places.is_full and len(self._ready) == len(self._candidates)

    def admit(self, member: Member, rank: Rank | None) -> None:
        """A candidate, with the rank it brought. Refusal if there is no place for it, or not that one."""
        self._check_name(member.node)
        self._check_share(member)
        self._places.claim(member.node, rank, member.launcher)
        self._candidates[member.node] = member

    def make_ready(self, node: NodeId) -> None:
        """A candidate that was admitted can be dialed from now on."""
        self._ready.add(node)

    def flaw_of(self, node: NodeId) -> str:
        """What keeps a candidate that was let in from being a member, in brackets; empty: nothing does."""
        return "" if node in self._ready else " (let in, but not ready)"

    def reserve(self, launcher: Attendant, count: int, first_rank: Rank | None) -> Block:
        """A block of ranks for the children of this launcher. Refusal if it fits nowhere, or not there."""
        self._check_name(launcher.node)
        block = self._places.reserve(launcher.node, count, first_rank)
        self._launchers[launcher.node] = launcher
        return block

    @property
    def has_room(self) -> bool:
        """Whether a candidate without a wish finds a place."""
        return self._places.left > 0

    def withdraw(self, node: NodeId) -> None:
        """A candidate or launcher is gone, and what it had claimed is free. A launcher may have claimed nothing."""
        if self._launchers.pop(node, None) is not None:
            self._places.release(node)
        elif node in self._candidates:
            del self._candidates[node]
            self._ready.discard(node)
            self._places.give_up(node)

    def make_membership(self) -> Membership:
        """The first one, once everybody is there."""
        order = self._places.assign((node, member.host) for node, member in self._candidates.items())
        members = tuple(self._candidates[node] for node in order)
        return Membership(self._cluster, _FIRST_EPOCH, members, tuple(self._launchers.values()), self._seed)

    def missing(self, most: int) -> tuple[Rank, ...]:
        """The lowest ranks that no candidate holds; none of them where a candidate waits for any rank."""
        if any(self._places.rank_of(node) is None for node in self._candidates):
            return ()
        free = (rank for rank in range(self._places.size) if self._places.holder(rank) is None)
        return tuple(islice(free, most))

    def is_first(self, node: NodeId) -> bool:
        """Whether this candidate was the first of its host, of those that are here."""
        member = self._candidates.get(node)
        others = (each for each in self._candidates.values() if member is not None and each.host == member.host)
        first = next(others, None)
        return first is not None and first.node == node

    def rank_of(self, node: NodeId) -> Rank | None:
        """The rank this candidate will have, if that is settled."""
        return self._places.rank_of(node)

    def holder(self, rank: Rank) -> NodeId | None:
        """The candidate that will have this rank, if that is settled."""
        return self._places.holder(rank)

    def has_block(self, launcher: NodeId) -> bool:
        """Whether ranks are reserved for the children of this launcher."""
        return self._places.block_of(launcher) is not None

    def ranks_of(self, launcher: NodeId) -> range:
        """The ranks that are reserved for the children of this launcher."""
        block = self._places.block_of(launcher)
        return range(0) if block is None else block.ranks

    def is_child(self, launcher: NodeId, rank: Rank) -> bool:
        """Whether the launcher has reserved this rank."""
        return rank in self.ranks_of(launcher)

    def _check_name(self, node: NodeId) -> None:
        if self._seed is not None and node == self._seed.node:
            raise Refusal(f"node {format_node(node)} is the seed")

    def _check_share(self, member: Member) -> None:
        """Whoever is let in must not make the membership too large to be sent to everybody else."""
        share = share_bytes(member)
        if share > self._allowed_bytes:
            raise Refusal(
                f"it describes itself in {share} bytes and {self._allowed_bytes} are allowed in a world of this size; "
                "advertise fewer addresses (NEXAR_ADVERTISE, NEXAR_IFACE)"
            )
