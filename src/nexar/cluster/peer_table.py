"""The peers of one node with their links, and links to members that have closed. No I/O."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from nexar.cluster.control_loop import CancelToken
from nexar.cluster.decisions.peering import Pairing, PeerDirectory
from nexar.cluster.handshake import AnsweringHandshake
from nexar.cluster.membership import Member
from nexar.errors import NexarError, UsageError
from nexar.links.link import Link
from nexar.links.progress import NODE_CLOSED
from nexar.links.relay.carrier import RelayedCarrier
from nexar.links.router import Router
from nexar.transport.base import Carrier
from nexar.types import NodeId
from nexar.wire.control import Message

LONGEST_CLOSE: Final = 30.0  # seconds that a closing node waits for its peers


class QuietLeavers:
    """Links to closed former members. Any thread.

    A closing node waits until its peers have its data, but the members may continue earlier. So its links stay as long
    as it would wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: dict[Link, float] = {}  # guarded by the lock

    def keep(self, link: Link, now: float) -> bool:
        """False if it has ended."""
        with self._lock:
            self._until[link] = now + LONGEST_CLOSE
        if link.failure is None:
            return True
        self.forget(link)  # its end may have been reported before it was kept
        return False

    def forget(self, link: Link) -> bool:
        with self._lock:
            return self._until.pop(link, None) is not None

    def has(self, node: NodeId) -> bool:
        """Whether data may still arrive."""
        with self._lock:
            return any(link.peer == node for link in self._until)

    def due(self) -> float | None:
        with self._lock:
            return min(self._until.values(), default=None)

    def overdue(self, now: float) -> list[Link]:
        with self._lock:
            return [link for link, until in self._until.items() if until <= now]

    def links(self) -> list[Link]:
        with self._lock:
            return list(self._until)


CLOSED: Final = "this node is closed"
LINK_LOST: Final = "the link between us was lost"
RECONNECTED: Final = "it reconnected; frames on the old connection may be lost"
MAX_MISSED_LINKS: Final = 256
"""Failed links that the other side may have missed."""
_NUMBERS: Final = 1 << 32


def next_number(number: int) -> int:
    """Wraps around."""
    return (number + 1) % _NUMBERS


def links_since(number: int, other: int) -> int:
    """How many links after `other` this is; above MAX_MISSED_LINKS it is earlier or invalid."""
    return (number - other) % _NUMBERS if 0 <= number < _NUMBERS else _NUMBERS


@dataclass(slots=True)
class PeerEntry:
    """This node and one peer."""

    link: Link
    state: Pairing[AnsweringHandshake]
    number: int = 1  # of this link of the pair
    cancel_token: CancelToken | None = None  # of the running dial; guarded by the lock
    relay: RelayedCarrier | None = None  # the relayed carrier, if ever; written once under the lock
    relayed: bool = False  # the link has adopted `relay`

    @property
    def is_open(self) -> bool:
        """Whether the link is or was connected."""
        return self.state.open or self.relayed


class PeerTable:
    """Peer entries, made on first use and removed with the member. `changed` guards the table and is notified of
    changes. Callers hold it unless a method says otherwise.
    """

    def __init__(
        self,
        router: Router,
        on_control: Callable[[Link, Message], None],
        on_lost: Callable[[Link, NexarError], None] | None,
    ) -> None:
        self._router = router
        self._on_control = on_control
        self._on_lost = on_lost
        self.changed: Final = threading.Condition()
        self.closed = False  # written once, under the lock
        self.directory: PeerDirectory | None = None
        """Nodes that may have links; None before the membership is known. Replaced under the lock, read without."""
        self._peers: dict[NodeId, PeerEntry] = {}

    def known(self) -> PeerDirectory:
        """Needs no lock. Raises UsageError before it is known."""
        if self.directory is None:
            raise UsageError("this node does not know its membership yet")
        return self.directory

    def check_open(self) -> None:
        """Raises UsageError."""
        if self.closed:
            raise UsageError(NODE_CLOSED)

    def wait(self, true: Callable[[], bool], deadline: float) -> bool:
        """Raises UsageError if the node closes."""
        self.changed.wait_for(lambda: true() or self.closed, max(0.0, deadline - time.monotonic()))
        self.check_open()
        return true()

    def wake(self) -> None:
        """Needs no lock."""
        with self.changed:
            self.changed.notify_all()

    def get(self, node: NodeId) -> PeerEntry | None:
        """Needs no lock."""
        return self._peers.get(node)

    def of(self, directory: PeerDirectory, member: Member) -> PeerEntry:
        """Makes the entry if needed. Raises UsageError if the node is closed."""
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
        """None if the dialer is no member, or the node is closed."""
        node, directory = carrier.peer.node, self.known()
        pair, member = self._peers.get(node), directory.find(node)
        return pair if pair is not None or self.closed or member is None else self.of(directory, member)

    def replace(self, pair: PeerEntry, number: int) -> PeerEntry | None:
        """Start a link with this number; None if the peer is no member. Raises UsageError if the node is closed."""
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
        """Returns the links of removed members, to be closed."""
        self.directory = directory
        ended = []
        for node, pair in list(self._peers.items()):
            if directory.find(node) is None:
                del self._peers[node]
                ended.append(pair.link)
                if pair.cancel_token is not None:
                    pair.cancel_token.cancel()
            else:
                pair.link.set_rank(directory.rank_of(node))
        self.changed.notify_all()
        return ended

    def listed(self) -> list[PeerEntry]:
        return list(self._peers.values())


def address_of(member: Member) -> str | None:
    """The best address, for messages."""
    return next((advertised[0] for advertised in member.addresses.values() if advertised), None)
