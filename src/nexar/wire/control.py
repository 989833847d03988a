"""Control messages: the bodies of CONTROL frames, as tagged MessagePack structs.

Never reuse a tag. Add new messages to `Message`. New fields need a default: an older node ignores them.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias, Union

import msgspec
from msgspec import Meta

MAX_MESSAGE_BYTES: Final = 1 << 20
MAX_CAUSE_CHARACTERS: Final = 4096  # why a node is gone, including its traceback if it left one

MAX_VALUE_BYTES: Final = MAX_MESSAGE_BYTES - (4 << 10)  # Leaves room for every Paxos message that carries the value.

# Members that one message may name: as many as a cluster may have. A sender can choose integers for which building a
# dict or set takes quadratic time: 6 s for as many as fit into a message, 10 ms for this many.
MAX_NAMED: Final = 4096

Cause: TypeAlias = Annotated[str, Meta(max_length=MAX_CAUSE_CHARACTERS)]
Value: TypeAlias = Annotated[bytes, Meta(max_length=MAX_VALUE_BYTES)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e12)]  # never NaN or infinite, so it converts to an int
# Communicator, generation, sequence. Sequence 0 of communicator 0 decides the membership that follows the one whose
# epoch is the generation.
Instance: TypeAlias = tuple[int, int, int]


class MessageError(ValueError):
    """The peer sent bytes that are not a control message."""


class _Base(msgspec.Struct, frozen=True, tag_field="type", omit_defaults=True): ...


class Ping(_Base, frozen=True, tag="ping"):
    """Answered by a Pong with the same number."""

    number: int


class Pong(_Base, frozen=True, tag="pong"):
    """Answer to Ping."""

    number: int


class Goodbye(_Base, frozen=True, tag="goodbye"):
    """The sender leaves, with the reason and a traceback if it raised."""

    reason: str
    traceback: str | None = None


class Introduce(_Base, frozen=True, tag="introduce"):
    """First message of the dialer, whose identity the handshake has proven."""

    rank: int
    epoch: int
    sidecar: bool = False
    """Bulk channel: this connection carries only large payloads, beside the existing link."""
    number: int = 1
    """Number of the link between the two nodes; higher than 1 after a loss."""
    death_line: bool = False
    """Liveness connection: it carries nothing, and its end means that the dialer's process ended."""


class Introduced(_Base, frozen=True, tag="introduced"):
    """Positive answer to Introduce: the connection is now a link."""

    rank: int
    epoch: int
    shared_memory: str = ""
    """Address at which only the dialer may connect through shared memory; empty if not possible."""
    sidecar: str = ""
    """Scheme of the bulk channel that the dialer may open; empty for none."""


class Declined(_Base, frozen=True, tag="declined"):
    """Negative answer to Introduce; the sender then closes the connection."""

    reason: str
    superseded: bool = False
    """The answerer's own dial to the same peer won; this is not an error."""
    expelled: int = 0
    """Epoch at which the dialer was removed from the membership; 0 if that is not the reason."""


class CallMismatch(_Base, frozen=True, tag="disagreed"):
    """Ranks made different calls for one collective: all raise, and the communicator is revoked.

    Each rank forwards it once on its own links, so delivery depends on no particular link.
    """

    communicator: int
    generation: int
    sequence: int
    calls: Annotated[dict[int, tuple[int, int, int, int, int, int]], Meta(max_length=MAX_NAMED)]
    """By rank, as far as known: operation, dtype, count, root, reduce op, algorithm."""


class Blamed(msgspec.Struct, frozen=True, array_like=True):
    """A rank that another one waited for."""

    rank: int
    missing: str = ""
    last_operation: str | None = None
    last_heard: Seconds | None = None
    current_operation: str | None = None


class CallAborted(_Base, frozen=True, tag="gave_up"):
    """A rank left a collective, so no rank can complete it. Forwarded like CallMismatch."""

    communicator: int
    generation: int
    sequence: int
    rank: int
    reason: str
    timeout: Seconds = 0.0
    """Seconds that the rank waited, if it timed out."""
    culprits: tuple[Blamed, ...] = ()
    """The ranks that caused it, if not the sender."""
    closed: bool = False
    """The rank closed the communicator: it takes no part in this call or a later one."""


class ProgressQuery(_Base, frozen=True, tag="inquire"):
    """Asks for the progress of a collective; with a negative sequence, what the rank does in general. Number 0 wants no
    answer.
    """

    communicator: int
    generation: int
    sequence: int
    number: int = 0
    call: tuple[int, int, int, int, int, int] = (0, 0, 0, 0, 0, 0)
    """Fingerprint of the sender's call, as in CallMismatch: the two ranks may never exchange a data frame that shows
    it.
    """


class ProgressReply(_Base, frozen=True, tag="report"):
    """Answer to ProgressQuery."""

    communicator: int
    generation: int
    number: int
    rank: int
    state: Literal["absent", "in", "done", "failed"]
    """State of the collective in question; absent: not called yet."""
    step: int = 0
    progress_age: Seconds = 0.0
    """Seconds since its last step, if the rank is in it."""
    doing: str = ""
    """Another collective that the rank is in."""
    finished: str | None = None
    """The last collective that the rank finished."""
    since: Seconds = 0.0
    """Seconds since the rank began its current call, or finished its last one if it is in none."""


class CurrentCall(msgspec.Struct, frozen=True, array_like=True):
    """A call that a node is in."""

    communicator: int
    operation: str
    sequence: int
    step: int = 0
    age: Seconds = 0.0
    """Seconds since its last step."""


class Beat(_Base, frozen=True, tag="beat"):
    """A heartbeat; the class has the name of its tag. A receiver with a higher epoch sends back the changes that the
    sender missed.
    """

    epoch: int
    doing: tuple[CurrentCall, ...] = ()
    finished: str = ""
    """The last call that the sender finished."""


class Suspect(_Base, frozen=True, tag="suspect"):
    """The node `by` cannot reach `node`. A hint: the receiver probes by itself; the suspect tries to reach `by`."""

    epoch: int
    node: int
    by: int
    cause: Cause


class BallotNumber(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Paxos ballot number, unique to its proposer."""

    round: int
    node: int


class Prepare(_Base, frozen=True, tag="prepare"):
    """Asks an acceptor to promise to ignore lower ballots."""

    instance: Instance
    ballot: BallotNumber


class Promise(_Base, frozen=True, tag="promise"):
    """Answer to Prepare, with the value accepted in the highest ballot."""

    instance: Instance
    ballot: BallotNumber
    accepted: BallotNumber | None = None
    value: Value = b""


class Accept(_Base, frozen=True, tag="accept"):
    """Asks an acceptor to accept this value; a quorum has promised."""

    instance: Instance
    ballot: BallotNumber
    value: Value
    inherited: bool = False
    """The value comes from a promise: it may be chosen already, so no other value can be."""


class Accepted(_Base, frozen=True, tag="accepted"):
    """Answer to Accept. A value that a quorum accepts in one ballot is chosen."""

    instance: Instance
    ballot: BallotNumber


class Rejected(_Base, frozen=True, tag="rejected"):
    """Negative answer to Prepare and Accept: a higher ballot was promised, or the value removes a reachable node."""

    instance: Instance
    ballot: BallotNumber
    promised: BallotNumber | None = None
    reachable: Annotated[tuple[int, ...], Meta(max_length=MAX_NAMED)] = ()
    """Nodes that the value removes although the acceptor reaches them."""


class Chosen(_Base, frozen=True, tag="chosen"):
    """The chosen value."""

    instance: Instance
    value: Value


class Revoke(_Base, frozen=True, tag="revoke"):
    """A rank revokes this generation: every call raises. Forwarded like CallMismatch."""

    communicator: int
    generation: int
    rank: int
    reason: Cause
    closed: bool = False
    """The rank only closed its own side and takes no part in a successor. Not forwarded."""


class StateOffer(_Base, frozen=True, tag="offer"):
    """A member offers a joiner the application's state, on this communicator (ranks: sender, receiver)."""

    communicator: int
    generation: int


class CommunicatorClosed(_Base, frozen=True, tag="unheard"):
    """Answer to a remote call whose communicator is closed on this node."""

    communicator: int
    """The id that the communicator's remote calls use."""
    generation: int
    number: int
    """The number of the call."""


class Unknown(msgspec.Struct, frozen=True):
    """A message of a newer node: drop and count it."""

    type: str


Message: TypeAlias = Union[  # noqa: UP007 - msgspec reads it at run time
    Ping, Pong, Goodbye, Introduce, Introduced, Declined, CallMismatch, CallAborted, ProgressQuery, ProgressReply,
    Beat, Suspect, Prepare, Promise, Accept, Accepted, Rejected, Chosen, Revoke, StateOffer, CommunicatorClosed,
]  # fmt: skip
KNOWN: Final[tuple[type[Message], ...]] = (
    Ping, Pong, Goodbye, Introduce, Introduced, Declined, CallMismatch, CallAborted, ProgressQuery, ProgressReply,
    Beat, Suspect, Prepare, Promise, Accept, Accepted, Rejected, Chosen, Revoke, StateOffer, CommunicatorClosed,
)  # fmt: skip

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final[msgspec.msgpack.Decoder[Message]] = msgspec.msgpack.Decoder(Message)
_type_decoder: Final = msgspec.msgpack.Decoder(Unknown)
_TAGS: Final = frozenset(str(message.__struct_config__.tag) for message in KNOWN)


def encode(message: Message) -> bytes:
    """Return the body of a CONTROL frame. Raise MessageError if it is too large."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"a message of {len(data)} bytes; allowed are {MAX_MESSAGE_BYTES}")
    return data


def decode(body: bytes | bytearray | memoryview) -> Message | Unknown:
    """Return the message. Raise MessageError for invalid bytes."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise MessageError(f"a message of {len(body)} bytes; allowed are {MAX_MESSAGE_BYTES}")
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return _unknown(body, error)


def _unknown(body: bytes | bytearray | memoryview, cause: Exception) -> Unknown:
    """Return `Unknown`, or raise MessageError if the tag is known."""
    try:
        found = _type_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise MessageError(f"not a control message: {cause}") from None
    if found.type in _TAGS:
        raise MessageError(f"a malformed {found.type}: {cause}") from None
    return found
