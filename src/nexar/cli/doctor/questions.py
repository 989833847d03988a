"""What two doctors say to each other: bodies of CONTROL frames on a connection of their own. Pure.

They are not the messages of links: a doctor's connection never becomes one, and a node that is no doctor hangs up at
the first of these.
"""

from __future__ import annotations

from typing import Final, TypeAlias, Union

import msgspec

from nexar.cli.doctor.observations import Finding, Report
from nexar.wire.messages import MAX_MESSAGE_BYTES


class _Base(msgspec.Struct, frozen=True, tag_field="doctor"):
    """What all share; the name of the tag keeps them apart from everybody else's."""


class Ask(_Base, frozen=True, tag="ask"):
    """Answer at once, with the same number."""

    number: int


class Answer(_Base, frozen=True, tag="answer"):
    """The answer to Ask, and what time it is there: seconds since 1970."""

    number: int
    clock: float


class Hand(_Base, frozen=True, tag="hand"):
    """Everything the sender has seen, for rank 0."""

    report: Report


class Conclude(_Base, frozen=True, tag="conclude"):
    """From rank 0, when it has all reports or waits no longer: what is to be changed. Everybody may leave."""

    findings: tuple[Finding, ...]


Said: TypeAlias = Union[Ask, Answer, Hand, Conclude]  # noqa: UP007 - msgspec reads it at run time

_decoder: Final[msgspec.msgpack.Decoder[Said]] = msgspec.msgpack.Decoder(Said)


class NotADoctor(ValueError):
    """Whatever that was, no doctor says it."""


def encode(said: Said) -> bytes:
    """The body of a frame."""
    return msgspec.msgpack.encode(said)


def decode(body: bytes | bytearray | memoryview) -> Said:
    """NotADoctor for anything that `encode` did not write."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise NotADoctor(f"{len(body)} bytes at once")
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise NotADoctor("a message of another kind") from None
