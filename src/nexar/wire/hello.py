"""The hello, which each side of a connection sends first: protocol version, node id, role, capabilities.

Magic and version precede the MessagePack, also in join messages, so every version detects a mismatch. Another frame
version fails earlier, with a FrameError.
"""

from __future__ import annotations

import struct
from typing import Final, Literal, TypeAlias

import msgspec

from nexar.errors import VersionMismatch
from nexar.security.proof import NONCE_BYTES

PROTOCOL_VERSION: Final = 2
MAX_HELLO_BYTES: Final = 4 << 10  # all that an unauthenticated peer may send in one message
MAX_CAPABILITIES: Final = 64
_MAX_CAPABILITY_CHARACTERS: Final = 64

_PREFIX: Final = struct.Struct("<2sH")
_MAGIC: Final = b"nx"

Role: TypeAlias = Literal["member", "candidate", "seed", "launcher", "onlooker"]


class HandshakeError(ValueError):
    """The bytes are not a valid hello or join message."""


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The dialer or the answerer."""

    node: int
    role: Role
    capabilities: frozenset[str] = frozenset()
    """Names of the schemes that the node has; may name features too. Each pair uses those that both have."""
    nonce: bytes = b""
    """The answer's proof covers it. NONCE_BYTES long for joining roles; otherwise it may be empty."""

    def common(self, other: Hello) -> frozenset[str]:
        return self.capabilities & other.capabilities


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Hello)


def encode_hello(hello: Hello, version: int = PROTOCOL_VERSION) -> bytes:
    """Return the body of a HELLO frame. Raise HandshakeError above MAX_HELLO_BYTES."""
    return add_prefix(_encoder.encode(hello), MAX_HELLO_BYTES, version)


def decode_hello(body: bytes | bytearray | memoryview) -> Hello:
    """Return the hello. Raise VersionMismatch or, for invalid bytes, HandshakeError."""
    content = strip_prefix(body, MAX_HELLO_BYTES)
    try:
        hello = _decoder.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HandshakeError(f"a malformed hello: {error}") from None
    _check(hello)
    return hello


def _check(hello: Hello) -> None:
    if not 0 <= hello.node < 1 << 64:
        raise HandshakeError(f"a hello of node {hello.node}; node ids have 64 bits")
    if len(hello.capabilities) > MAX_CAPABILITIES or max(map(len, hello.capabilities), default=0) > (
        _MAX_CAPABILITY_CHARACTERS
    ):
        raise HandshakeError(
            f"a hello with {len(hello.capabilities)} capabilities; allowed are {MAX_CAPABILITIES} "
            f"of {_MAX_CAPABILITY_CHARACTERS} characters each"
        )
    joins = hello.role in ("candidate", "launcher", "onlooker")
    if len(hello.nonce) != NONCE_BYTES and (hello.nonce or joins):
        raise HandshakeError(f"a hello with a nonce of {len(hello.nonce)} bytes; expected {NONCE_BYTES}")


def add_prefix(content: bytes, limit: int, version: int = PROTOCOL_VERSION) -> bytes:
    """Return the content after magic and version. Raise HandshakeError above `limit` bytes."""
    body = _PREFIX.pack(_MAGIC, version) + content
    if len(body) > limit:
        raise HandshakeError(f"a message of {len(body)} bytes; allowed are {limit}")
    return body


def strip_prefix(body: bytes | bytearray | memoryview, limit: int) -> memoryview:
    """Return the content. Raise VersionMismatch or, for a bad prefix, HandshakeError."""
    version = version_of(body, limit)
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(ours=PROTOCOL_VERSION, theirs=version)
    return memoryview(body)[_PREFIX.size :]


def version_of(body: bytes | bytearray | memoryview, limit: int = MAX_HELLO_BYTES) -> int:
    """Return the sender's protocol version. Raise HandshakeError."""
    if not _PREFIX.size <= len(body) <= limit:
        raise HandshakeError(f"a message of {len(body)} bytes; allowed are {_PREFIX.size} to {limit}")
    magic, version = _PREFIX.unpack_from(body)
    if magic != _MAGIC:
        raise HandshakeError("not a message of nexar")
    return int(version)
