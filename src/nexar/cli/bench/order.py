"""What a rank is told to measure, what it answers, and both as lines of text. Pure, and of the standard library alone.

The line is JSON, so that ranks of any system can read it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One block of calls."""

    measure: str
    count: int
    dtype: str
    op: str
    root: int
    algorithm: str | None
    warmups: int
    iterations: int
    check: bool
    """Run it once more with known values, and count the elements that are wrong."""

    def line(self) -> bytes:
        """As it is sent."""
        return json.dumps(asdict(self)).encode() + b"\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What one rank found."""

    nanoseconds: tuple[int, ...] = ()
    """Of each call; none from a rank that took no part."""
    wrong: int = 0
    problem: str = ""
    """Why nothing was measured: this system does not have it."""

    def line(self) -> bytes:
        """As it is sent."""
        return json.dumps(asdict(self)).encode() + b"\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first line of a rank: who it is."""

    rank: int
    version: str

    def line(self) -> bytes:
        """As it is sent."""
        return json.dumps(asdict(self)).encode() + b"\n"


def parse_order(line: bytes | str) -> Order:
    """The order of a line."""
    return Order(**json.loads(line))


def parse_reply(line: bytes | str) -> Reply:
    """The reply of a line."""
    facts: dict[str, Any] = json.loads(line)
    return Reply(nanoseconds=tuple(facts["nanoseconds"]), wrong=facts["wrong"], problem=facts["problem"])


def parse_hello(line: bytes | str) -> Hello:
    """The hello of a line."""
    return Hello(**json.loads(line))
