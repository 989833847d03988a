"""Links to nodes that have closed, and are members no longer: what they sent may still be on its way.

Who closes waits until its peers have what it sent. The others go on without it meanwhile, as soon as most of them have
seen it go. Whoever it reaches slowly must not lose what was promised to arrive: its link ends by itself, or when who
closed would not wait any longer either.

The peers of one node, each with the one link to it: what those who dial and those who are dialed share. No I/O.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from nexar.cluster.control_threads import CancelToken
from nexar.cluster.decisions.peering import Pairing, PeerDirectory
from nexar.cluster.handshake import AnsweringHandshake
from nexar.cluster.membership import Member
from nexar.errors import NexarError, UsageError
from nexar.links.link import Link
from nexar.links.relay.carrier import RelayedCarrier
from nexar.links.router import Router
from nexar.transport.base import Carrier
from nexar.types import NodeId
from nexar.wire.control import Message

LONGEST_CLOSE: Final = 30.0
"""Seconds that a node waits for its peers while it closes."""


class QuietLeavers:
    """Of one mesh. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: dict[Link, float] = {}  # under the lock

    def keep(self, link: Link, now: float) -> bool:
        """Let it end by itself. False: it has already."""
        with self._lock:
            self._until[link] = now + LONGEST_CLOSE
        if link.failure is None:
            return True
        self.forget(link)  # whoever tells of its end may have been here before it was kept
        return False

    def forget(self, link: Link) -> bool:
        """It has ended. Whether it was kept."""
        with self._lock:
            return self._until.pop(link, None) is not None

    def has(self, node: NodeId) -> bool:
        """Whether something may still come from there."""
        with self._lock:
            return any(link.peer == node for link in self._until)

    def due(self) -> float | None:
        """When the next one has had its time; None: there is none."""
        with self._lock:
            return min(self._until.values(), default=None)

    def overdue(self, now: float) -> list[Link]:
        """Those that have had their time."""
        with self._lock:
            return [link for link, until in self._until.items() if until <= now]

    def links(self) -> list[Link]:
        """All that are kept."""
        with self._lock:
            return list(self._until)


CLOSED: Final = "this node is closed"
MAX_MISSED_LINKS: Final = 256
"""So many links that came to nothing may have passed unnoticed at the other end."""
_NUMBERS: Final = 1 << 32


def next_number(number: int) -> int:
    """Of the link that follows this one. They begin anew where the wire has no higher ones."""
    return (number + 1) % _NUMBERS


def links_since(number: int, other: int) -> int:
    """How many links after the `other` that of this number comes; beyond MOST_MISSED: it is an earlier one, or none."""
    return (number - other) % _NUMBERS if 0 <= number < _NUMBERS else _NUMBERS


@dataclass(slots=True)
class PeerEntry:
    """This node and one peer."""

    link: Link
    state: Pairing[AnsweringHandshake]
    number: int = 1
    """How many links the two have had, with this one."""
    cancel_token: CancelToken | None = None
    """Ends the dial that is under way. Written by who dials, under the lock."""
    relay: RelayedCarrier | None = None
    """What connects the two over other nodes, if anything ever did. Written once, under the lock."""
    relayed: bool = False
    """The link has it: written after that."""

    @property
    def is_open(self) -> bool:
        """Whether the link is, or was, connected, in whatever way."""
        return self.state.open or self.relayed


class PeerTable:
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
        self.directory: PeerDirectory | None = None
        """Whom this node may have links with; None: it does not know yet. Replaced under the lock, read by anybody."""
        self._peers: dict[NodeId, PeerEntry] = {}

    def known(self) -> PeerDirectory:
        """Whom this node may have links with. Also without the lock. UsageError before it knows."""
        if self.directory is None:
            raise UsageError("this node does not know its membership yet")
        return self.directory

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

    def get(self, node: NodeId) -> PeerEntry | None:
        """If there is one. Also without the lock."""
        return self._peers.get(node)

    def of(self, directory: PeerDirectory, member: Member) -> PeerEntry:
        """With this member. UsageError once this node is closed."""
        self.check_open()
        pair = self._peers.get(member.node)
        if pair is None:
            link = Link(
                self._router,
                member.node,
                rank=directory.rank_of(member.node),
                address=address_of(member),
                on_control=self._on_control,
                on_lost=self._on_lost,
            )
            pair = self._peers[member.node] = PeerEntry(link, Pairing(lower=directory.me < member.node))
        return pair

    def of_carrier(self, carrier: Carrier) -> PeerEntry | None:
        """With who dialed. None: this node is closed and there never was one, or the peer has no place any more."""
        node, directory = carrier.peer.node, self.known()
        pair, member = self._peers.get(node), directory.find(node)
        return pair if pair is not None or self.closed or member is None else self.of(directory, member)

    def replace(self, pair: PeerEntry, number: int) -> PeerEntry | None:
        """The two begin anew, with their link of this number; None: the peer has no place any more. UsageError once
        this node is closed.
        """
        self.check_open()
        node, directory = pair.link.peer, self.known()
        del self._peers[node]
        member = directory.find(node)
        self.changed.notify_all()
        if member is None:
            return None
        fresh = self.of(directory, member)
        fresh.number = number
        return fresh

    def move(self, directory: PeerDirectory) -> list[Link]:
        """The members have changed. Returns the links of those who have no place any more: they are to be closed."""
        self.directory = directory
        ended = []
        for node, pair in list(self._peers.items()):
            if directory.find(node) is None:
                del self._peers[node]
                ended.append(pair.link)
                if pair.cancel_token is not None:
                    pair.cancel_token.make()
            else:
                pair.link.rerank(directory.rank_of(node))
        self.changed.notify_all()
        return ended

    def listed(self) -> list[PeerEntry]:
        """All of them."""
        return list(self._peers.values())


def address_of(member: Member) -> str | None:
    """The most promising one: for people."""
    return next((told[0] for told in member.addresses.values() if told), None)
