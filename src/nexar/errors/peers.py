"""Errors of one line to one peer."""

from nexar.errors.base import NexarError, during, facts, quote
from nexar.types import NodeId, Rank, describe_peer


@facts
class PeerError(NexarError, ConnectionError):
    """One peer is the reason. What is not known of it is None; then the node or the address names it."""

    rank: Rank | None = None
    node: NodeId | None = None
    address: str | None = None

    @property
    def peer(self) -> str:
        """The peer, named by all that is known of it."""
        return describe_peer(self.rank, self.node, self.address)

    def _message(self) -> str:
        return f"{self.peer} failed; see its own log"


@facts
class PeerLost(PeerError):
    """The peer is gone: its connection ended, its process died, or it fell silent."""

    cause: str
    """How it was noticed; with the traceback when the peer raised."""
    operation: str | None = None
    remedy: str = "go on without it, or start it again"

    def _message(self) -> str:
        return f"lost {self.peer}{during(self.operation)}: {quote(self.cause)}; {self.remedy}"

    def advising(self, remedy: str) -> "PeerLost":
        """The same loss, with what to do next here."""
        return PeerLost(
            rank=self.rank,
            node=self.node,
            address=self.address,
            cause=self.cause,
            operation=self.operation,
            remedy=remedy,
        )


@facts
class PeerMisbehaved(PeerError):
    """The peer broke the protocol; its connection was ended."""

    what: str

    def _message(self) -> str:
        return f"{self.peer} broke the protocol: {self.what}; check that it runs the same version of nexar"


@facts
class LinkClosed(NexarError, ConnectionError):
    """The link, or what it belongs to, was closed on this side."""

    rank: Rank | None = None
    node: NodeId | None = None
    address: str | None = None
    operation: str | None = None
    owner: str | None = None
    """What the links belonged to, if all of them were closed with it. Named so that a peer who is told understands."""

    def _message(self) -> str:
        link = f"the link to {describe_peer(self.rank, self.node, self.address)} was closed on this side"
        closed = link if self.owner is None else f"{self.owner} was closed"
        return f"{closed}{during(self.operation)}; use it before closing it"
