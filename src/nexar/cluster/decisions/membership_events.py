"""Events and actions of the membership machine of one node. Pure."""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

import msgspec

from nexar.cluster.membership import Change, Departure, Member
from nexar.types import NodeId
from nexar.wire.control import MAX_CAUSE_CHARACTERS, Accept, Accepted, Chosen, Prepare, Promise, Rejected, Suspect

# messages between nodes about the next membership
MembershipMessage: TypeAlias = Suspect | Prepare | Promise | Accept | Accepted | Rejected | Chosen


# -- losses


class LossKind(Enum):
    """How a loss was noticed. The value is the precedence: of two losses of one node the higher one is kept."""

    SEED_CONNECTION_BROKEN = 1  # the seed's hint; the node itself may be well
    LINK_BROKEN = 2  # a connection of this node to it ended or failed; a hint too
    NO_ANSWER = 3  # it was silent to probes or heartbeats, or cannot be dialed
    ENDED = 4  # its system refuses connections: no process listens
    LAUNCHER_REPORT = 5  # its launcher knows how the process ended
    LEFT = 6  # it announced that it leaves
    RAISED = 7  # it announced that an exception ends it


class Loss(msgspec.Struct, frozen=True):
    """Why a node is gone. `text` and `traceback` are for people: decisions use the kind."""

    kind: LossKind
    text: str
    traceback: str = ""  # of the exception that ended the node, if it sent one

    @property
    def is_conclusive(self) -> bool:
        """Neither a probe nor a dial can reach it again. A launcher's report is verified, so it is not."""
        return self.kind in (LossKind.ENDED, LossKind.RAISED)

    @property
    def cause(self) -> str:
        """At most MAX_CAUSE_CHARACTERS; the end of a traceback, whose last lines say most."""
        if not self.traceback:
            return self.text[:MAX_CAUSE_CHARACTERS]
        head = f"{self.text}:\n"
        return head + self.traceback[-(MAX_CAUSE_CHARACTERS - len(head)) :]

    def outranks(self, other: Loss) -> bool:
        """Whether this loss is kept, if both are reported of one node."""
        return self.kind.value > other.kind.value

    def after(self, hint: Loss) -> Loss:
        """This loss with the hint that led to it."""
        return self if hint.text == self.text else msgspec.structs.replace(self, text=f"{hint.text}; {self.text}")


# -- events


class PeerLossFound(msgspec.Struct, frozen=True):
    """This node cannot reach a member. `willing`: it left, and no call needs it."""

    node: NodeId
    loss: Loss
    willing: bool = False


class PeerReachable(msgspec.Struct, frozen=True):
    """`severed`: over a new connection, so frames on the old one may be lost."""

    node: NodeId
    severed: bool = False


class ProbeFinished(msgspec.Struct, frozen=True):
    """`loss`: why the node cannot be reached; None if it can."""

    node: NodeId
    loss: Loss | None


class MessageReceived(msgspec.Struct, frozen=True):
    """A message from a member, the seed or a joiner."""

    sender: NodeId
    message: MembershipMessage


class ChangeRequested(msgspec.Struct, frozen=True):
    """Propose this change. All members agreed on joins and leaves in a collective. A renewal is the request of one
    member, whose communicators need it.
    """

    joined: tuple[Member, ...] = ()
    left: tuple[Departure, ...] = ()
    renewed: tuple[int, ...] = ()
    # Epoch of the membership for which this is requested; 0: the current one. A renewal for another one is dropped;
    # joins and leaves are dropped if a later change ended the world's communicator in which they were agreed.
    epoch: int = 0


class ResignRequested(msgspec.Struct, frozen=True):
    """This node asks to be removed."""

    cause: str


class RecoverNow(msgspec.Struct, frozen=True):
    """Manual policy: remove the known losses."""


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


class OwnDelayChanged(msgspec.Struct, frozen=True):
    """All deadlines of this node extend by `seconds`."""

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


class SendMessage(msgspec.Struct, frozen=True):
    """Send a message, which may be lost, to a member or the seed."""

    node: NodeId
    message: MembershipMessage


class StartProbe(msgspec.Struct, frozen=True):
    """Probe this member."""

    node: NodeId


class MembershipDecided(msgspec.Struct, frozen=True):
    """The next membership contains this node."""

    change: Change


class SelfExpelled(msgspec.Struct, frozen=True):
    """The next membership does not contain this node."""

    epoch: int
    reason: str
    willing: bool = False  # it asked to leave, or was asked to at a checkpoint


class NoProgress(msgspec.Struct, frozen=True):
    """No next membership came about in time, or none can."""

    alive: tuple[NodeId, ...]  # reachable voters, this node included
    needed: int  # voters for a majority
    # If a majority is reachable but does not finish: the voters that have not voted. Empty: there is no majority.
    missing_votes: tuple[NodeId, ...] = ()
    left: tuple[NodeId, ...] = ()  # voters that are unreachable because they announced that they leave


MembershipAction: TypeAlias = SendMessage | StartProbe | MembershipDecided | SelfExpelled | NoProgress
