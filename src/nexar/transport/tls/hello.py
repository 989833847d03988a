"""The first frame each side sends on a connection, inside TLS: which half of which carrier this is.

The dialer draws a token and shows it on both connections; the listener answers each with the same, or with the reason
why not. Only with that answer does the dialer know that its certificate was believed: in TLS 1.3 its own handshake is
over before the other side has looked. It welcomes neither before it has both, so a dial that succeeded is a carrier at
the listener too, however late one of the two came.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from nexar.transport.foreign_text import one_line
from nexar.wire.frame import Frame, Kind, encode

TOKEN_BYTES: Final = 16
MAX_HELLO_BYTES: Final = 512
"""Of its body. A stranger's hello commits no more memory than this."""
_LAYOUT: Final = struct.Struct(f"<BBBx{TOKEN_BYTES}s")


class Half(IntEnum):
    """Which of a carrier's connections."""

    CONTROL = 0
    DATA = 1


class Verdict(IntEnum):
    """What the listener says. The dialer's own hello says WELCOME, for want of anything to refuse."""

    WELCOME = 0
    REFUSED = 1
    NOT_BELIEVED = 2  # refused for what the certificate says


class HelloError(ValueError):
    """A first frame that is none."""


@dataclass(frozen=True, slots=True)
class Hello:
    """See the module."""

    half: Half
    token: bytes
    plain: bool
    """The sender means to go on without encryption."""
    verdict: Verdict = Verdict.WELCOME
    reason: str = ""


def encode_hello(hello: Hello) -> bytes:
    """The whole frame."""
    reason = hello.reason.encode()[: MAX_HELLO_BYTES - _LAYOUT.size]
    body = _LAYOUT.pack(hello.half, hello.verdict, hello.plain, hello.token) + reason
    return encode(Frame(kind=Kind.HELLO, body=len(body))) + body


def decode_hello(frame: Frame, body: bytes | memoryview) -> Hello:
    """Raises HelloError."""
    if frame.kind != Kind.HELLO or not _LAYOUT.size <= len(body) <= MAX_HELLO_BYTES:
        raise HelloError(f"the first frame is of kind {frame.kind} with {len(body)} bytes, not a hello")
    half, verdict, plain, token = _LAYOUT.unpack_from(body)
    reason = one_line(bytes(body[_LAYOUT.size :]).decode(errors="replace"))
    try:
        return Hello(Half(half), token, bool(plain), Verdict(verdict), reason)
    except ValueError as error:
        raise HelloError(f"a hello that means nothing: {error}") from error
