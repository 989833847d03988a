"""The neighbours of one node, as ways to others: what waits at each, and what is to be said to whom. No I/O.

Guarded by the station's lock.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from nexar.links.link import Link
from nexar.links.relay.hop import Hop, Waiting
from nexar.links.relay.surroundings import Surroundings
from nexar.transport.base import Buffer
from nexar.types import NodeId


class Thanks(NamedTuple):
    """Room that is given back."""

    link: Link
    hops: int
    amount: int


class Step(NamedTuple):
    """What to send over a link; and whom to thank for it."""

    link: Link
    parts: tuple[Buffer, ...]
    thanks: Thanks | None = None


class Ways:
    """By neighbour."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._around = surroundings
        self._hops: dict[NodeId, Hop] = {}
        self._busy: dict[Hop, None] = {}  # may take something that waits
        self._thanks: deque[Thanks] = deque()  # for what was not sent on

    @property
    def is_busy(self) -> bool:
        """Whether `next` may find something. Also without the lock."""
        return bool(self._busy or self._thanks)

    @property
    def hold_something(self) -> bool:
        """Whether anything waits to go on."""
        return any(hop.waits for hop in self._hops.values())

    def over(self, node: NodeId) -> Hop | None:
        """A neighbour to which there is a link, or is about to be one."""
        hop = self._hops.get(node)
        if hop is None:
            hop = Hop(node)
            if not self.is_usable(hop) and not self._around.open(node):
                return None
            self._hops[node] = hop
        elif hop.link is not None and hop.link.failure is not None:
            return None  # lost; whoever tells us so sees to the rest
        return hop

    def get(self, node: NodeId) -> Hop | None:
        """If anything has gone over it."""
        return self._hops.get(node)

    def of(self, link: Link) -> Hop | None:
        """The neighbour that this link leads to, if it is the one that is used. None: it never was, or is not now."""
        hop = self._hops.get(link.peer)
        return hop if hop is not None and hop.link is link else None

    def behind(self, link: Link) -> Hop:
        """The neighbour that something has come from. `of` it has been looked for before."""
        hop = self._hops.setdefault(link.peer, Hop(link.peer))
        hop.link = link
        return hop

    def is_usable(self, hop: Hop) -> bool:
        """Whether there is a link."""
        if hop.link is None:
            hop.link = self._around.link(hop.node)
        return hop.link is not None and hop.link.failure is None

    def put(self, hop: Hop, waiting: Waiting) -> None:
        """It goes when it can."""
        hop.put(waiting)
        self._busy[hop] = None

    def wake(self, hop: Hop) -> None:
        """It may take more."""
        self._busy[hop] = None

    def forget(self, node: NodeId) -> list[tuple[NodeId, ...]]:
        """It is gone, with what waits there. Returns the routes back to those whose frames went over it."""
        hop = self._hops.pop(node, None)
        if hop is None:
            return []
        self._busy.pop(hop, None)
        for waiting in hop.drain():
            thanks = _thanks_for(waiting)
            if thanks is not None:
                self._thanks.append(thanks)
        return hop.sources

    def lost(self) -> list[NodeId]:
        """Those to which there was a link, and is none now."""
        return [hop.node for hop in self._hops.values() if hop.link is not None and hop.link.failure is not None]

    def thank(self, hop: Hop, hops: int, size_bytes: int) -> None:
        """What came from there has gone from here, wherever to."""
        amount = hop.passed_on(hops, size_bytes)
        if amount and hop.link is not None:
            self._thanks.append(Thanks(hop.link, hops, amount))

    def next(self) -> Step | None:
        """What to send now."""
        if self._thanks:
            thanks = self._thanks.popleft()
            return Step(thanks.link, (), thanks)
        while self._busy:
            hop = next(iter(self._busy))
            found = hop.take() if self.is_usable(hop) else None
            if found is not None and hop.link is not None:
                return Step(hop.link, (found.body,), _thanks_for(found))
            del self._busy[hop]
        return None


def _thanks_for(waiting: Waiting) -> Thanks | None:
    """It goes from here: what is to be said to who sent it."""
    hop, hops = waiting.came_over, waiting.hops - 1
    amount = 0 if hop is None else hop.passed_on(hops, len(waiting.body))
    return Thanks(hop.link, hops, amount) if amount and hop is not None and hop.link is not None else None
