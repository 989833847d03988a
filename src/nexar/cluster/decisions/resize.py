"""Which nodes join and leave at a checkpoint. Pure: every member computes the same result.

Invariants:
- Waiting nodes join while there is room below the maximum, in the order of the lowest rank that knows each. Departures
  make room first.
- Members leave on request, lower ranks first, while the minimum is kept; joiners count for it. The others leave at a
  later checkpoint.
- At least one member stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from nexar.cluster.membership import Departure, Member, Membership
from nexar.types import NodeId
from nexar.wire.control import Cause


class ResizeRequest(msgspec.Struct, frozen=True, array_like=True):
    """One member's request at a checkpoint."""

    waiting: tuple[Member, ...] = ()  # the waiting joiners it knows
    leaving: bool = False  # it wants to leave
    removals: Annotated[dict[NodeId, Cause], Meta(max_length=4096)] = {}  # members it asks to leave, and why
    complaint: str = ""  # why no checkpoint is possible; empty if it is
    # Minimum size by its settings. The value of rank 0 counts: a joiner may have another.
    least: Annotated[int, Meta(ge=0)] = 1
    most: Annotated[int, Meta(ge=0)] = 0  # maximum size, likewise; 0: no limit


class Resize(NamedTuple):
    """The result of a checkpoint."""

    joined: tuple[Member, ...]
    left: tuple[Departure, ...]


def resize(membership: Membership, requests: Sequence[ResizeRequest], *, least: int, most: int) -> Resize:
    """The requests are by rank. `most` 0: no limit."""
    departures = _departures(membership, requests)
    joiners = _joiners(membership, requests)
    room = len(joiners) if not most else max(0, most - membership.size + len(departures))
    joined = joiners[:room]
    spare = membership.size + len(joined) - max(least, 1)
    left = departures[: max(0, min(spare, membership.size - 1))]
    if most:  # a member that must stay makes no room
        joined = joined[: max(0, most - membership.size + len(left))]
    return Resize(tuple(joined), tuple(left))


def _departures(membership: Membership, requests: Sequence[ResizeRequest]) -> list[Departure]:
    causes: dict[NodeId, str] = {}
    for member, request in zip(membership.members, requests, strict=True):
        if request.leaving:
            causes[member.node] = "it wanted to leave"
    for rank, request in enumerate(requests):
        for node, cause in request.removals.items():
            asked = f"rank {rank} asked it to leave"
            causes.setdefault(node, f"{asked}: {cause}" if cause else asked)
    known = [member.node for member in membership.members]
    return [Departure(node, causes[node], willing=True) for node in known if node in causes]


def _joiners(membership: Membership, requests: Iterable[ResizeRequest]) -> list[Member]:
    found: dict[NodeId, Member] = {}
    for request in requests:
        for member in request.waiting:
            if membership.rank_of(member.node) is None:
                found.setdefault(member.node, member)
    return list(found.values())


def encode_resize_request(request: ResizeRequest) -> bytes:
    """For the other members."""
    return msgspec.msgpack.encode(request)


def decode_resize_request(data: bytes) -> ResizeRequest:
    """Raises ValueError."""
    try:
        return msgspec.msgpack.decode(data, type=ResizeRequest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a resize request: {error}") from None
