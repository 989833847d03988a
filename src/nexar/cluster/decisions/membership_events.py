"""What the succession machine of a node is told, and what it wants done. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from nexar.cluster.membership import Change, Departure, Member
from nexar.types import NodeId
from nexar.wire.control import Accept, Accepted, Chosen, Prepare, Promise, Rejected, Suspect

MembershipMessage: TypeAlias = Suspect | Prepare | Promise | Accept | Accepted | Rejected | Chosen
"""What nodes say to one another about it."""


# -- events


@dataclass(frozen=True, slots=True)
class PeerLossFound:
    """This node cannot reach a member: its process ended, it left, it is silent, or its link is gone and cannot be
    dialed again. `willing`: it said that it leaves.
    """

    node: NodeId
    cause: str
    willing: bool = False


@dataclass(frozen=True, slots=True)
class PeerReachable:
    """It can be reached after all. `severed`: on a new connection, so frames of the old one may be lost."""

    node: NodeId
    severed: bool = False


@dataclass(frozen=True, slots=True)
class ProbeFinished:
    """The answer to a Probe. `cause`: why it cannot be reached; None: it can."""

    node: NodeId
    cause: str | None


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A word of another node: a member, the seed, or a joiner."""

    sender: NodeId
    message: MembershipMessage


@dataclass(frozen=True, slots=True)
class ChangeRequested:
    """All members have agreed, by a collective, that this should happen: each tells its own machine."""

    joined: tuple[Member, ...] = ()
    left: tuple[Departure, ...] = ()
    renewed: tuple[int, ...] = ()
    epoch: int = 0
    """Of the membership in which they agreed, 0: the present one. It is forgotten in any other; who joins or leaves,
    only once the world's communicator of that membership is over."""


@dataclass(frozen=True, slots=True)
class ResignRequested:
    """This node wants to be removed, now."""

    cause: str


@dataclass(frozen=True, slots=True)
class RecoverNow:
    """Under the manual policy: what is known to be lost is to be removed now."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class OwnDelayChanged:
    """This node runs slowly: from now on its deadlines extend by so many seconds. 0: it does not."""

    seconds: float


MembershipInput: TypeAlias = (
    PeerLossFound
    | PeerReachable
    | ProbeFinished
    | MessageReceived
    | ChangeRequested
    | ResignRequested
    | RecoverNow
    | OwnDelayChanged
    | Tick
)


# -- actions


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a word to a node: a member, or the seed. It may be lost."""

    node: NodeId
    message: MembershipMessage


@dataclass(frozen=True, slots=True)
class StartProbe:
    """Try at once whether this member can be reached, and tell by Probed."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class MembershipDecided:
    """The next membership was chosen, and this node is in it."""

    change: Change


@dataclass(frozen=True, slots=True)
class SelfExpelled:
    """The next membership was chosen, and this node is not in it."""

    epoch: int
    reason: str
    willing: bool = False
    """It asked for it, or was asked to at a checkpoint."""


@dataclass(frozen=True, slots=True)
class NoProgress:
    """No next membership came about in time, or none can: told once for each epoch, and again after it changed."""

    alive: tuple[NodeId, ...]
    """Voters that are reached, this node included."""
    needed: int
    """Voters for a majority."""
    missing_votes: tuple[NodeId, ...] = ()
    """If a majority is reached, but does not finish: who has not voted. Empty: there is no majority."""
    left: tuple[NodeId, ...] = ()
    """Voters that are not reached because they said that they leave."""


MembershipAction: TypeAlias = SendMessage | StartProbe | MembershipDecided | SelfExpelled | NoProgress
