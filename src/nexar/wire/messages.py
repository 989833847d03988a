"""Control messages: what the bodies of CONTROL frames mean.

A message is a tagged struct in MessagePack. A tag is the wire format: never reuse one. New messages are added to
`Message`; an older node that meets a tag it does not know gets `Unknown`, drops and counts it, and lives on. Fields
may be added with a default; an older node ignores those it does not know.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, Union

import msgspec

MAX_MESSAGE_BYTES: Final = 1 << 20


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


class Disagreed(_Base, frozen=True, tag="disagreed"):
    """Ranks called different things as one collective: all raise, and the communicator is revoked.

    Who hears it first passes it on, once, along its own links: so it needs no link that is not there.
    """

    communicator: int
    generation: int
    sequence: int
    calls: dict[int, tuple[int, int, int, int, int]]
    """By rank, so far as is known: operation, dtype, count, root, reduce op."""


class Culprit(msgspec.Struct, frozen=True, array_like=True):
    """Whom somebody waited for in vain."""

    rank: int
    missing: str = ""
    last_operation: str | None = None
    last_heard: float | None = None


class GaveUp(_Base, frozen=True, tag="gave_up"):
    """A rank left a collective without its result, so nobody can have it. Passed on like Disagreed."""

    communicator: int
    generation: int
    sequence: int
    rank: int
    reason: str
    timeout: float = 0.0
    """Seconds, if it did not want to wait any longer."""
    culprits: tuple[Culprit, ...] = ()
    """Whose fault it was, if not its own."""


class Inquire(_Base, frozen=True, tag="inquire"):
    """How far are you in this collective? Answer with a Report of the same number; 0 wants no answer."""

    communicator: int
    generation: int
    sequence: int
    number: int = 0
    call: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    """What the collective is for who asks, as in Disagreed: the two may never exchange a frame that would tell."""


class Report(_Base, frozen=True, tag="report"):
    """The answer to Inquire."""

    communicator: int
    generation: int
    number: int
    rank: int
    state: Literal["absent", "in", "done", "failed"]
    """Of the collective that was asked for. Absent: not called yet."""
    step: int = 0
    progress_age: float = 0.0
    """Seconds since its last step, for one that is in it."""
    doing: str = ""
    """Another collective that it is in."""
    finished: str | None = None
    """The last one that it finished."""


class Unknown(msgspec.Struct, frozen=True):
    """A message of a kind that this version does not know. Drop and count it."""

    type: str


Message: TypeAlias = Union[  # noqa: UP007 - msgspec reads it at run time
    Ping, Pong, Goodbye, Introduce, Introduced, Declined, Disagreed, GaveUp, Inquire, Report
]
KNOWN: Final[tuple[type[Message], ...]] = (
    Ping, Pong, Goodbye, Introduce, Introduced, Declined, Disagreed, GaveUp, Inquire, Report,
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
