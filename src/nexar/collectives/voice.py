"""How one rank speaks to the others about a call: along the links that are open, never waiting for one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import Protocol

from nexar.cluster.membership import Member, Membership
from nexar.errors import NexarError
from nexar.links.matching import Matching
from nexar.links.notices import Notice, Speaker
from nexar.links.operation import Operation
from nexar.links.router import Router
from nexar.types import AwaitedPeer, NodeId, Rank


class Members(Protocol):
    """What a journal needs of its group."""

    @property
    def rank(self) -> Rank:
        """Mine."""

    @property
    def communicator(self) -> int:
        """Its id."""

    @property
    def membership(self) -> Membership:
        """Who takes part."""

    @property
    def matching(self) -> Matching:
        """Of its messages."""

    @property
    def router(self) -> Router:
        """Of its node."""

    def carried_bytes(self) -> float:
        """What its links have sent and received so far."""

    def speakers(self) -> Mapping[Rank, Speaker]:
        """Links to the other ranks, those that are open or need no connection."""

    def rank_of(self, node: NodeId) -> Rank:
        """Of a node that takes part."""

    def wait(self, operations: Sequence[Operation], deadline: float, alarm: Operation | None = None) -> None:
        """See Progress.wait."""


class Voice:
    """Of one communicator. Any thread, without the node's lock, but for `known`, which does not care."""

    def __init__(self, group: Members) -> None:
        self._group = group

    def links(self) -> dict[Rank, Speaker]:
        """Those that are open, to the other ranks."""
        return {rank: link for rank, link in self._group.speakers().items() if rank != self._group.rank}

    def say(self, link: Speaker, notice: Notice) -> None:
        """To one of them."""
        try:
            link.send_control(notice)
        except NexarError:
            return  # the link is lost: who waits for that peer hears of it from the link itself

    def spread(self, notice: Notice, but: Rank | None = None) -> None:
        """To all of them, each of whom passes it on; `but` has said it."""
        for rank, link in self.links().items():
            if rank != but:
                self.say(link, notice)

    def known(self, rank: Rank) -> AwaitedPeer:
        """What is known of a rank, with how long it has been silent."""
        node = self._group.membership.members[rank].node
        found = self._group.matching.peers.get(node) or AwaitedPeer(rank=rank, node=node)
        heard = self._group.matching.ledger.heard.get(node)
        return replace(found, last_heard=None if heard is None else monotonic() - heard)


def peers_of(membership: Membership) -> dict[NodeId, AwaitedPeer]:
    """What a membership says of each member, as somebody waited for."""
    return {
        member.node: AwaitedPeer(rank=rank, node=member.node, host=member.host, address=_address_of(member))
        for rank, member in enumerate(membership.members)
    }


def _address_of(member: Member) -> str | None:
    """The one it would rather be dialed at; where it really was, its link says."""
    return next((address for ways in member.addresses.values() for address in ways), None)
