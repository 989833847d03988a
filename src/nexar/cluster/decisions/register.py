"""Who is in a cluster that has formed, who would like to come in, and who may not come back. Pure.

Law: the members that are present, and all who wait, are never more than the largest world that is allowed, and find
room in one message. A member is present until its line breaks, and again when it is back: who died makes room at once,
though the others still have to agree that it is gone.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple, TypeVar

from nexar.cluster.change import Change
from nexar.cluster.decisions.refusals import Refusal
from nexar.cluster.membership import MAX_MEMBERS, MAX_MEMBERSHIP_BYTES, Member, Membership, share_bytes
from nexar.types import NodeId, Rank, format_node

_What = TypeVar("_What")
_MOST_REMEMBERED: Final = 4096
"""Nodes that left, and nodes that were let in: the newest."""


class Former(NamedTuple):
    """Why somebody is a member no more."""

    reason: str
    expelled: int
    """Since which epoch; 0: it left by its own will."""


class Register:
    """Of one cluster, from its formation on. Nobody's connection is known here."""

    def __init__(self, membership: Membership, *, elastic: bool = False, most: int = 0) -> None:
        """`elastic`: others may come in, while there are not more than `most` of all; 0: any number."""
        self.membership = membership
        self.elastic: Final = elastic
        self._most = min(most or MAX_MEMBERS, MAX_MEMBERS)
        self._bytes = len(membership.encode())
        self._absent: set[NodeId] = set()
        self._joiners: dict[NodeId, Member] = {}  # in the order in which they came
        self._ready: set[NodeId] = set()
        self._admitted: OrderedDict[NodeId, None] = OrderedDict()
        self._former: OrderedDict[NodeId, Former] = OrderedDict()
        self._children = _children(membership)

    # -- members -----------------------------------------------------------------------------------------

    @property
    def present(self) -> int:
        """Members whose line has not been seen to break."""
        return self.membership.size - len(self._absent)

    def check_member(self, node: NodeId, fingerprint: bytes) -> Rank | None:
        """The rank of a member that shows its key; None for who is no member. Refusal for another key."""
        rank = self.membership.rank_of(node)
        if rank is not None and self.membership.member(rank).fingerprint != fingerprint:
            raise Refusal(f"node {format_node(node)} is known with another key")
        return rank

    def why_former(self, node: NodeId, epoch: int) -> Former | None:
        """Why a node that was a member in this epoch (0: it does not say) is one no more; None: it never was."""
        if node in self._former:
            return self._former[node]
        now = self.membership.epoch
        gone = Former(f"expelled: it is no member of epoch {now} any more", now)
        return gone if 0 < epoch <= now else None

    def set_present(self, node: NodeId, *, present: bool) -> None:
        """The line of a member has come back, or broken."""
        if present:
            self._absent.discard(node)
        elif self.membership.rank_of(node) is not None:
            self._absent.add(node)

    def child(self, launcher: NodeId, rank: Rank) -> NodeId | None:
        """Whom this launcher started for this rank of the first membership; None: that is not known, or not so."""
        return self._children.get((launcher, rank))

    @property
    def knows_children(self) -> bool:
        """Whether this register goes back to the first membership, whose ranks launchers speak of."""
        return bool(self._children)

    # -- joiners -----------------------------------------------------------------------------------------

    @property
    def admitted(self) -> frozenset[NodeId]:
        """Who was let in after the cluster had formed: of them, and of nobody else, members may take new ones."""
        return frozenset(self._admitted)

    @property
    def waiting(self) -> tuple[Member, ...]:
        """Who would like to come in, and can be dialed, in the order in which they came."""
        return tuple(member for node, member in self._joiners.items() if node in self._ready)

    @property
    def late(self) -> str:
        """What those are told who come after the formation of a cluster that is not elastic."""
        return f"the cluster has formed with {self.membership.size} members and is not elastic"

    def check_room(self, count: int) -> None:
        """Refusal if so many more may not come in."""
        if not self.elastic:
            raise Refusal(self.late)
        if self.present + len(self._joiners) + count > self._most:
            raise Refusal(
                f"the cluster has {self.present} members and {len(self._joiners)} that wait to come in, and no more "
                f"than {self._most} are allowed; start it with a larger --max (NEXAR_ELASTIC_MAX_WORLD_SIZE)"
            )

    def admit(self, member: Member) -> None:
        """Somebody who would like to come in. Refusal if there is no room."""
        self.withdraw(member.node)
        self.check_room(1)
        if self._bytes + sum(map(share_bytes, self._joiners.values())) + share_bytes(member) > MAX_MEMBERSHIP_BYTES:
            raise Refusal("the members and those who wait fill a message; advertise fewer addresses (NEXAR_ADVERTISE)")
        self._joiners[member.node] = member
        _remember(self._admitted, member.node, None)

    def make_ready(self, node: NodeId) -> None:
        """It can be dialed from now on."""
        self._ready.add(node)

    def withdraw(self, node: NodeId) -> bool:
        """It does not wait any more. True: members had been told that it does."""
        self._joiners.pop(node, None)
        told = node in self._ready
        self._ready.discard(node)
        return told

    # -- changes -----------------------------------------------------------------------------------------

    def follow(self, change: Change) -> None:
        """The members went on by this change of the membership. MembershipError if it is none."""
        self.membership = change.apply(self.membership)
        self._bytes = len(self.membership.encode())
        for departure in change.left:
            self._absent.discard(departure.node)
            verb, expelled = ("left", 0) if departure.willing else ("expelled", change.epoch)
            why = f"{verb} in epoch {change.epoch}: {departure.cause}"
            _remember(self._former, departure.node, Former(why, expelled))
        for member in change.joined:
            if member.node not in self._joiners:
                self._absent.add(member.node)  # its line broke, or the seed had never heard of it
            self.withdraw(member.node)
            self._former.pop(member.node, None)


def _remember(memory: OrderedDict[NodeId, _What], node: NodeId, what: _What) -> None:
    memory[node] = what
    memory.move_to_end(node)
    if len(memory) > _MOST_REMEMBERED:
        memory.popitem(last=False)


def _children(membership: Membership) -> dict[tuple[NodeId, Rank], NodeId]:
    """Known only from the first membership: later ranks are others."""
    if membership.epoch > 1:
        return {}
    members = enumerate(membership.members)
    return {(member.launcher, rank): member.node for rank, member in members if member.launcher}
