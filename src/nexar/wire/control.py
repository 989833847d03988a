"""Control messages: what the bodies of CONTROL frames mean.

A message is a tagged struct in MessagePack. A tag is the wire format: never reuse one. New messages are added to
`Message`; an older node that meets a tag it does not know gets `Unknown`, drops and counts it, and lives on. Fields
may be added with a default; an older node ignores those it does not know.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias, Union

import msgspec
from msgspec import Meta

MAX_MESSAGE_BYTES: Final = 1 << 20
MAX_CAUSE_CHARACTERS: Final = 4096
"""Of why a node is gone: with its traceback, if it left one."""

MAX_VALUE_BYTES: Final = MAX_MESSAGE_BYTES - (4 << 10)
"""Of a value that is agreed on, so that every message of a ballot that carries it can be sent."""

MAX_NAMED: Final = 4096
"""Members that one message names: as many as a cluster may have. A sender can choose integers for which a dict or a set
takes quadratic time to build: as many as a message has room for take 6 s, this many 10 ms."""

Cause: TypeAlias = Annotated[str, Meta(max_length=MAX_CAUSE_CHARACTERS)]
Value: TypeAlias = Annotated[bytes, Meta(max_length=MAX_VALUE_BYTES)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e12)]
"""Never NaN or infinite: whoever shows it can turn it into a whole number."""
Instance: TypeAlias = tuple[int, int, int]
"""What is agreed on: communicator, generation, sequence. Sequence 0 of communicator 0 chooses who comes after the
membership whose epoch is the generation."""


class MessageError(ValueError):
    """Bytes that are not a control message: the peer broke the protocol."""


class _Base(msgspec.Struct, frozen=True, tag_field="type", omit_defaults=True):
    """What all messages share."""


class Ping(_Base, frozen=True, tag="ping"):
    """Answer with a Pong of the same number."""

    number: int


class Pong(_Base, frozen=True, tag="pong"):
    """The answer to a Ping."""

    number: int


class Goodbye(_Base, frozen=True, tag="goodbye"):
    """The sender leaves, and says why; with its traceback if it raised."""

    reason: str
    traceback: str | None = None


class Introduce(_Base, frozen=True, tag="introduce"):
    """The first word of who dialed: the place it holds, in which membership. Who it is, the handshake has proven."""

    rank: int
    epoch: int
    sidecar: bool = False
    """This connection is to carry large payloads beside the link that we have."""
    number: int = 1
    """Which link of the two it is to be: higher than 1 after one was lost."""
    death_line: bool = False
    """This connection carries nothing: its end is the news that the dialer's process has ended."""


class Introduced(_Base, frozen=True, tag="introduced"):
    """The answer to Introduce: the place of who was dialed. From now on the connection is a link."""

    rank: int
    epoch: int
    shared_memory: str = ""
    """Where the dialer, and nobody else, may connect through memory; empty: nowhere."""
    sidecar: str = ""
    """The scheme of the connection for large payloads that the dialer may open; empty: none."""


class Declined(_Base, frozen=True, tag="declined"):
    """The other answer to Introduce. The connection is closed behind it."""

    reason: str
    superseded: bool = False
    """Nothing is wrong: the answerer's own dial to the same peer has won."""
    expelled: int = 0
    """The dialer was a member until this epoch, when the others went on without it; 0: that is not the reason."""


class CallMismatch(_Base, frozen=True, tag="disagreed"):
    """Ranks called different things as one collective: all raise, and the communicator is revoked.

    Who hears it first passes it on, once, along its own links: so it needs no link that is not there.
    """

    communicator: int
    generation: int
    sequence: int
    calls: Annotated[dict[int, tuple[int, int, int, int, int, int]], Meta(max_length=MAX_NAMED)]
    """By rank, so far as is known: operation, dtype, count, root, reduce op, way."""


class Blamed(msgspec.Struct, frozen=True, array_like=True):
    """Whom somebody waited for in vain."""

    rank: int
    missing: str = ""
    last_operation: str | None = None
    last_heard: Seconds | None = None
    current_operation: str | None = None


class CallAborted(_Base, frozen=True, tag="gave_up"):
    """A rank left a collective without its result, so nobody can have it. Passed on like Disagreed."""

    communicator: int
    generation: int
    sequence: int
    rank: int
    reason: str
    timeout: Seconds = 0.0
    """Seconds, if it did not want to wait any longer."""
    culprits: tuple[Blamed, ...] = ()
    """Whose fault it was, if not its own."""
    closed: bool = False
    """Its user has closed the communicator: it takes no part in this call, nor in any after it."""


class ProgressQuery(_Base, frozen=True, tag="inquire"):
    """How far are you in this collective? Answer with a Report of the same number; 0 wants no answer. A sequence below
    0 is no collective's: what do you do at all?
    """

    communicator: int
    generation: int
    sequence: int
    number: int = 0
    call: tuple[int, int, int, int, int, int] = (0, 0, 0, 0, 0, 0)
    """What the collective is for who asks, as in Disagreed: the two may never exchange a frame that would tell."""


class ProgressReply(_Base, frozen=True, tag="report"):
    """The answer to Inquire."""

    communicator: int
    generation: int
    number: int
    rank: int
    state: Literal["absent", "in", "done", "failed"]
    """Of the collective that was asked for. Absent: not called yet."""
    step: int = 0
    progress_age: Seconds = 0.0
    """Seconds since its last step, for one that is in it."""
    doing: str = ""
    """Another collective that it is in."""
    finished: str | None = None
    """The last one that it finished."""
    since: Seconds = 0.0
    """Seconds since it began what it is doing; or since it finished that last one, if it is in none."""


class CurrentCall(msgspec.Struct, frozen=True, array_like=True):
    """A call that a node is in."""

    communicator: int
    operation: str
    sequence: int
    step: int = 0
    age: Seconds = 0.0
    """Seconds since its last step."""


class Beat(_Base, frozen=True, tag="beat"):
    """I am alive, and this is what I do. Who is behind by its epoch is told what was chosen since."""

    epoch: int
    doing: tuple[CurrentCall, ...] = ()
    finished: str = ""
    """The last call that it finished."""


class Suspect(_Base, frozen=True, tag="suspect"):
    """The sender cannot reach a node. A hint: who hears it looks for itself. Also sent on to the suspect, who then
    tries to reach the complainer.
    """

    epoch: int
    node: int
    by: int
    cause: Cause


class BallotNumber(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Of a ballot: higher ones win; no two nodes have the same."""

    round: int
    node: int


class Prepare(_Base, frozen=True, tag="prepare"):
    """A proposer asks the voters to promise that they ignore lower ballots."""

    instance: Instance
    ballot: BallotNumber


class Promise(_Base, frozen=True, tag="promise"):
    """The answer to Prepare, with what the voter had accepted in the highest ballot so far."""

    instance: Instance
    ballot: BallotNumber
    accepted: BallotNumber | None = None
    value: Value = b""


class Accept(_Base, frozen=True, tag="accept"):
    """A proposer that has a majority of promises asks the voters to accept this value."""

    instance: Instance
    ballot: BallotNumber
    value: Value
    inherited: bool = False
    """The proposer found it in the promises: it may have been chosen already, so no other can be."""


class Accepted(_Base, frozen=True, tag="accepted"):
    """The answer to Accept. A value that a majority has accepted in one ballot is chosen, for ever."""

    instance: Instance
    ballot: BallotNumber


class Rejected(_Base, frozen=True, tag="rejected"):
    """The other answer to Prepare and Accept: a higher ballot was promised, or the value removes who can be reached."""

    instance: Instance
    ballot: BallotNumber
    promised: BallotNumber | None = None
    reachable: Annotated[tuple[int, ...], Meta(max_length=MAX_NAMED)] = ()
    """Nodes that the value removes although the voter reaches them."""


class Chosen(_Base, frozen=True, tag="chosen"):
    """What was chosen, from who knows it."""

    instance: Instance
    value: Value


class Revoke(_Base, frozen=True, tag="revoke"):
    """A rank has declared this communicator over: every call on it raises. Passed on like Disagreed."""

    communicator: int
    generation: int
    rank: int
    reason: Cause
    closed: bool = False
    """It has only closed it, and takes no part in a successor. Not passed on."""


class StateOffer(_Base, frozen=True, tag="offer"):
    """A member has the application's state for the hearer, who waits to become one: it comes on this communicator,
    which has the two as members, the speaker first.
    """

    communicator: int
    generation: int


class CommunicatorClosed(_Base, frozen=True, tag="unheard"):
    """A remote call found nobody: its communicator is closed on this node."""

    communicator: int
    """The number under which its calls travel."""
    generation: int
    number: int
    """Of the call."""


class Unknown(msgspec.Struct, frozen=True):
    """A message of a kind that this version does not know. Drop and count it."""

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
    """The body of a CONTROL frame. MessageError if it is too large to be sent."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"a message of {len(data)} bytes; allowed are {MAX_MESSAGE_BYTES}")
    return data


def decode(body: bytes | bytearray | memoryview) -> Message | Unknown:
    """The message in a CONTROL frame. MessageError for bytes that are none."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise MessageError(f"a message of {len(body)} bytes; allowed are {MAX_MESSAGE_BYTES}")
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return _unknown(body, error)


def _unknown(body: bytes | bytearray | memoryview, cause: Exception) -> Unknown:
    """A tag of the future is no error; a known message that is malformed is one."""
    try:
        found = _type_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise MessageError(f"not a control message: {cause}") from None
    if found.type in _TAGS:
        raise MessageError(f"a malformed {found.type}: {cause}") from None
    return found
