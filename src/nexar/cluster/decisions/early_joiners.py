"""Who comes to an elastic cluster before it has formed, and finds every place promised. Pure.

It is let in and waits: for a place that becomes free again, or for the members, who take it at a checkpoint like any
other joiner. Law: members and all who wait are never more than the largest world that is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass

from nexar.cluster.decisions.door_rules import DoorRules
from nexar.cluster.decisions.formation import Formation
from nexar.cluster.decisions.guest import Guest
from nexar.cluster.decisions.ranks import Block
from nexar.cluster.decisions.refusals import NoRoom, Refusal
from nexar.cluster.membership import MAX_MEMBERS, Attendant, Member
from nexar.types import NodeId, Rank
from nexar.wire.joining import Reserve


@dataclass(slots=True)
class EarlyJoiner:
    """One of them."""

    guest: Guest
    member: Member
    ready: bool = False
    """It can be dialed."""


class EarlyJoiners:
    """In the order in which they came."""

    def __init__(self, size: int, rules: DoorRules) -> None:
        """Of a cluster that is formed of `size`."""
        self._size = size
        self._elastic = rules.elastic
        self._most = min(rules.most or MAX_MEMBERS, MAX_MEMBERS)
        self._waiting: dict[NodeId, EarlyJoiner] = {}

    def find(self, node: NodeId) -> Guest | None:
        """The connection of one of them."""
        found = self._waiting.get(node)
        return None if found is None else found.guest

    def admit(self, formation: Formation, guest: Guest, member: Member, rank: Rank | None) -> bool:
        """A candidate: whether it has a place; else it waits. Refusal if it may not, or something else is wrong."""
        try:
            formation.admit(member, rank)
        except NoRoom as none_left:
            self._check(none_left, 1)
            self._waiting[member.node] = EarlyJoiner(guest, member)
            return False
        return True

    def reserve(self, formation: Formation, launcher: Attendant, asked: Reserve) -> Block | None:
        """A block of ranks; None: its children will be joiners, without ranks. Refusal as above."""
        try:
            return formation.reserve(launcher, asked.count, asked.first_rank)
        except NoRoom as none_left:
            self._check(none_left, asked.count)
            return None

    def _check(self, none_left: NoRoom, count: int) -> None:
        """Whether so many more may wait."""
        if not self._elastic:
            raise none_left
        if self._size + len(self._waiting) + count > self._most:
            raise Refusal(
                f"the cluster is formed of {self._size}, {len(self._waiting)} wait to come in, and no more than "
                f"{self._most} are allowed; start it with a larger --max (NEXAR_ELASTIC_MAX_WORLD_SIZE)"
            )

    def make_ready(self, guest: Guest) -> bool:
        """It can be dialed from now on. False: it is none of them."""
        if guest.node is None or self.find(guest.node) is not guest:
            return False
        self._waiting[guest.node].ready = True
        return True

    def withdraw(self, guest: Guest) -> None:
        """Its connection has ended. Nothing happens if it is none of them."""
        if guest.node is not None and self.find(guest.node) is guest:
            del self._waiting[guest.node]

    def promote(self, formation: Formation) -> EarlyJoiner | None:
        """The first has a place now, if one is free; None: nobody waits, or for no place. It is refused no more: all
        but the want of room was found to be right when it came.
        """
        first = self.take() if formation.has_room else None
        if first is not None:
            formation.admit(first.member, None)
        return first

    def take(self) -> EarlyJoiner | None:
        """The first does not wait any more; None: nobody does."""
        return self._waiting.pop(next(iter(self._waiting))) if self._waiting else None

    def clear(self) -> tuple[int, ...]:
        """Nobody waits any more. Their connections."""
        connections = tuple(each.guest.connection for each in self._waiting.values())
        self._waiting.clear()
        return connections
