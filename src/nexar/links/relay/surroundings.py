"""What a station needs of the mesh around it."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from nexar.links.link import Link
from nexar.links.relay.carrier import RelayedCarrier
from nexar.types import NodeId
from nexar.wire.relay import RelayHeader


class Unwelcome(Enum):
    """What becomes of a frame that is not taken, and whose source is told nothing."""

    NOT_YET = "not yet"  # it may be taken when the members change, or the connection to its source is lost
    NEVER = "never"


class Surroundings(Protocol):
    """What a station asks of its mesh. Called under the station's lock, but for `welcome` and `look_into`; none may
    block.
    """

    def epoch(self) -> int:
        """Of the membership."""

    def route(self, destination: NodeId, avoid: frozenset[NodeId]) -> tuple[NodeId, ...] | None:
        """From this node, both ends included. If the destination itself is avoided: not straight to it."""

    def hop_limit(self) -> int:
        """No route that makes sense is longer."""

    def link(self, node: NodeId) -> Link | None:
        """The link to a neighbour, if it can be spoken on without others."""

    def open(self, node: NodeId) -> bool:
        """Begin to open it: `opened` or `unreachable` follows. False: this is no neighbour."""

    def connect(self, node: NodeId, why: str) -> bool:
        """There is no way over others, and why: begin to connect to this peer itself, neighbour or not. `opened` or
        `unreachable` follows. False: it is no member any more, or this node closes.
        """

    def welcome(self, header: RelayHeader) -> RelayedCarrier | str | Unwelcome:
        """The first frame of a link has come: what takes it; or why not, for the source; or nothing is said.
        Driving thread.
        """

    def look_into(self, header: RelayHeader) -> bool:
        """What was not to be taken yet is held: begin to find out whether it can be. `lost` or `unreachable` follows
        if so, or the next membership. True: it can be by now, for that has come already. Driving thread.
        """

    def ring_by(self, due: float) -> None:
        """Call `tick` then."""
