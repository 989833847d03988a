"""Events, actions and outcomes of SuccessorMachine. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, TypeAlias

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


@dataclass(frozen=True, slots=True)
class Superseded:
    """Another generation replaces it. Final, but an even newer successor replaces this one."""

    successor: GenerationKey
    lost: Mapping[Rank, str]  # ranks of the old generation that the successor lacks, and why
    joined: tuple[Rank, ...]  # ranks of the successor that the old generation lacks
    completed: int | None  # the last call that all continuing members completed on the old generation
    agreed: bool  # every departure was willing


@dataclass(frozen=True, slots=True)
class QuorumLost:
    """No majority is reachable. A later outcome replaces it."""

    alive: tuple[Rank, ...]
    needed: int
    left: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class RecoveryTimedOut:
    """No successor came about in time. A later outcome replaces it."""

    missing: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class RevokedBy:
    """A member revoked it, or (`closed`) closed it so that no successor with that member can exist. A successor, a
    termination, or another closer replaces it.
    """

    rank: Rank
    reason: str
    closed: bool = False


class TerminationKind(Enum):
    """Why this node has no communicators any more."""

    EXPELLED = auto()
    ABORTED = auto()  # a member was lost under the policy `abort`
    CLOSED = auto()  # by its user


@dataclass(frozen=True, slots=True)
class Terminated:
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


@dataclass(frozen=True, slots=True)
class BuildFailure:
    """`nodes`: the members that were missed; PEER_LOST names exactly one."""

    kind: BuildFailureKind
    nodes: tuple[NodeId, ...] = ()
    cause: str = ""


# -- events


@dataclass(frozen=True, slots=True)
class BeginRequested:
    """The user makes a communicator (init, split, group): build its first generation here."""

    build: BuildId
    communicator: int
    membership: Membership


@dataclass(frozen=True, slots=True)
class BuildFinished:
    """`completed`: the last call on the old generation that all members completed; None if there is none."""

    build: BuildId
    completed: int | None = None


@dataclass(frozen=True, slots=True)
class BuildFailed:
    """Reported once for each StartBuild that did not finish, also after AbortBuild."""

    build: BuildId
    failure: BuildFailure


@dataclass(frozen=True, slots=True)
class MemberNeeded:
    """A call on this generation needs a member that cannot be reached."""

    key: GenerationKey
    node: NodeId
    cause: str
    membership: Membership | None = None  # of a generation that is not open here: its first build failed


@dataclass(frozen=True, slots=True)
class LocalClose:
    """The user closed this generation at this node."""

    key: GenerationKey


@dataclass(frozen=True, slots=True)
class RevokeRequested:
    """The user revokes this generation for all members."""

    key: GenerationKey
    reason: str


@dataclass(frozen=True, slots=True)
class RevokeReceived:
    """A member's notice. `rank` revoked the generation, or (`closed`) closed it. Untrusted."""

    sender: NodeId
    key: GenerationKey
    rank: int
    reason: str
    closed: bool


@dataclass(frozen=True, slots=True)
class Released:
    """Nothing at this node refers to this superseded generation any more."""

    key: GenerationKey


@dataclass(frozen=True, slots=True)
class Terminate:
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


@dataclass(frozen=True, slots=True)
class Interrupt:
    """End every pending and later call on this generation; its outcome follows."""

    key: GenerationKey


@dataclass(frozen=True, slots=True)
class AdoptMembership:
    """Publish the membership and close the links of those who left. Interrupts come before, builds after."""

    change: Change
    after: Membership


@dataclass(frozen=True, slots=True)
class DropPeer:
    """Fail operations that wait for this former member."""

    node: NodeId
    cause: str


@dataclass(frozen=True, slots=True)
class StartBuild:
    """Build this generation together with its members. `old`: the generation it replaces; None for a first one."""

    build: BuildId
    communicator: int
    membership: Membership
    old: GenerationKey | None

    @property
    def key(self) -> GenerationKey:
        """Of the generation to build."""
        return GenerationKey(self.communicator, self.membership.epoch)


@dataclass(frozen=True, slots=True)
class AbortBuild:
    """Its members do not take part any more. BuildFailed still follows."""

    build: BuildId
    failure: BuildFailure


@dataclass(frozen=True, slots=True)
class RejectBegin:
    """The communicator of BeginRequested is not built: it was not begun, or BuildFailed."""

    build: BuildId
    failure: BuildFailure


@dataclass(frozen=True, slots=True)
class OpenGeneration:
    """The built generation exists for this node from now on."""

    build: BuildId
    key: GenerationKey
    old: GenerationKey | None


@dataclass(frozen=True, slots=True)
class DiscardBuild:
    """The built generation is not used: its user closed the communicator meanwhile, or a member did."""

    build: BuildId


@dataclass(frozen=True, slots=True)
class SetOutcome:
    """Calls on this generation raise this from now on."""

    key: GenerationKey
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class SendNotice:
    """Tell these members that `rank` revoked or (`closed`) closed a generation."""

    nodes: tuple[NodeId, ...]
    key: GenerationKey
    rank: Rank
    reason: str
    closed: bool


@dataclass(frozen=True, slots=True)
class RequestRenewal:
    """Ask the membership machine for a change that gives these communicators a successor, in this epoch's world."""

    communicators: tuple[int, ...]
    epoch: int


@dataclass(frozen=True, slots=True)
class Investigate:
    """Find out whether this member is lost."""

    node: NodeId
    cause: str


@dataclass(frozen=True, slots=True)
class ReportDeparture:
    """Tell subscribers of this generation that a member left quietly."""

    key: GenerationKey
    node: NodeId
    cause: str


SuccessorAction: TypeAlias = (
    Interrupt
    | AdoptMembership
    | DropPeer
    | StartBuild
    | AbortBuild
    | RejectBegin
    | OpenGeneration
    | DiscardBuild
    | SetOutcome
    | SendNotice
    | RequestRenewal
    | Investigate
    | ReportDeparture
)
