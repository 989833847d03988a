"""The first thing each side says: which protocol it speaks, who it is, what it can.

Law: the version comes first and is read before anything else, so two versions that understand nothing of each other
still find out that this is the reason. It therefore stands outside the encoding that may change: two bytes of magic,
two of version, then a MessagePack struct that only nodes of this version interpret. A peer whose frames are of another
version never gets so far: its first header is refused with FrameError, field "version", which names it as well.

Every message of the join line starts with the same prefix (see `joining`): a refusal by a seed of another version is
recognised as one, although nothing else of it can be read.
"""

from __future__ import annotations

import struct
from typing import Final, Literal, TypeAlias

import msgspec

from nexar.errors import VersionMismatch
from nexar.security.proof import NONCE_BYTES

PROTOCOL_VERSION: Final = 2
MAX_HELLO_BYTES: Final = 4 << 10
"""All that a stranger may say before it has authenticated."""
MAX_CAPABILITIES: Final = 64
_MAX_CAPABILITY_CHARACTERS: Final = 64

_PREFIX: Final = struct.Struct("<2sH")
_MAGIC: Final = b"nx"

Role: TypeAlias = Literal["member", "candidate", "seed", "launcher", "onlooker"]


class HandshakeError(ValueError):
    """Bytes that are not what may be said before two nodes know each other: no hello, no join message."""


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """Who dials, or answers."""

    node: int
    role: Role
    capabilities: frozenset[str] = frozenset()
    """Transports, native package, features. Each pair uses what both have."""
    nonce: bytes = b""
    """What the answer's proof must cover. Those who want to join bring NONCE_BYTES; for the others it may be empty."""

    def common(self, other: Hello) -> frozenset[str]:
        """What both sides can do."""
        return self.capabilities & other.capabilities


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Hello)


def encode_hello(hello: Hello, version: int = PROTOCOL_VERSION) -> bytes:
    """The body of a HELLO frame. HandshakeError if it is larger than a stranger may send."""
    return add_prefix(_encoder.encode(hello), MAX_HELLO_BYTES, version)


def decode_hello(body: bytes | bytearray | memoryview) -> Hello:
    """The hello. VersionMismatch names both versions; HandshakeError for bytes that are none."""
    content = strip_prefix(body, MAX_HELLO_BYTES)
    try:
        hello = _decoder.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HandshakeError(f"a malformed hello: {error}") from None
    _check(hello)
    return hello


def _check(hello: Hello) -> None:
    if not 0 <= hello.node < 1 << 64:
        raise HandshakeError(f"a hello of node {hello.node}; allowed are 64 bits")
    if len(hello.capabilities) > MAX_CAPABILITIES or max(map(len, hello.capabilities), default=0) > (
        _MAX_CAPABILITY_CHARACTERS
    ):
        raise HandshakeError(
            f"a hello with {len(hello.capabilities)} capabilities; allowed are {MAX_CAPABILITIES} "
            f"of {_MAX_CAPABILITY_CHARACTERS} characters each"
        )
    joins = hello.role in ("candidate", "launcher", "onlooker")
    if len(hello.nonce) != NONCE_BYTES and (hello.nonce or joins):
        raise HandshakeError(f"a hello with a nonce of {len(hello.nonce)} bytes; it has {NONCE_BYTES}")


def add_prefix(content: bytes, limit: int, version: int = PROTOCOL_VERSION) -> bytes:
    """The content with magic and version in front. HandshakeError if that is more than `limit` bytes."""
    body = _PREFIX.pack(_MAGIC, version) + content
    if len(body) > limit:
        raise HandshakeError(f"a message of {len(body)} bytes; allowed are {limit}")
    return body


def strip_prefix(body: bytes | bytearray | memoryview, limit: int) -> memoryview:
    """What follows the prefix, once it is known to be of our version. VersionMismatch, HandshakeError."""
    version = version_of(body, limit)
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(ours=PROTOCOL_VERSION, theirs=version)
    return memoryview(body)[_PREFIX.size :]


def version_of(body: bytes | bytearray | memoryview, limit: int = MAX_HELLO_BYTES) -> int:
    """The protocol version that the sender speaks, whatever the rest of it means."""
    if not _PREFIX.size <= len(body) <= limit:
        raise HandshakeError(f"a message of {len(body)} bytes; allowed are {_PREFIX.size} to {limit}")
    magic, version = _PREFIX.unpack_from(body)
    if magic != _MAGIC:
        raise HandshakeError("not a message of nexar")
    return int(version)
