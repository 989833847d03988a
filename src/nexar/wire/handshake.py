"""The first thing each side says: which protocol it speaks, who it is, what it can.

Law: the version comes first and is read before anything else, so two versions that understand nothing of each other
still find out that this is the reason. It therefore stands outside the encoding that may change: two bytes of magic,
two of version, then a MessagePack struct that only nodes of this version interpret. A peer whose frames are of another
version never gets so far: its first header is refused with FrameError, field "version", which names it as well.
"""

from __future__ import annotations

import struct
from typing import Final, Literal, TypeAlias

import msgspec

from nexar.errors import VersionMismatch

PROTOCOL_VERSION: Final = 1
MAX_HELLO_BYTES: Final = 4 << 10
"""All that a stranger may say before it has authenticated."""

_PREFIX: Final = struct.Struct("<2sH")
_MAGIC: Final = b"nx"

Role: TypeAlias = Literal["member", "candidate", "seed", "launcher"]


class HandshakeError(ValueError):
    """Bytes that are not a hello."""


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """Who dials, or answers."""

    node: int
    role: Role
    capabilities: frozenset[str] = frozenset()
    """Transports, native package, features. Each pair uses what both have."""
    token: bytes = b""
    """Names the carrier this connection belongs to, where one carrier has several; empty for the first."""

    def common(self, other: Hello) -> frozenset[str]:
        """What both sides can do."""
        return self.capabilities & other.capabilities


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Hello)


def encode_hello(hello: Hello, version: int = PROTOCOL_VERSION) -> bytes:
    """The body of a HELLO frame. HandshakeError if it is larger than a stranger may send."""
    data = _PREFIX.pack(_MAGIC, version) + _encoder.encode(hello)
    if len(data) > MAX_HELLO_BYTES:
        raise HandshakeError(f"a hello of {len(data)} bytes; allowed are {MAX_HELLO_BYTES}")
    return data


def version_of(body: bytes | bytearray | memoryview) -> int:
    """The protocol version that the sender of this hello speaks, whatever the rest of it means."""
    if not _PREFIX.size <= len(body) <= MAX_HELLO_BYTES:
        raise HandshakeError(f"a hello of {len(body)} bytes; allowed are {_PREFIX.size} to {MAX_HELLO_BYTES}")
    magic, version = _PREFIX.unpack_from(body)
    if magic != _MAGIC:
        raise HandshakeError("not a hello of nexar")
    return int(version)


def decode_hello(body: bytes | bytearray | memoryview) -> Hello:
    """The hello. VersionMismatch names both versions; HandshakeError for bytes that are none."""
    version = version_of(body)
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(ours=PROTOCOL_VERSION, theirs=version)
    try:
        hello = _decoder.decode(memoryview(body)[_PREFIX.size :])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HandshakeError(f"a malformed hello: {error}") from None
    if not 0 <= hello.node < 1 << 64:
        raise HandshakeError(f"a hello of node {hello.node}; allowed are 64 bits")
    return hello
