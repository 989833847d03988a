"""Connections that came in and are no links yet: few of each node, and few in all. No I/O.

Law: a node has at most `most_of_one` of them and everybody together `most`. When one more comes, the oldest goes: of
that node if it has too many, else of all. So a member that dials and never says a word keeps nobody else out, and an
honest one, whose dial may come to all our addresses at the same moment, always gets its turn.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from nexar.cluster.addresses import MAX_ADDRESSES
from nexar.transport.base import Carrier
from nexar.types import NodeId

MAX_ARRIVALS: Final = 1024
MAX_OF_ONE_NODE: Final = 2 * 2 * MAX_ADDRESSES
"""A dial goes to every address of ours, on two transports, and on a busy host most of these connections come about
before the first one has won; twice that, because a dial may begin anew before the end of the last has been noticed."""


class Arrivals:
    """Carriers by the node they come from, the oldest first. Not safe by itself: its owner has a lock."""

    def __init__(self, most: int = MAX_ARRIVALS, most_of_one: int = MAX_OF_ONE_NODE) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._everybody: OrderedDict[Carrier, None] = OrderedDict()
        self._of_node: dict[NodeId, OrderedDict[Carrier, None]] = {}

    def __len__(self) -> int:
        return len(self._everybody)

    def add(self, carrier: Carrier) -> Carrier | None:
        """One more; the one that has to go for it, if there was no room. It has been taken out."""
        displaced = self._one_too_many(carrier.peer.node)
        if displaced is not None:
            self.remove(displaced)
        self._everybody[carrier] = None
        self._of_node.setdefault(carrier.peer.node, OrderedDict())[carrier] = None
        return displaced

    def _one_too_many(self, node: NodeId) -> Carrier | None:
        mine = self._of_node.get(node)
        if mine is not None and len(mine) >= self._most_of_one:
            return next(iter(mine))
        return next(iter(self._everybody)) if len(self._everybody) >= self._most else None

    def remove(self, carrier: Carrier) -> bool:
        """It is a link now, or gone. False if it was not here."""
        if carrier not in self._everybody:
            return False
        del self._everybody[carrier]
        mine = self._of_node[carrier.peer.node]
        del mine[carrier]
        if not mine:
            del self._of_node[carrier.peer.node]
        return True

    def listed(self) -> list[Carrier]:
        """All of them, the oldest first."""
        return list(self._everybody)
