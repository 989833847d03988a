"""The peers of one node, each with the one link to it: what those who dial and those who are dialed share. No I/O."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from nexar.cluster.circle import Circle
from nexar.cluster.decisions.pairing import Pairing
from nexar.cluster.introduction import Answering
from nexar.cluster.membership import Member
from nexar.cluster.recall import Recall
from nexar.errors import NexarError, UsageError
from nexar.links.link import Link
from nexar.links.relay.carrier import RelayedCarrier
from nexar.links.router import Router
from nexar.transport.base import Carrier
from nexar.types import NodeId
from nexar.wire.messages import Message

CLOSED: Final = "this node is closed"
MOST_MISSED: Final = 256
"""So many links that came to nothing may have passed unnoticed at the other end."""
_NUMBERS: Final = 1 << 32


def next_number(number: int) -> int:
    """Of the link that follows this one. They begin anew where the wire has no higher ones."""
    return (number + 1) % _NUMBERS


def links_since(number: int, other: int) -> int:
    """How many links after the `other` that of this number comes; beyond MOST_MISSED: it is an earlier one, or none."""
    return (number - other) % _NUMBERS if 0 <= number < _NUMBERS else _NUMBERS


@dataclass(slots=True)
class Pair:
    """This node and one peer."""

    link: Link
    state: Pairing[Answering]
    number: int = 1
    """How many links the two have had, with this one."""
    recall: Recall | None = None
    """Ends the dial that is under way. Written by who dials, under the lock."""
    relay: RelayedCarrier | None = None
    """What connects the two over other nodes, if anything ever did. Written once, under the lock."""
    relayed: bool = False
    """The link has it: written after that."""

    @property
    def is_open(self) -> bool:
        """Whether the link is, or was, connected, in whatever way."""
        return self.state.open or self.relayed


class Pairs:
    """By node. A pair is made when it is first asked for, and forgotten when the peer has no place any more.

    `changed` is the lock over all of it, and notified with each change. Methods are called under it, but for those that
    say otherwise.
    """

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
        self.changed: Final = threading.Condition()
        self.closed = False
        """Written once, under the lock."""
        self.circle: Circle | None = None
        """Whom this node may have links with; None: it does not know yet. Replaced under the lock, read by anybody."""
        self._pairs: dict[NodeId, Pair] = {}

    def known(self) -> Circle:
        """Whom this node may have links with. Also without the lock. UsageError before it knows."""
        if self.circle is None:
            raise UsageError("this node does not know its membership yet")
        return self.circle

    def check_open(self) -> None:
        """UsageError once this node is closed."""
        if self.closed:
            raise UsageError(f"{CLOSED}; make a new one with nexar.init()")

    def wait(self, true: Callable[[], bool], deadline: float) -> bool:
        """Until it is, or the deadline. UsageError when this node is closed meanwhile."""
        self.changed.wait_for(lambda: true() or self.closed, max(0.0, deadline - time.monotonic()))
        self.check_open()
        return true()

    def wake(self) -> None:
        """Let whoever waits look again. Also without the lock."""
        with self.changed:
            self.changed.notify_all()

    def get(self, node: NodeId) -> Pair | None:
        """If there is one. Also without the lock."""
        return self._pairs.get(node)

    def of(self, circle: Circle, member: Member) -> Pair:
        """With this member. UsageError once this node is closed."""
        self.check_open()
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

    def of_carrier(self, carrier: Carrier) -> Pair | None:
        """With who dialed. None: this node is closed and there never was one, or the peer has no place any more."""
        node, circle = carrier.peer.node, self.known()
        pair, member = self._pairs.get(node), circle.find(node)
        return pair if pair is not None or self.closed or member is None else self.of(circle, member)

    def replace(self, pair: Pair, number: int) -> Pair | None:
        """The two begin anew, with their link of this number; None: the peer has no place any more. UsageError once
        this node is closed.
        """
        self.check_open()
        node, circle = pair.link.peer, self.known()
        del self._pairs[node]
        member = circle.find(node)
        self.changed.notify_all()
        if member is None:
            return None
        fresh = self.of(circle, member)
        fresh.number = number
        return fresh

    def move(self, circle: Circle) -> list[Link]:
        """The members have changed. Returns the links of those who have no place any more: they are to be closed."""
        self.circle = circle
        ended = []
        for node, pair in list(self._pairs.items()):
            if circle.find(node) is None:
                del self._pairs[node]
                ended.append(pair.link)
                if pair.recall is not None:
                    pair.recall.make()
            else:
                pair.link.rerank(circle.rank_of(node))
        self.changed.notify_all()
        return ended

    def listed(self) -> list[Pair]:
        """All of them."""
        return list(self._pairs.values())


def address_of(member: Member) -> str | None:
    """The most promising one: for people."""
    return next((told[0] for told in member.addresses.values() if told), None)
