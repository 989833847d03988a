"""What admission is told, and what it wants done.

A connection is a number that the shell chose and never uses again. The shell does what needs the world: it decodes,
checks proofs and requests, signs, sends, closes. It reports events in the order in which they happened and carries out
actions in the order in which they are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from nexar.cluster.decisions.paxos import Vote
from nexar.cluster.membership import Membership
from nexar.types import NodeId, Rank
from nexar.wire.control import Message
from nexar.wire.hello import Hello
from nexar.wire.join import JoinMessage, JoinRequest, ReserveRanks
from nexar.wire.join import RunFailed as RunFailedMessage

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class ConnectionOpened:
    """A connection is open; nothing has been said on it."""

    connection: int
    address: str


@dataclass(frozen=True, slots=True)
class HelloReceived:
    """It said hello, in our version."""

    connection: int
    hello: Hello


@dataclass(frozen=True, slots=True)
class JoinRequested:
    """It asked to become a member."""

    connection: int
    application: JoinRequest
    proof_ok: bool
    fingerprint: bytes
    """Of the key in its request, whose signature has been checked."""
    clock: float = 0.0
    """Seconds since 1970 on the seed's clock when it came."""


@dataclass(frozen=True, slots=True)
class JoinerReady:
    """A candidate that was let in has its certificate in place: others may dial it."""

    connection: int


@dataclass(frozen=True, slots=True)
class RanksRequested:
    """It asked for a block of ranks."""

    connection: int
    reservation: ReserveRanks
    proof_ok: bool
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class BoardRequested:
    """It asked to see the board."""

    connection: int
    proof_ok: bool


@dataclass(frozen=True, slots=True)
class BadMessage:
    """What it said means nothing, is of another version, or carries a request that is not in order."""

    connection: int
    reason: str


@dataclass(frozen=True, slots=True)
class ConnectionEnded:
    """The connection has ended, and not by us."""

    connection: int
    reason: str


@dataclass(frozen=True, slots=True)
class ChildReported:
    """A launcher reports the end of one of its children."""

    connection: int
    rank: Rank
    cause: str
    well: bool = False
    """It ended as it should, with exit code 0."""


@dataclass(frozen=True, slots=True)
class RunFailureReported:
    """A launcher reports the failure of one of its children, which stops the run."""

    connection: int
    failure: RunFailedMessage


@dataclass(frozen=True, slots=True)
class MemberMessageReceived:
    """A word of a member about who comes next."""

    connection: int
    message: Message


@dataclass(frozen=True, slots=True)
class MemberAnswered:
    """A member says that it is there."""

    connection: int
    number: int


@dataclass(frozen=True, slots=True)
class MemberConnected:
    """A member of the first membership has its links."""

    connection: int


@dataclass(frozen=True, slots=True)
class StartFailureReported:
    """A member of the first membership cannot make the first communicator."""

    connection: int
    reason: str


@dataclass(frozen=True, slots=True)
class ProgressRequested:
    """A candidate asks for whom the formation waits."""

    connection: int


@dataclass(frozen=True, slots=True)
class LeaveReceived:
    """It takes its leave."""

    connection: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class AdmissionTick:
    """Time has passed: at the latest when `due` said."""


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
"""What happens on a connection that has knocked."""
AdmissionEvent: TypeAlias = ConnectionOpened | ReceivedEvent | AdmissionTick

# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class SendChallenge:
    """Answer its hello."""

    connection: int


@dataclass(frozen=True, slots=True)
class AdmitNode:
    """Sign its request and send Welcome with these facts."""

    connection: int
    node: NodeId
    seen_address: str
    size: int
    rank: Rank | None = None
    """Of a candidate, where it is known already."""
    first_rank: Rank | None = None
    """Of a launcher's block."""
    group_rank: int | None = None


@dataclass(frozen=True, slots=True)
class ShowBoard:
    """It may see the board from now on, and sees it at once."""

    connection: int


@dataclass(frozen=True, slots=True)
class RefuseConnection:
    """Send Refused with the reason, then close: a judgement, and trying again will not change it."""

    connection: int
    reason: str
    expelled: int = 0
    """It was a member until this epoch."""
    nobody_left: bool = False
    """Every member has left or died."""


@dataclass(frozen=True, slots=True)
class DropConnection:
    """Close without a word: no judgement, whoever it is may try again."""

    connection: int
    reason: str


@dataclass(frozen=True, slots=True)
class CommitMembership:
    """The membership is settled: keep it, then send it on these connections."""

    membership: Membership
    connections: tuple[int, ...]
    present: frozenset[NodeId] = frozenset()
    """The members that are connected."""
    willing: frozenset[NodeId] = frozenset()
    """Those that are members no longer because they wanted to leave."""
    starts: bool = True
    """The cluster has formed by it. False: its members confirm first that they are connected, and Start follows."""


@dataclass(frozen=True, slots=True)
class StartCluster:
    """Every member of the first membership is connected: send Started on these connections."""

    membership: Membership
    connections: tuple[int, ...]
    present: frozenset[NodeId]


@dataclass(frozen=True, slots=True)
class NotifyConnections:
    """Send this message on these connections."""

    message: JoinMessage
    connections: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PersistVote:
    """Bring the seed's vote to the disk; what comes after it may be said only when it is there."""

    vote: Vote


@dataclass(frozen=True, slots=True)
class FailFormation:
    """The cluster will not form: send FormationFailed on these connections, then close them. A membership that was
    kept is not kept any longer: nobody goes on with it.
    """

    joined: tuple[str, ...]
    expected: int
    refused: Mapping[str, str]
    """The newest, by who they said they were."""
    refused_count: int
    timeout: float
    connections: tuple[int, ...]
    reason: str = ""
    """What made it fail; empty: the time was up."""


SeedEventKind: TypeAlias = Literal[
    "knocked", "admitted", "reserved", "returned", "refused", "dropped", "gone", "left", "child died", "committed",
    "failed", "moved on", "watching", "started", "run failed",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class SeedEvent:
    """For people and for logs: what happened, to whom, and why. Nothing needs to be done."""

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
