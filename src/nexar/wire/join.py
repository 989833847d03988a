"""Join messages: what is said on the join line, in the bodies of CONTROL frames, after the hello.

    candidate, launcher or onlooker            seed
    Hello ─────────────────────────────────→
          ←───────────────────────────────── Challenge    the seed proves that it knows the secret, first
    Apply, Reserve, Watch ─────────────────→              then the other side does
          ←───────────────────────────────── Welcome      certificate and authority
    Ready ─────────────────────────────────→              a candidate shows its certificate: others may dial it
          ←───────────────────────────────── Current      to who comes after the cluster has formed: whom it will join;
                                                          again whenever that changes
    Inquire ───────────────────────────────→              of a candidate that waits for the others
          ←───────────────────────────────── Progress     who is there, and who was refused
          ←───────────────────────────────── Committed or FormationFailed
    Connected or StartFailed ──────────────→              of a member of the first membership: it has its links, or not
          ←───────────────────────────────── Started      all of them have; else FormationFailed
    Renew, ChildDied, Leave ───────────────→
    RunFailed ─────────────────────────────→              of a launcher: one of its children has failed
          ←───────────────────────────────── RunFailed    to all launchers: the failure that stops the run
          ←───────────────────────────────── Renewed
          ←───────────────────────────────── Waiting      to members: who would like to come in
          ←───────────────────────────────── Died         to members: a hint
    News ──────────────────────────────────→              a member's bulletin, once a second
    AreYouThere, Here ←────────────────────→ AreYouThere, Here
    Word ←─────────────────────────────────→ Word         what members say to one another when they agree on something
    Look ──────────────────────────────────→              of an onlooker, which gets nothing else
          ←───────────────────────────────── Shown        the answer to Watch, and to each Look
          ←───────────────────────────────── Refused      at any time; the line is closed behind it

Law: every message carries the prefix of `handshake`, so each side can tell another version from nonsense. Within one
version a tag is the wire format and never used again, and fields may be added with a default; a message that not every
node of this version knows is only sent to those whose capabilities name it, so an unknown tag is an error here.

Law: what comes from a stranger is bounded before it is looked at (`MAX_STRANGER_BYTES`), and each field afterwards.
Text that is shown to people has no control characters: nobody writes a second line into somebody else's log.
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

MAX_UNVERIFIED_BYTES: Final = MAX_HELLO_BYTES
"""Of any message, as long as its sender has not proven that it knows the secret."""
MAX_JOIN_BYTES: Final = 1 << 20
"""Of any message afterwards."""
MAX_PAXOS_BYTES: Final = MAX_JOIN_BYTES - (1 << 10)
"""Of what a Word carries, so that it fits."""
MAX_STATUS_BYTES: Final = 16 << 10
MAX_RANKS: Final = 1 << 20
MAX_ADDRESSES: Final = 64
MAX_REFUSALS: Final = 256
"""As many are told to those whose formation failed, the newest."""
MAX_LISTED: Final = 8
"""As many ranks and refusals are told to a candidate that asks."""
MAX_REASON_CHARACTERS: Final = 1000
MAX_CAUSE_CHARACTERS: Final = 64 << 10

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
_SettingName: TypeAlias = Annotated[str, Meta(pattern=r"\A[a-z][a-z0-9_]{0,63}\Z")]
_SettingText: TypeAlias = Annotated[str, Meta(max_length=64, pattern=ONE_LINE)]

Node: TypeAlias = Annotated[int, Meta(ge=1)]
Host: TypeAlias = Annotated[str, Meta(min_length=1, max_length=255, pattern=ONE_LINE)]
Scheme: TypeAlias = Annotated[str, Meta(pattern=r"\A[a-z][a-z0-9+.-]{0,31}\Z")]
Address: TypeAlias = Annotated[str, Meta(min_length=1, max_length=512, pattern=ONE_LINE)]
Addresses: TypeAlias = Mapping[Scheme, tuple[Address, ...]]
"""Where a node listens: by transport, the best first."""


def count_addresses(addresses: Addresses) -> int:
    """Of all schemes together. ValueError if a node has more than MAX_ADDRESSES."""
    count = sum(map(len, addresses.values()))
    if count > MAX_ADDRESSES or len(addresses) > MAX_ADDRESSES:
        raise ValueError(f"a node with {max(count, len(addresses))} addresses; allowed are {MAX_ADDRESSES}")
    return count


def check_node(node: int) -> int:
    """`node` itself if it can be the id of one: 64 bits, not 0. ValueError otherwise."""
    if not 1 <= node <= MAX_NODE:
        raise ValueError(f"{node} is not the id of a node: 1 to 2**64-1")
    return node


class _Base(msgspec.Struct, frozen=True, tag_field="type", omit_defaults=True):
    """What all join messages share."""


class Challenge(_Base, frozen=True, tag="challenge"):
    """The seed's answer to a hello. The proof covers both nonces, and is checked before anything else is said."""

    nonce: _Nonce
    proof: _Proof


class JoinRequest(_Base, frozen=True, tag="apply"):
    """A candidate wants to become a member."""

    proof: _Proof
    request: _Request
    """Certificate signing request, DER. The key stays where it was made."""
    host: Host
    addresses: Addresses
    rank: _Rank | None = None
    """The rank that its environment gave it, or None: any."""
    launcher: Annotated[int, Meta(ge=0)] = 0
    """Who started it, if that is known to the seed; 0: nobody."""
    epoch: _Epoch = 0
    """Of the membership that it is in already, and lost its line; 0: of none."""
    size: Annotated[int, Meta(ge=0, le=MAX_RANKS)] = 0
    """How many ranks the world has, as its environment says; 0: its environment does not say."""
    clock: Annotated[float, Meta(ge=0, le=1e12)] = 0.0
    """Seconds since 1970 on its clock; 0: it did not say."""
    settings: Annotated[Mapping[_SettingName, _SettingText], Meta(max_length=64)] = {}
    """Those that must be the same on every rank, by name of the field of Config."""
    confirms: bool = False
    """It will say Connected or StartFailed when it is in the first membership, and waits for Started."""

    def __post_init__(self) -> None:
        """Called on the way in as well: the counts that no single field shows."""
        count_addresses(self.addresses)
        check_node(self.launcher or 1)


class ReserveRanks(_Base, frozen=True, tag="reserve"):
    """A launcher wants a block of ranks for the children it is about to start."""

    proof: _Proof
    request: _Request
    host: Host
    count: _Count
    first_rank: _Rank | None = None
    """Where the block must begin, or None: the lowest place that is free."""
    epoch: _Epoch = 0
    """Of a membership that its children form already, and it lost its line; 0: of none."""


class Welcome(_Base, frozen=True, tag="welcome"):
    """The seed has let the other side in. The membership follows when everybody is there."""

    cluster: Annotated[str, Meta(min_length=1, max_length=64, pattern=ONE_LINE)]
    certificate: _Certificate
    """PEM, for the key of the request."""
    authority: _Certificate
    """PEM, of the cluster."""
    seen_address: Annotated[str, Meta(max_length=512, pattern=ONE_LINE)]
    """Where this line comes from, as the seed sees it."""
    size: _Count
    first_rank: _Rank | None = None
    """Of a launcher's block."""
    group_rank: _Rank | None = None
    """The place of a launcher among the launchers."""
    elastic: bool = False
    """The cluster goes on without members that fail, and lets others in."""


class Ready(_Base, frozen=True, tag="ready"):
    """A candidate has its certificate in place. Before everybody has, nobody is told whom to dial."""


class Committed(_Base, frozen=True, tag="committed"):
    """Everybody is there."""

    membership: _Encoded
    """As `cluster.membership` encodes it."""


class Current(_Base, frozen=True, tag="current"):
    """Whom a candidate will join that came after the cluster has formed. They decide when; Committed tells."""

    membership: _Encoded
    """As `cluster.membership` encodes it."""


class Connected(_Base, frozen=True, tag="connected"):
    """A member of the first membership has its links. It waits for Started."""


class StartFailed(_Base, frozen=True, tag="start_failed"):
    """A member of the first membership cannot make the first communicator."""

    reason: _Lines
    """Names the pair of ranks, where two of them cannot connect."""


class Started(_Base, frozen=True, tag="started"):
    """Every member of the first membership has its links."""


class FormationQuery(_Base, frozen=True, tag="inquire"):
    """A candidate asks for whom the formation waits. The answer is Progress."""


class FormationProgress(_Base, frozen=True, tag="progress"):
    """For whom the formation waits."""

    joined: Annotated[int, Meta(ge=0)]
    expected: _Count
    missing: Annotated[tuple[_Rank, ...], Meta(max_length=MAX_LISTED)] = ()
    """The lowest ranks that nobody has claimed, where all candidates have claimed one."""
    refused: Annotated[Mapping[_Line, _Line], Meta(max_length=MAX_LISTED)] = {}
    """Who was refused, and why: the newest."""
    reports: bool = True
    """The hearer is the first of its host: it tells the user, the others need not."""


class FormationFailed(_Base, frozen=True, tag="formation_failed"):
    """The cluster did not form, or did not start. The line is closed behind it."""

    joined: tuple[_Line, ...]
    expected: _Count
    refused: Annotated[Mapping[_Line, _Line], Meta(max_length=MAX_REFUSALS)]
    """Who was turned away, and why: the newest."""
    timeout: Annotated[float, Meta(ge=0)]
    refused_count: Annotated[int, Meta(ge=0)] = 0
    """All of them, also those that are no longer listed."""
    reason: _Lines = ""
    """What made it fail; empty: the time was up."""


class JoinRefusedMessage(_Base, frozen=True, tag="refused"):
    """The seed says no, and trying again will not help. The line is closed behind it."""

    reason: _Lines
    expelled: _Number = 0
    """The hearer was a member until this epoch, when the others went on without it; 0: that is not the reason."""
    nobody_left: bool = False
    """Every member has left or died: nobody is left who could let the hearer in."""


class Renew(_Base, frozen=True, tag="renew"):
    """Asks for a certificate that lasts longer, for the same key."""

    request: _Request


class Renewed(_Base, frozen=True, tag="renewed"):
    """The answer to Renew."""

    certificate: _Certificate


class ChildDied(_Base, frozen=True, tag="child_died"):
    """A launcher saw one of its children end."""

    rank: _Rank
    cause: _Cause
    """For people; with the child's traceback, if it left one."""
    well: bool = False
    """It ended as it should. That is news only while the cluster forms: it will never come."""


class RunFailed(_Base, frozen=True, tag="run_failed"):
    """A rank failed, and the run stops on all hosts. A launcher reports its child; the seed tells all launchers which
    failure was the first.
    """

    rank: _Rank
    cause: _Line
    """How it ended, for people."""
    code: Annotated[int, Meta(ge=1, le=255)]
    """Exit code of every launcher of this run."""
    consequence: bool = False
    """The rank failed because another one was gone."""
    host: Annotated[str, Meta(max_length=255, pattern=ONE_LINE)] = ""
    """Name of the host where the rank ran."""


class Leave(_Base, frozen=True, tag="leave"):
    """The sender leaves of its own will. The line is closed behind it."""

    reason: _Line = ""


class SeedPaxosMessage(_Base, frozen=True, tag="word"):
    """A member and the seed talk about who comes next, as members do among themselves."""

    body: Annotated[bytes, Meta(min_length=1, max_length=MAX_PAXOS_BYTES)]
    """As `wire.messages` encodes it."""


class MemberDied(_Base, frozen=True, tag="died"):
    """The seed has heard that a member is gone: from its launcher, or because its line broke. A hint, to be checked."""

    node: Node
    epoch: _Epoch
    """Of the membership in which the seed knows it."""
    cause: _Cause


class LivenessQuery(_Base, frozen=True, tag="are_you_there"):
    """Somebody says that the other side of this line is gone, or its vote is needed. Answer with Here of the same
    number.
    """

    number: _Number


class LivenessReply(_Base, frozen=True, tag="here"):
    """The answer to AreYouThere."""

    number: _Number


class WaitingJoiners(_Base, frozen=True, tag="waiting"):
    """All who wait to become members and show their certificates, in the order in which they came."""

    members: Annotated[tuple[_Encoded, ...], Meta(max_length=MAX_RANKS)] = ()
    """Each as `cluster.membership` encodes a member."""


class WatchStatus(_Base, frozen=True, tag="watch"):
    """Somebody wants to see the board, and nothing else."""

    proof: _Proof


class StatusPageRequest(_Base, frozen=True, tag="look"):
    """A onlooker asks for a page of the board: the rows from this one on."""

    first: _Number = 0


class StatusPageReply(_Base, frozen=True, tag="shown"):
    """The answer to Watch and Look."""

    board: StatusPage


class StatusUpdate(_Base, frozen=True, tag="news"):
    """What a member does. Nobody answers; the newest one counts."""

    body: Annotated[bytes, Meta(max_length=MAX_STATUS_BYTES)]
    """As `wire.bulletin` encodes it."""


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
    """The body of a CONTROL frame on the join line.

    HandshakeError if it is larger than the other side will read at that point of the conversation.
    """
    limit = MAX_UNVERIFIED_BYTES if isinstance(message, _FROM_UNVERIFIED) else MAX_JOIN_BYTES
    return add_prefix(_encoder.encode(message), limit, version)


def decode_join(body: bytes | bytearray | memoryview, limit: int) -> JoinMessage:
    """The message in a CONTROL frame of the join line, if it has at most `limit` bytes.

    `limit` is MAX_STRANGER_BYTES until the sender has proven itself, MAX_JOIN_BYTES afterwards. VersionMismatch names
    both versions; HandshakeError for bytes that are no message, and for a message that says what cannot be.
    """
    content = strip_prefix(body, limit)
    try:
        return _decoder.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HandshakeError(f"not a join message: {error}") from None
