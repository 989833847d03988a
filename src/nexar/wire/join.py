"""Join messages: the bodies of CONTROL frames between a seed and a joiner, launcher or observer, after the hello.

    candidate, launcher or onlooker                    seed
    Hello ───────────────────────────────────────→
          ←─────────────────────────────────────── Challenge
    JoinRequest, ReserveRanks or WatchStatus ────→
          ←─────────────────────────────────────── Welcome
    Ready ───────────────────────────────────────→
          ←─────────────────────────────────────── Current: if the cluster has formed, also after changes
    FormationQuery ──────────────────────────────→
          ←─────────────────────────────────────── FormationProgress
          ←─────────────────────────────────────── Committed or FormationFailed
    Connected or StartFailed ────────────────────→
          ←─────────────────────────────────────── Started or FormationFailed
    Renew ───────────────────────────────────────→
          ←─────────────────────────────────────── Renewed
    StatusUpdate, ChildDied, RunFailed, Leave ───→
          ←─────────────────────────────────────── WaitingJoiners, MemberDied, RunFailed
    LivenessQuery, LivenessReply, SeedPaxosMessage ←→
    StatusPageRequest ───────────────────────────→
          ←─────────────────────────────────────── StatusPageReply: an observer ("onlooker") gets nothing else
          ←─────────────────────────────────────── JoinRefusedMessage: at any time

Never reuse a tag; new fields need a default. A message that not every node of this version knows is sent only to nodes
whose capabilities name it, so an unknown tag is an error.

Messages of unauthenticated peers are bounded before decoding (MAX_UNVERIFIED_BYTES), and so is each field. Text for
people has no control characters: a peer cannot add a line to another node's log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, TypeAlias, Union

import msgspec
from msgspec import Meta

from nexar.security.proof import NONCE_BYTES, PROOF_BYTES
from nexar.types import MAX_NODE
from nexar.wire.hello import MAX_HELLO_BYTES, PROTOCOL_VERSION, HandshakeError, add_prefix, strip_prefix
from nexar.wire.status import StatusPage
from nexar.wire.text import FEW_LINES, ONE_LINE

MAX_UNVERIFIED_BYTES: Final = MAX_HELLO_BYTES  # any message of a sender that has not proven that it knows the secret
MAX_JOIN_BYTES: Final = 1 << 20  # any message of an authenticated sender
MAX_PAXOS_BYTES: Final = MAX_JOIN_BYTES - (1 << 10)  # the body of a SeedPaxosMessage, so that it fits into a message
MAX_STATUS_BYTES: Final = 16 << 10
MAX_RANKS: Final = 1 << 20
MAX_ADDRESSES: Final = 64
MAX_REFUSALS: Final = 256  # the newest refusals that a FormationFailed lists
MAX_LISTED: Final = 8  # ranks and refusals that a FormationProgress lists
MAX_REASON_CHARACTERS: Final = 1000
MAX_CAUSE_CHARACTERS: Final = 64 << 10
REPORTED_BY_LAUNCHER: Final = "launcher"
REPORTED_BY_SEED: Final = "seed"

_Nonce: TypeAlias = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Proof: TypeAlias = Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
_Request: TypeAlias = Annotated[bytes, Meta(min_length=1, max_length=2 << 10)]
_Certificate: TypeAlias = Annotated[bytes, Meta(min_length=1, max_length=16 << 10)]
_Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
_Count: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
_Epoch: TypeAlias = Annotated[int, Meta(ge=0)]
_Number: TypeAlias = Annotated[int, Meta(ge=0)]
_Cause: TypeAlias = Annotated[str, Meta(max_length=MAX_CAUSE_CHARACTERS)]
_Encoded: TypeAlias = Annotated[bytes, Meta(min_length=1)]
_Line: TypeAlias = Annotated[str, Meta(max_length=MAX_REASON_CHARACTERS, pattern=ONE_LINE)]
_Lines: TypeAlias = Annotated[str, Meta(max_length=MAX_REASON_CHARACTERS, pattern=FEW_LINES)]
_Word: TypeAlias = Annotated[str, Meta(pattern=r"\A[a-z_]{0,32}\Z")]  # newer senders may use others
_SettingName: TypeAlias = Annotated[str, Meta(pattern=r"\A[a-z][a-z0-9_]{0,63}\Z")]
_SettingText: TypeAlias = Annotated[str, Meta(max_length=64, pattern=ONE_LINE)]

Node: TypeAlias = Annotated[int, Meta(ge=1)]
Host: TypeAlias = Annotated[str, Meta(min_length=1, max_length=255, pattern=ONE_LINE)]
Scheme: TypeAlias = Annotated[str, Meta(pattern=r"\A[a-z][a-z0-9+.-]{0,31}\Z")]
Address: TypeAlias = Annotated[str, Meta(min_length=1, max_length=512, pattern=ONE_LINE)]
# where a node listens: by transport, the best address first
Addresses: TypeAlias = Mapping[Scheme, tuple[Address, ...]]


def count_addresses(addresses: Addresses) -> int:
    """Return their number. Raise ValueError above MAX_ADDRESSES."""
    count = sum(map(len, addresses.values()))
    if count > MAX_ADDRESSES or len(addresses) > MAX_ADDRESSES:
        raise ValueError(f"a node with {max(count, len(addresses))} addresses; allowed are {MAX_ADDRESSES}")
    return count


def check_node(node: int) -> int:
    """Return `node`. Raise ValueError unless it is 1 to MAX_NODE."""
    if not 1 <= node <= MAX_NODE:
        raise ValueError(f"{node} is not the id of a node: 1 to 2**64-1")
    return node


class _Base(msgspec.Struct, frozen=True, tag_field="type", omit_defaults=True): ...


class Challenge(_Base, frozen=True, tag="challenge"):
    """The seed's proof over both nonces, which the joiner checks before it sends more."""

    nonce: _Nonce
    proof: _Proof


class JoinRequest(_Base, frozen=True, tag="apply"):
    """A candidate asks to become a member."""

    proof: _Proof
    request: _Request
    """Certificate signing request, DER. The private key never leaves the candidate."""
    host: Host
    addresses: Addresses
    rank: _Rank | None = None
    """The rank from its environment; None for any."""
    launcher: Annotated[int, Meta(ge=0)] = 0
    """The launcher that started it; 0 if the seed knows of none."""
    epoch: _Epoch = 0
    """Epoch of its membership, if a member reconnects; 0 for a new node."""
    size: Annotated[int, Meta(ge=0, le=MAX_RANKS)] = 0
    """World size from its environment; 0 if not set."""
    clock: Annotated[float, Meta(ge=0, le=1e12)] = 0.0
    """Seconds since 1970 on its clock; 0 if not given."""
    settings: Annotated[Mapping[_SettingName, _SettingText], Meta(max_length=64)] = {}
    """Settings that must be equal on all ranks, by field name of Config."""
    confirms: bool = False
    """It sends Connected or StartFailed as a member of the first membership, and waits for Started."""

    def __post_init__(self) -> None:
        """Decoding calls it too."""
        count_addresses(self.addresses)
        check_node(self.launcher or 1)


class ReserveRanks(_Base, frozen=True, tag="reserve"):
    """A launcher asks for a block of ranks for its children."""

    proof: _Proof
    request: _Request
    host: Host
    count: _Count
    first_rank: _Rank | None = None
    """First rank of the block; None for the lowest free one."""
    epoch: _Epoch = 0
    """Epoch of its children's membership, if the launcher reconnects; 0 otherwise."""


class Welcome(_Base, frozen=True, tag="welcome"):
    """The seed admits the other side."""

    cluster: Annotated[str, Meta(min_length=1, max_length=64, pattern=ONE_LINE)]
    certificate: _Certificate
    """PEM, for the key of the request."""
    authority: _Certificate
    """The cluster's authority, PEM."""
    seen_address: Annotated[str, Meta(max_length=512, pattern=ONE_LINE)]
    """The peer's address as the seed sees it."""
    size: _Count
    first_rank: _Rank | None = None
    """First rank of a launcher's block."""
    group_rank: _Rank | None = None
    """Index of a launcher among the launchers."""
    elastic: bool = False
    """The cluster continues without failed members, and admits new ones."""


class Ready(_Base, frozen=True, tag="ready"):
    """The candidate's certificate is in place; it accepts dials. The seed commits only when all are ready."""


class Committed(_Base, frozen=True, tag="committed"):
    """The membership, when all ranks are present or a later joiner is admitted."""

    membership: _Encoded
    """As `cluster.membership` encodes it."""


class Current(_Base, frozen=True, tag="current"):
    """The members that a candidate waits to join. They decide when."""

    membership: _Encoded
    """As `cluster.membership` encodes it."""


class Connected(_Base, frozen=True, tag="connected"):
    """A member of the first membership has its links."""


class StartFailed(_Base, frozen=True, tag="start_failed"):
    """A member of the first membership cannot create the first communicator."""

    reason: _Lines
    """Names the pair of ranks that cannot connect, if that is the cause."""


class Started(_Base, frozen=True, tag="started"):
    """Every member of the first membership has its links."""


class FormationQuery(_Base, frozen=True, tag="inquire"):
    """A candidate asks which ranks are missing."""


class FormationProgress(_Base, frozen=True, tag="progress"):
    """The ranks that the formation waits for."""

    joined: Annotated[int, Meta(ge=0)]
    expected: _Count
    missing: Annotated[tuple[_Rank, ...], Meta(max_length=MAX_LISTED)] = ()
    """The lowest ranks without a candidate, if every candidate claimed a rank."""
    refused: Annotated[Mapping[_Line, _Line], Meta(max_length=MAX_LISTED)] = {}
    """The newest refusals: peer and reason."""
    reports: bool = True
    """The receiver is the first of its host and shows this to the user; the others need not."""


class FormationFailed(_Base, frozen=True, tag="formation_failed"):
    """The cluster did not form or did not start. The seed then closes the connection."""

    joined: tuple[_Line, ...]
    expected: _Count
    refused: Annotated[Mapping[_Line, _Line], Meta(max_length=MAX_REFUSALS)]
    """The newest refusals: peer and reason."""
    timeout: Annotated[float, Meta(ge=0)]
    refused_count: Annotated[int, Meta(ge=0)] = 0
    """Number of all refusals, including those not listed."""
    reason: _Lines = ""
    """The cause; empty if the time ran out."""


class JoinRefusedMessage(_Base, frozen=True, tag="refused"):
    """The seed refuses; a retry will not help. It then closes the connection."""

    reason: _Lines
    expelled: _Number = 0
    """Epoch at which the receiver was removed from the membership; 0 if that is not the reason."""
    nobody_left: bool = False
    """As the code of this name, for nodes that do not know codes."""
    code: _Word = ""
    """For programs: `full`, `incompatible`, `nobody_left` (all left or died), `not_elastic`, `wrong_secret`."""


class Renew(_Base, frozen=True, tag="renew"):
    """Asks for a certificate with a later end, for the same key."""

    request: _Request


class Renewed(_Base, frozen=True, tag="renewed"):
    """Answer to Renew."""

    certificate: _Certificate


class ChildDied(_Base, frozen=True, tag="child_died"):
    """A launcher's child ended."""

    rank: _Rank
    cause: _Cause
    """For people; includes the child's traceback if it left one."""
    well: bool = False
    """It exited normally. That matters only while the cluster forms: the rank will never join."""


class RunFailed(_Base, frozen=True, tag="run_failed"):
    """A rank failed, and the run stops on all hosts. A launcher reports its child; the seed sends the first failure to
    all launchers.
    """

    rank: _Rank
    cause: _Line
    """How the rank ended, for people."""
    code: Annotated[int, Meta(ge=1, le=255)]
    """Exit code of every launcher of this run."""
    consequence: bool = False
    """The rank failed because it lost another rank."""
    host: Annotated[str, Meta(max_length=255, pattern=ONE_LINE)] = ""
    """Name of the host where the rank ran."""


class Leave(_Base, frozen=True, tag="leave"):
    """The sender leaves intentionally and closes the connection."""

    reason: _Line = ""


class SeedPaxosMessage(_Base, frozen=True, tag="word"):
    """Paxos about the next membership, between a member and the seed."""

    body: Annotated[bytes, Meta(min_length=1, max_length=MAX_PAXOS_BYTES)]
    """As `wire.control` encodes it."""


class MemberDied(_Base, frozen=True, tag="died"):
    """A launcher or a broken connection showed that a member is gone. A hint that members verify."""

    node: Node
    epoch: _Epoch
    """Epoch of the membership in which the seed knows it."""
    cause: _Cause
    """For people."""
    reported_by: _Word = ""
    """`launcher`, which knows how the process ended; `seed`, whose connection broke; empty: unknown, as of the seed."""


class LivenessQuery(_Base, frozen=True, tag="are_you_there"):
    """Asks whether the receiver is alive: another node reported it dead, or its vote is needed."""

    number: _Number


class LivenessReply(_Base, frozen=True, tag="here"):
    """Answer to LivenessQuery."""

    number: _Number


class WaitingJoiners(_Base, frozen=True, tag="waiting"):
    """To members: all ready candidates, in order of arrival."""

    members: Annotated[tuple[_Encoded, ...], Meta(max_length=MAX_RANKS)] = ()
    """Each as `cluster.membership` encodes a member."""


class WatchStatus(_Base, frozen=True, tag="watch"):
    """An observer authenticates."""

    proof: _Proof


class StatusPageRequest(_Base, frozen=True, tag="look"):
    """An observer asks for rows of the status board."""

    first: _Number = 0


class StatusPageReply(_Base, frozen=True, tag="shown"):
    """Answer to WatchStatus and StatusPageRequest."""

    board: StatusPage


class StatusUpdate(_Base, frozen=True, tag="news"):
    """A member's status report, once a second."""

    body: Annotated[bytes, Meta(max_length=MAX_STATUS_BYTES)]
    """As `wire.status` encodes it."""


JoinMessage: TypeAlias = Union[  # noqa: UP007 - msgspec reads it at run time
    Challenge, JoinRequest, ReserveRanks, Welcome, Ready, Committed, FormationFailed, JoinRefusedMessage, Renew,
    Renewed, ChildDied, Leave, Current, SeedPaxosMessage, MemberDied, LivenessQuery, LivenessReply, WaitingJoiners,
    WatchStatus, StatusPageRequest, StatusPageReply, StatusUpdate, Connected, StartFailed, Started, FormationQuery,
    FormationProgress, RunFailed,
]  # fmt: skip
KNOWN_JOIN: Final[tuple[type[JoinMessage], ...]] = (
    Challenge, JoinRequest, ReserveRanks, Welcome, Ready, Committed, FormationFailed, JoinRefusedMessage, Renew,
    Renewed, ChildDied, Leave, Current, SeedPaxosMessage, MemberDied, LivenessQuery, LivenessReply, WaitingJoiners,
    WatchStatus, StatusPageRequest, StatusPageReply, StatusUpdate, Connected, StartFailed, Started, FormationQuery,
    FormationProgress, RunFailed,
)  # fmt: skip

_FROM_UNVERIFIED: Final = (Challenge, JoinRequest, ReserveRanks, WatchStatus, JoinRefusedMessage)
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final[msgspec.msgpack.Decoder[JoinMessage]] = msgspec.msgpack.Decoder(JoinMessage)


def encode_join(message: JoinMessage, version: int = PROTOCOL_VERSION) -> bytes:
    """Return the body of a CONTROL frame. Raise HandshakeError above the receiver's limit."""
    limit = MAX_UNVERIFIED_BYTES if isinstance(message, _FROM_UNVERIFIED) else MAX_JOIN_BYTES
    return add_prefix(_encoder.encode(message), limit, version)


def decode_join(body: bytes | bytearray | memoryview, limit: int) -> JoinMessage:
    """Return the message. Raise VersionMismatch or, for invalid bytes or more than `limit`, HandshakeError."""
    content = strip_prefix(body, limit)
    try:
        return _decoder.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HandshakeError(f"not a join message: {error}") from None
