"""The time between the commit of the first membership and its start. Pure.

Law: the cluster starts when every member that confirms has said that it is connected, and fails when one of them is
lost, says that it cannot connect, or does not answer in time. Both happen once, and the seed tells every member. So
`init()` returns the whole world on every rank, or raises on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from nexar.cluster.membership import Membership
from nexar.errors.base import headed, list_ranks
from nexar.types import NodeId, Rank, format_seconds

START_TIMEOUT: Final = 10.0
"""Seconds that members have at least to connect, however late the last of them joined."""


class Starting:
    """Which members of the first membership are not connected yet."""

    def __init__(self, membership: Membership, confirming: Iterable[NodeId], now: float, deadline: float) -> None:
        """`confirming`: members that say when they are connected. The others count as connected."""
        self._membership = membership
        self._awaited: dict[NodeId, None] = dict.fromkeys(confirming)
        self._began = now
        self.deadline: Final = max(deadline, now + START_TIMEOUT)
        self.failure = ""
        """Why the cluster will not start; empty: it may."""

    @property
    def complete(self) -> bool:
        """Every member is connected."""
        return not self._awaited and not self.failure

    def connected(self, node: NodeId) -> None:
        """This member has its links. Idempotent."""
        self._awaited.pop(node, None)

    def fail(self, reason: str) -> None:
        """The cluster will not start. The first reason stays."""
        self.failure = self.failure or reason

    def lose(self, rank: Rank | None, reason: str) -> None:
        """This member is gone, whether it was connected or not."""
        self.fail(headed(f"rank {rank} was lost before the cluster had started", reason))

    def expire(self, now: float) -> None:
        """Fail if the time is up."""
        if now >= self.deadline and self._awaited:
            ranks = sorted(rank for node in self._awaited if (rank := self._membership.rank_of(node)) is not None)
            span = format_seconds(now - self._began)
            self.fail(f"{list_ranks(ranks)} did not connect to the other ranks within {span}")
