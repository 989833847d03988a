"""Events and actions of admission. Pure.

A connection is a number that is never reused. The shell decodes, verifies, signs, sends and closes. It reports events
and performs actions in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from nexar.cluster.decisions.paxos import Vote
from nexar.cluster.decisions.refusals import RefusalCode
from nexar.cluster.membership import Membership
from nexar.types import NodeId, Rank
from nexar.wire.control import Message
from nexar.wire.hello import Hello
from nexar.wire.join import JoinMessage, JoinRequest, ReserveRanks
from nexar.wire.join import RunFailed as RunFailedMessage

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class ConnectionOpened:
    """A peer connected; nothing was received yet."""

    connection: int
    address: str


@dataclass(frozen=True, slots=True)
class HelloReceived:
    """A hello of our version."""

    connection: int
    hello: Hello


@dataclass(frozen=True, slots=True)
class JoinRequested:
    """A node asks to become a member."""

    connection: int
    application: JoinRequest
    proof_ok: bool
    fingerprint: bytes  # of the key in its certificate request, whose signature was checked
    clock: float = 0.0  # the seed's clock on arrival, seconds since 1970


@dataclass(frozen=True, slots=True)
class JoinerReady:
    """An admitted candidate has its certificate: others may dial it."""

    connection: int


@dataclass(frozen=True, slots=True)
class RanksRequested:
    """A launcher asks for a block of ranks."""

    connection: int
    reservation: ReserveRanks
    proof_ok: bool
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class BoardRequested:
    """An observer asks for the status board."""

    connection: int
    proof_ok: bool


@dataclass(frozen=True, slots=True)
class BadMessage:
    """Invalid, of another version, or with an invalid certificate request."""

    connection: int
    reason: str


@dataclass(frozen=True, slots=True)
class ConnectionEnded:
    """The peer or the network ended it."""

    connection: int
    reason: str


@dataclass(frozen=True, slots=True)
class ChildReported:
    """A launcher's child ended."""

    connection: int
    rank: Rank
    cause: str
    well: bool = False  # it ended with exit code 0


@dataclass(frozen=True, slots=True)
class RunFailureReported:
    """A child's failure stops the run."""

    connection: int
    failure: RunFailedMessage


@dataclass(frozen=True, slots=True)
class MemberMessageReceived:
    """A member's message about the next membership."""

    connection: int
    message: Message


@dataclass(frozen=True, slots=True)
class MemberAnswered:
    """A member answered a liveness query."""

    connection: int
    number: int


@dataclass(frozen=True, slots=True)
class MemberConnected:
    """A first member has its links."""

    connection: int


@dataclass(frozen=True, slots=True)
class StartFailureReported:
    """A first member cannot create its communicator."""

    connection: int
    reason: str


@dataclass(frozen=True, slots=True)
class ProgressRequested:
    """A candidate asks which ranks are missing."""

    connection: int


@dataclass(frozen=True, slots=True)
class LeaveReceived:
    """The node leaves."""

    connection: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class AdmissionTick:
    """Time has passed."""


# events of an open connection
ReceivedEvent: TypeAlias = (
    HelloReceived
    | JoinRequested
    | JoinerReady
    | RanksRequested
    | BoardRequested
    | BadMessage
    | ConnectionEnded
    | ChildReported
    | RunFailureReported
    | MemberMessageReceived
    | MemberAnswered
    | MemberConnected
    | StartFailureReported
    | ProgressRequested
    | LeaveReceived
)
AdmissionEvent: TypeAlias = ConnectionOpened | ReceivedEvent | AdmissionTick

# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class SendChallenge:
    """Answer its hello."""

    connection: int


@dataclass(frozen=True, slots=True)
class AdmitNode:
    """Sign its certificate request and send Welcome."""

    connection: int
    node: NodeId
    seen_address: str
    size: int
    rank: Rank | None = None  # of a candidate, if known
    first_rank: Rank | None = None  # of a launcher's block
    group_rank: int | None = None


@dataclass(frozen=True, slots=True)
class ShowBoard:
    """Send the status board from now on."""

    connection: int


@dataclass(frozen=True, slots=True)
class RefuseConnection:
    """Send Refused, then close. Final."""

    connection: int
    reason: str
    expelled: int = 0  # it was a member until this epoch
    code: RefusalCode = ""


@dataclass(frozen=True, slots=True)
class DropConnection:
    """Close without a message; the node may retry."""

    connection: int
    reason: str


@dataclass(frozen=True, slots=True)
class CommitMembership:
    """Persist the membership, then send it."""

    membership: Membership
    connections: tuple[int, ...]
    present: frozenset[NodeId] = frozenset()  # the connected members
    willing: frozenset[NodeId] = frozenset()  # former members that asked to leave
    # The cluster has formed. False: its members first confirm that they are connected, and StartCluster follows.
    starts: bool = True


@dataclass(frozen=True, slots=True)
class StartCluster:
    """Every member is connected: send Started."""

    membership: Membership
    connections: tuple[int, ...]
    present: frozenset[NodeId]


@dataclass(frozen=True, slots=True)
class NotifyConnections:
    """Send this message."""

    message: JoinMessage
    connections: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PersistVote:
    """Persist the vote before any later action."""

    vote: Vote


@dataclass(frozen=True, slots=True)
class FailFormation:
    """Send FormationFailed, close, and delete a persisted membership."""

    joined: tuple[str, ...]
    expected: int
    refused: Mapping[str, str]  # the newest refusals, by the name each node gave
    refused_count: int
    timeout: float
    connections: tuple[int, ...]
    reason: str = ""  # empty: the time was over


SeedEventKind: TypeAlias = Literal[
    "knocked", "admitted", "reserved", "returned", "refused", "dropped", "gone", "left", "child died", "committed",
    "failed", "moved on", "watching", "started", "run failed",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class SeedEvent:
    """A log entry."""

    kind: SeedEventKind
    address: str | None = None
    node: NodeId | None = None
    rank: Rank | None = None
    reason: str = ""


AdmissionAction: TypeAlias = (
    SendChallenge
    | AdmitNode
    | ShowBoard
    | RefuseConnection
    | DropConnection
    | CommitMembership
    | StartCluster
    | NotifyConnections
    | PersistVote
    | FailFormation
    | SeedEvent
)
