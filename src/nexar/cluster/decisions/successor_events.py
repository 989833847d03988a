"""Events, actions and outcomes of SuccessorMachine. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple, TypeAlias

import msgspec

from nexar.cluster.decisions.membership_events import MembershipDecided, NoProgress, Tick
from nexar.cluster.membership import Change, Membership
from nexar.types import NodeId, Rank


class GenerationKey(NamedTuple):
    """One generation of a communicator."""

    communicator: int
    epoch: int  # of the membership change that made it


BuildId: TypeAlias = int
"""One attempt of this node to build a generation. Never reused. The machine numbers builds of successors from 2**32;
BeginRequested brings lower numbers."""


# -- outcomes: why calls on a generation end


class Superseded(msgspec.Struct, frozen=True):
    """Another generation replaces it. Final, but an even newer successor replaces this one."""

    successor: GenerationKey
    lost: Mapping[Rank, str]  # ranks of the old generation that the successor lacks, and why
    joined: tuple[Rank, ...]  # ranks of the successor that the old generation lacks
    completed: int | None  # the last call that all continuing members completed on the old generation
    agreed: bool  # every departure was willing


class QuorumLost(msgspec.Struct, frozen=True):
    """No majority is reachable. A later outcome replaces it."""

    alive: tuple[Rank, ...]
    needed: int
    left: tuple[Rank, ...]


class RecoveryTimedOut(msgspec.Struct, frozen=True):
    """No successor came about in time. A later outcome replaces it."""

    missing: tuple[Rank, ...]


class RevokedBy(msgspec.Struct, frozen=True):
    """A member revoked it, or (`closed`) closed it so that no successor with that member can exist. A successor, a
    termination, or another closer replaces it.
    """

    rank: Rank
    reason: str
    closed: bool = False


class TerminationKind(Enum):
    """What ended all communicators of this node."""

    EXPELLED = auto()
    ABORTED = auto()  # a member was lost under the policy `abort`
    NOT_STARTED = auto()  # the first membership could not start
    CLOSED = auto()  # by its user


class Terminated(msgspec.Struct, frozen=True):
    """This node ended all its communicators. Final."""

    kind: TerminationKind
    epoch: int = 0  # EXPELLED: of the membership without this node
    node: NodeId = 0  # ABORTED: the lost member
    reason: str = ""


Outcome: TypeAlias = Superseded | QuorumLost | RecoveryTimedOut | RevokedBy | Terminated


# -- failed builds


class BuildFailureKind(Enum):
    """Why a build did not finish."""

    OVERTAKEN = auto()  # a newer change concerns the communicator, or a member closed it
    PEER_LOST = auto()
    TIMED_OUT = auto()
    REJECTED = auto()  # the node is terminated
    FAULT = auto()  # anything else; must not be repeated for ever


class BuildFailure(msgspec.Struct, frozen=True):
    """`nodes`: the members that were missed; PEER_LOST names exactly one."""

    kind: BuildFailureKind
    nodes: tuple[NodeId, ...] = ()
    cause: str = ""


# -- events


class BeginRequested(msgspec.Struct, frozen=True):
    """The user makes a communicator (init, split, group): build its first generation here."""

    build: BuildId
    communicator: int
    membership: Membership
    parent: GenerationKey | None = None
    """The generation on which split or group was called."""


class BuildFinished(msgspec.Struct, frozen=True):
    """`completed`: the last call on the old generation that all members completed; None if they
    completed none or it is unknown.
    """

    build: BuildId
    completed: int | None = None


class BuildFailed(msgspec.Struct, frozen=True):
    """Reported once for each StartBuild that did not finish, also after AbortBuild."""

    build: BuildId
    failure: BuildFailure


class MemberNeeded(msgspec.Struct, frozen=True):
    """A call on this generation needs a member that cannot be reached."""

    key: GenerationKey
    node: NodeId
    cause: str
    membership: Membership | None = None  # of a generation that is not open here: its first build failed


class LocalClose(msgspec.Struct, frozen=True):
    """The user closed this generation at this node."""

    key: GenerationKey


class RevokeRequested(msgspec.Struct, frozen=True):
    """The user revokes this generation for all members."""

    key: GenerationKey
    reason: str


class RevokeReceived(msgspec.Struct, frozen=True):
    """A member's notice. `rank` revoked the generation, or (`closed`) closed it. Untrusted."""

    sender: NodeId
    key: GenerationKey
    rank: int
    reason: str
    closed: bool


class Released(msgspec.Struct, frozen=True):
    """The last reference to this superseded generation at this node is gone."""

    key: GenerationKey


class Terminate(msgspec.Struct, frozen=True):
    """End all communicators."""

    cause: Terminated


SuccessorInput: TypeAlias = (
    MembershipDecided
    | NoProgress
    | BeginRequested
    | BuildFinished
    | BuildFailed
    | MemberNeeded
    | LocalClose
    | RevokeRequested
    | RevokeReceived
    | Released
    | Terminate
    | Tick
)


# -- actions


class Interrupt(msgspec.Struct, frozen=True):
    """End every pending and later call on this generation; its outcome follows."""

    key: GenerationKey


class AdoptMembership(msgspec.Struct, frozen=True):
    """Publish the membership and close the links of departed members. Interrupts come before, builds after."""

    change: Change
    after: Membership


class DropPeer(msgspec.Struct, frozen=True):
    """Fail operations that wait for this former member."""

    node: NodeId
    cause: str


class StartBuild(msgspec.Struct, frozen=True):
    """Build this generation together with its members. `old`: the generation it replaces; None for a first one."""

    build: BuildId
    communicator: int
    membership: Membership
    old: GenerationKey | None
    until: float | None = None
    """Deadline of a successor's build, by the machine's clock. The user's deadline limits a first one."""

    @property
    def key(self) -> GenerationKey:
        """Of the generation to build."""
        return GenerationKey(self.communicator, self.membership.epoch)


class AbortBuild(msgspec.Struct, frozen=True):
    """End this build: its members no longer take part. BuildFailed still follows."""

    build: BuildId
    failure: BuildFailure


class RejectBegin(msgspec.Struct, frozen=True):
    """The communicator of BeginRequested is not built: it was not begun, or BuildFailed."""

    build: BuildId
    failure: BuildFailure


class OpenGeneration(msgspec.Struct, frozen=True):
    """The built generation exists for this node from now on."""

    build: BuildId
    key: GenerationKey
    old: GenerationKey | None


class CloseGeneration(msgspec.Struct, frozen=True):
    """The user closed this generation before it had a successor, so its event feeds end with it."""

    key: GenerationKey


class DiscardBuild(msgspec.Struct, frozen=True):
    """The built generation is not used: its user closed the communicator meanwhile, or a member did."""

    build: BuildId


class SetOutcome(msgspec.Struct, frozen=True):
    """Calls on this generation raise this from now on."""

    key: GenerationKey
    outcome: Outcome


class SendNotice(msgspec.Struct, frozen=True):
    """Tell these members that `rank` revoked or (`closed`) closed a generation."""

    nodes: tuple[NodeId, ...]
    key: GenerationKey
    rank: Rank
    reason: str
    closed: bool


class RequestRenewal(msgspec.Struct, frozen=True):
    """Ask the membership machine for a change that gives these communicators a successor, in this epoch's world."""

    communicators: tuple[int, ...]
    epoch: int


class Investigate(msgspec.Struct, frozen=True):
    """Find out whether this member is lost."""

    node: NodeId
    cause: str


class ReportDeparture(msgspec.Struct, frozen=True):
    """Tell subscribers of this generation that a member left quietly."""

    key: GenerationKey
    node: NodeId
    cause: str


# What happens to the generations of this node
GenerationAction: TypeAlias = (
    Interrupt
    | DropPeer
    | StartBuild
    | AbortBuild
    | RejectBegin
    | OpenGeneration
    | CloseGeneration
    | DiscardBuild
    | SetOutcome
    | ReportDeparture
)
SuccessorAction: TypeAlias = GenerationAction | AdoptMembership | SendNotice | Investigate | RequestRenewal
