"""The wait for a peer to agree that a link is over."""

from __future__ import annotations

import threading

from nexar.links.operation import Operation
from nexar.types import AwaitedPeer


class Closing(Operation):
    """Done when the peer has taken everything and finished too, or is gone."""

    __slots__ = ("_peer",)

    def __init__(self, lock: threading.Lock, peer: AwaitedPeer) -> None:
        super().__init__(lock)
        self._peer = peer

    @property
    def name(self) -> str:
        """As errors call it."""
        return "closing the link"

    def awaited(self) -> AwaitedPeer:
        """The peer."""
        return self._peer

    def cancel(self) -> None:
        """Nothing is borrowed."""
