"""Small values that several rooms share and no room owns.

A *node* is a process: its id is drawn once and never changes. A *rank* is a place in one membership and may change with
the next one. Code that must survive a membership change keeps node ids; code that talks to the user speaks of ranks.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

NodeId: TypeAlias = int
"""An unsigned 64-bit number; 0 means "not known yet"."""

Rank: TypeAlias = int
"""0 .. size-1 in one membership."""

UNKNOWN_NODE: NodeId = 0
MAX_NODE: NodeId = 2**64 - 1

ANY_SOURCE: Rank = -1
"""Receive from whichever rank comes first."""

ANY_TAG: int = -1
"""Receive whatever tag comes first."""


def whole(number: Any) -> int | None:
    """What the user gave as a whole number (NumPy's count as well); None for anything else."""
    try:
        return operator.index(number)
    except TypeError:
        return None


def real(number: Any) -> float | None:
    """What the user gave as a number (NumPy's count as well); None for anything else."""
    return float(number) if isinstance(number, Real) else None


def format_node(node: NodeId) -> str:
    """Text of a node id, 16 hexadecimal digits: the form in logs, certificates and errors."""
    if not 0 <= node <= MAX_NODE:
        raise ValueError(f"node id {node} is outside 0..2**64-1")
    return f"{node:016x}"


def parse_node(text: str) -> NodeId:
    """The node id that `format_node` wrote; ValueError for any other text."""
    if len(text) != 16 or not set(text) <= set("0123456789abcdef"):
        raise ValueError(f"{text!r} is not a node id: 16 lower-case hexadecimal digits")
    return int(text, 16)


def describe_peer(rank: Rank | None, node: NodeId | None = None, address: str | None = None) -> str:
    """Name a peer by all that is known of it, the rank first: `rank 3 (node 00…2a at 10.0.0.7:4000)`."""
    known_node = f"node {format_node(node)}" if node else ""
    place = f"at {address}" if address else ""
    details = " ".join(part for part in (known_node, place) if part)
    if rank is None:
        return details if known_node else f"a peer {place}".strip() if place else "an unknown peer"
    return f"rank {rank} ({details})" if details else f"rank {rank}"


def describe_package(point: EntryPoint) -> str:
    """Name the package that an entry point belongs to, by the place of its object where nobody knows its name."""
    return f"the package {point.dist.name!r}" if point.dist is not None else f"the package that has {point.value!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitedPeer:
    """Somebody an operation waited for in vain, and the last that was heard of them. Nothing known: anybody will do."""

    rank: Rank | None = None
    node: NodeId | None = None
    address: str | None = None
    host: str | None = None
    """The id of its host, as `comm.host` says it."""
    missing: str = ""
    """What they have not done, as a noun: "a receive with tag 7"."""
    last_heard: float | None = None
    """Seconds before the error was raised."""
    last_operation: str | None = None
    """The last operation they were known to have finished."""
    current_operation: str | None = None
    """Where they said that they are: "scan #3", "user code for 12 s". None: they did not answer, or were not asked."""

    def __str__(self) -> str:
        """One clause of an error message."""
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
    """Text of a duration as people read it: `30 s`, `2.5 s`, `40 ms`."""
    millis = round(seconds * 1000, 3 if seconds < 0.001 else 1)
    if 0 < millis < 999.5:
        return f"{millis:.3g} ms"
    return f"{seconds:.1f}".removesuffix(".0") + " s"
