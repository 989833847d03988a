"""What a voter has promised and accepted in one instance: all that must outlive it. Pure.

Law: a word that follows from a vote is said only after the vote is kept. A voter that forgets its vote may not vote in
that instance again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

import msgspec

from nexar.types import NodeId
from nexar.wire.messages import Accept, Instance, Number


class Vote(msgspec.Struct, frozen=True, omit_defaults=True):
    """One voter's state in one instance. A change makes another vote."""

    instance: Instance
    promised: Number | None = None
    """Lower ballots are refused."""
    accepted: Number | None = None
    """The highest ballot in which it accepted something."""
    value: bytes = b""
    """What it accepted there."""

    def allows(self, ballot: Number) -> bool:
        """Whether the promise leaves room for this ballot."""
        return self.promised is None or ballot >= self.promised

    def promising(self, ballot: Number) -> Vote:
        """With a promise to ignore lower ballots."""
        return Vote(self.instance, ballot, self.accepted, self.value)

    def accepting(self, ballot: Number, value: bytes) -> Vote:
        """With this value accepted; a promise as well."""
        return Vote(self.instance, ballot, ballot, value)

    def encode(self) -> bytes:
        """Canonical bytes, for the disk."""
        return _encoder.encode(self)

    @staticmethod
    def decode(data: bytes | bytearray | memoryview) -> Vote:
        """The vote that `encode` wrote. ValueError for anything else."""
        try:
            return _decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"not a vote: {error}") from None


class Verdict(Enum):
    """What a voter thinks of a value."""

    OK = "ok"
    LATER = "later"  # it has to look first: no answer now
    NO = "no"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, with its grounds."""

    verdict: Verdict
    reachable: tuple[NodeId, ...] = ()
    """Nodes that the value removes although the voter reaches them."""


OK: Final = Judgement(Verdict.OK)
LATER: Final = Judgement(Verdict.LATER)


def approve(_: Accept) -> Judgement:
    """The judge of those who agree to anything."""
    return OK


_encoder: Final = msgspec.msgpack.Encoder(order="deterministic")
_decoder: Final = msgspec.msgpack.Decoder(Vote)
