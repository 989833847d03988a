"""Small values that several packages share.

A *node* is a process: its id never changes. A *rank* is a position in one membership. Code that must survive a
membership change keeps node ids; messages to the user name ranks.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

NodeId: TypeAlias = int
"""An unsigned 64-bit number; 0: not known yet."""

Rank: TypeAlias = int
"""0 .. size-1 in one membership."""

UNKNOWN_NODE: NodeId = 0
MAX_NODE: NodeId = 2**64 - 1

ANY_SOURCE: Rank = -1
"""Receive from any rank."""

ANY_TAG: int = -1
"""Receive any tag."""


def whole(number: Any) -> int | None:
    """The user's value as an int (NumPy integers too), or None."""
    try:
        return operator.index(number)
    except TypeError:
        return None


def real(number: Any) -> float | None:
    """The user's value as a float (NumPy numbers too), or None."""
    return float(number) if isinstance(number, Real) else None


def format_node(node: NodeId) -> str:
    """16 hexadecimal digits: the form in logs, certificates and errors."""
    if not 0 <= node <= MAX_NODE:
        raise ValueError(f"node id {node} is outside 0..2**64-1")
    return f"{node:016x}"


def parse_node(text: str) -> NodeId:
    """The reverse of `format_node`; ValueError for any other text."""
    if len(text) != 16 or not set(text) <= set("0123456789abcdef"):
        raise ValueError(f"{text!r} is not a node id: 16 lower-case hexadecimal digits")
    return int(text, 16)


def describe_peer(rank: Rank | None, node: NodeId | None = None, address: str | None = None) -> str:
    """`rank 3 (node 00…2a at 10.0.0.7:4000)`, with what is known."""
    known_node = f"node {format_node(node)}" if node else ""
    place = f"at {address}" if address else ""
    details = " ".join(part for part in (known_node, place) if part)
    if rank is None:
        return details if known_node else f"a peer {place}".strip() if place else "an unknown peer"
    return f"rank {rank} ({details})" if details else f"rank {rank}"


def describe_package(point: EntryPoint) -> str:
    """The entry point's package, or the location of its object."""
    return f"the package {point.dist.name!r}" if point.dist is not None else f"the package that has {point.value!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitedPeer:
    """A peer that an operation waited for in vain. Without any facts: any rank."""

    rank: Rank | None = None
    node: NodeId | None = None
    address: str | None = None
    host: str | None = None
    """Its host id, as in `comm.host`."""
    missing: str = ""
    """What it has not done, as a noun: "a receive with tag 7"."""
    last_heard: float | None = None
    """Seconds before the error was raised."""
    last_operation: str | None = None
    """The last operation it is known to have finished."""
    current_operation: str | None = None
    """What it reported: "scan #3", "user code for 12 s". None: it did not answer, or was not asked."""

    def __str__(self) -> str:
        anybody = self.rank is None and not self.node and not self.address
        facts = ["any rank" if anybody else describe_peer(self.rank, self.node, self.address)]
        if self.host is not None:
            facts.append(f"host {self.host}")
        if self.missing:
            facts.append(f"missing {self.missing}")
        if self.last_heard is not None:
            facts.append(f"last heard {format_seconds(self.last_heard)} ago")
        if self.last_operation is not None:
            facts.append(f"last finished {self.last_operation}")
        if self.current_operation is not None:
            facts.append(f"it is in {self.current_operation}")
        return ", ".join(facts)


def format_seconds(seconds: float) -> str:
    """`30 s`, `2.5 s`, `40 ms`."""
    millis = round(seconds * 1000, 3 if seconds < 0.001 else 1)
    if 0 < millis < 999.5:
        return f"{millis:.3g} ms"
    return f"{seconds:.1f}".removesuffix(".0") + " s"
