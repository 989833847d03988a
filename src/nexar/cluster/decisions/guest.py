"""One connection at the seed's door, as admission knows it."""

from __future__ import annotations

from dataclasses import dataclass

from nexar.types import NodeId
from nexar.wire.handshake import Hello


@dataclass(slots=True)
class Guest:
    """From its knock to its end. Admission alone writes to it."""

    connection: int
    address: str
    hello: Hello | None = None
    fingerprint: bytes = b""
    """Of its key; empty until it has proven that it knows the secret."""
    watches: bool = False
    """It has proven that too, and wants no more than to see the board: it needs no key."""

    @property
    def node(self) -> NodeId | None:
        """Who it says it is; None before its hello."""
        return self.hello.node if self.hello else None
