"""The peers of one node, each with the one link to it. No I/O, and not safe by itself: its owner has a lock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nexar.cluster.circle import Circle
from nexar.cluster.decisions.pairing import Pairing
from nexar.cluster.introduction import Answering
from nexar.cluster.membership import Member
from nexar.errors import NexarError
from nexar.links.link import Link
from nexar.links.router import Router
from nexar.types import NodeId
from nexar.wire.messages import Message


@dataclass(slots=True)
class Pair:
    """This node and one peer."""

    link: Link
    state: Pairing[Answering]
    number: int = 1
    """How many links the two have had, with this one."""


class Pairs:
    """By node. A pair is made when it is first asked for, and forgotten when the peer has no place any more."""

    def __init__(
        self,
        router: Router,
        on_control: Callable[[Link, Message], None],
        on_lost: Callable[[Link, NexarError], None] | None,
    ) -> None:
        """The callbacks are those of every link."""
        self._router = router
        self._on_control = on_control
        self._on_lost = on_lost
        self._pairs: dict[NodeId, Pair] = {}

    def get(self, node: NodeId) -> Pair | None:
        """If there is one. Also without the lock."""
        return self._pairs.get(node)

    def of(self, circle: Circle, member: Member) -> Pair:
        """With this member."""
        pair = self._pairs.get(member.node)
        if pair is None:
            link = Link(
                self._router,
                member.node,
                rank=circle.rank_of(member.node),
                address=address_of(member),
                on_control=self._on_control,
                on_lost=self._on_lost,
            )
            pair = self._pairs[member.node] = Pair(link, Pairing(lower=circle.me < member.node))
        return pair

    def replace(self, pair: Pair, circle: Circle, number: int) -> Pair | None:
        """The two begin anew, with their link of this number; None: the peer has no place any more."""
        node = pair.link.peer
        del self._pairs[node]
        member = circle.find(node)
        if member is None:
            return None
        fresh = self.of(circle, member)
        fresh.number = number
        return fresh

    def move(self, circle: Circle) -> list[Link]:
        """The members have changed. Returns the links of those who have no place any more: they are to be closed."""
        ended = []
        for node, pair in list(self._pairs.items()):
            if circle.find(node) is None:
                del self._pairs[node]
                ended.append(pair.link)
            else:
                pair.link.rerank(circle.rank_of(node))
        return ended

    def listed(self) -> list[Pair]:
        """All of them."""
        return list(self._pairs.values())


def address_of(member: Member) -> str | None:
    """The most promising one: for people."""
    return next((told[0] for told in member.addresses.values() if told), None)
