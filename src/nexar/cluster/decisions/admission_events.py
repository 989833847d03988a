"""Events and actions of admission. Pure.

A connection is a number that is never reused. The shell decodes, verifies, signs, sends and closes. It reports events
and performs actions in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

from nexar.cluster.decisions.paxos import Vote
from nexar.cluster.decisions.refusals import RefusalCode
from nexar.cluster.membership import Membership
from nexar.types import NodeId, Rank
from nexar.wire.control import Message
from nexar.wire.hello import Hello
from nexar.wire.join import JoinMessage, JoinRequest, ReserveRanks
from nexar.wire.join import RunFailed as RunFailedMessage

# ---------------------------------------------------------------- events


class ConnectionOpened(msgspec.Struct, frozen=True):
    """A peer connected; nothing was received yet."""

    connection: int
    address: str


class HelloReceived(msgspec.Struct, frozen=True):
    """A hello of our version."""

    connection: int
    hello: Hello


class JoinRequested(msgspec.Struct, frozen=True):
    """A node asks to become a member."""

    connection: int
    application: JoinRequest
    proof_ok: bool
    fingerprint: bytes  # of the key in its certificate request, whose signature was checked
    clock: float = 0.0  # the seed's clock on arrival, seconds since 1970


class JoinerReady(msgspec.Struct, frozen=True):
    """An admitted candidate has its certificate: others may dial it."""

    connection: int


class RanksRequested(msgspec.Struct, frozen=True):
    """A launcher asks for a block of ranks."""

    connection: int
    reservation: ReserveRanks
    proof_ok: bool
    fingerprint: bytes


class BoardRequested(msgspec.Struct, frozen=True):
    """An observer asks for the status board."""

    connection: int
    proof_ok: bool


class BadMessage(msgspec.Struct, frozen=True):
    """Invalid, of another version, or with an invalid certificate request."""

    connection: int
    reason: str


class ConnectionEnded(msgspec.Struct, frozen=True):
    """The peer or the network ended it."""

    connection: int
    reason: str


class ChildReported(msgspec.Struct, frozen=True):
    """A launcher's child ended."""

    connection: int
    rank: Rank
    cause: str
    well: bool = False  # it ended with exit code 0


class RunFailureReported(msgspec.Struct, frozen=True):
    """A child's failure stops the run."""

    connection: int
    failure: RunFailedMessage


class MemberMessageReceived(msgspec.Struct, frozen=True):
    """A member's message about the next membership."""

    connection: int
    message: Message


class MemberAnswered(msgspec.Struct, frozen=True):
    """A member answered a liveness query."""

    connection: int
    number: int


class MemberConnected(msgspec.Struct, frozen=True):
    """A first member has its links."""

    connection: int


class StartFailureReported(msgspec.Struct, frozen=True):
    """A first member cannot create its communicator."""

    connection: int
    reason: str


class ProgressRequested(msgspec.Struct, frozen=True):
    """A candidate asks which ranks are missing."""

    connection: int


class LeaveReceived(msgspec.Struct, frozen=True):
    """The node leaves."""

    connection: int
    reason: str = ""


class AdmissionTick(msgspec.Struct, frozen=True):
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


class SendChallenge(msgspec.Struct, frozen=True):
    """Answer its hello."""

    connection: int


class AdmitNode(msgspec.Struct, frozen=True):
    """Sign its certificate request and send Welcome."""

    connection: int
    node: NodeId
    seen_address: str
    size: int
    rank: Rank | None = None  # of a candidate, if known
    first_rank: Rank | None = None  # of a launcher's block
    group_rank: int | None = None


class ShowBoard(msgspec.Struct, frozen=True):
    """Send the status board from now on."""

    connection: int


class RefuseConnection(msgspec.Struct, frozen=True):
    """Send Refused, then close. Final."""

    connection: int
    reason: str
    expelled: int = 0  # it was a member until this epoch
    code: RefusalCode = ""


class DropConnection(msgspec.Struct, frozen=True):
    """Close without a message; the node may retry."""

    connection: int
    reason: str


class CommitMembership(msgspec.Struct, frozen=True):
    """Persist the membership, then send it."""

    membership: Membership
    connections: tuple[int, ...]
    present: frozenset[NodeId] = frozenset()  # the connected members
    willing: frozenset[NodeId] = frozenset()  # former members that asked to leave
    # The cluster has formed. False: its members first confirm that they are connected, and StartCluster follows.
    starts: bool = True


class StartCluster(msgspec.Struct, frozen=True):
    """Every member is connected: send Started."""

    membership: Membership
    connections: tuple[int, ...]
    present: frozenset[NodeId]


class NotifyConnections(msgspec.Struct, frozen=True):
    """Send this message."""

    message: JoinMessage
    connections: tuple[int, ...]


class PersistVote(msgspec.Struct, frozen=True):
    """Persist the vote before any later action."""

    vote: Vote


class FailFormation(msgspec.Struct, frozen=True):
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


class SeedEvent(msgspec.Struct, frozen=True):
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
