"""Who comes in and who goes at a checkpoint. Pure: every member brings what it knows, and all come to the same answer.

Laws:
- Who waits comes in, in the order in which the lowest rank that knows of it has it, while there is room below the
  maximum. Who leaves makes room first.
- Who wants to go, or is asked to, goes, lower ranks first, while the minimum is kept; joiners count for it. Who has to
  stay for now goes at a later checkpoint.
- Somebody stays.
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
    """What one member brings to a checkpoint."""

    waiting: tuple[Member, ...] = ()
    """Who waits to come in, so far as it knows."""
    leaving: bool = False
    """It wants to go."""
    removals: Annotated[dict[NodeId, Cause], Meta(max_length=4096)] = {}
    """Whom it asks to go, and why."""
    complaint: str = ""
    """Why there can be no checkpoint; empty: there can."""
    least: Annotated[int, Meta(ge=0)] = 1
    """How many members there are at least, by its settings. Those of rank 0 count: a joiner may have others."""
    most: Annotated[int, Meta(ge=0)] = 0
    """How many there are at most, likewise; 0: no limit."""


class Resize(NamedTuple):
    """What is to happen."""

    joined: tuple[Member, ...]
    left: tuple[Departure, ...]


def resize(membership: Membership, wishes: Sequence[ResizeRequest], *, least: int, most: int) -> Resize:
    """What becomes of the wishes of all members, by rank. `most` 0: no limit."""
    departures = _departures(membership, wishes)
    joiners = _joiners(membership, wishes)
    room = len(joiners) if not most else max(0, most - membership.size + len(departures))
    joined = joiners[:room]
    spare = membership.size + len(joined) - max(least, 1)
    left = departures[: max(0, min(spare, membership.size - 1))]
    if most:  # who could not go after all makes no room
        joined = joined[: max(0, most - membership.size + len(left))]
    return Resize(tuple(joined), tuple(left))


def _departures(membership: Membership, wishes: Sequence[ResizeRequest]) -> list[Departure]:
    causes: dict[NodeId, str] = {}
    for member, wish in zip(membership.members, wishes, strict=True):
        if wish.leaving:
            causes[member.node] = "it wanted to leave"
    for rank, wish in enumerate(wishes):
        for node, cause in wish.removals.items():
            asked = f"rank {rank} asked it to leave"
            causes.setdefault(node, f"{asked}: {cause}" if cause else asked)
    known = [member.node for member in membership.members]
    return [Departure(node, causes[node], willing=True) for node in known if node in causes]


def _joiners(membership: Membership, wishes: Iterable[ResizeRequest]) -> list[Member]:
    found: dict[NodeId, Member] = {}
    for wish in wishes:
        for member in wish.waiting:
            if membership.rank_of(member.node) is None:
                found.setdefault(member.node, member)
    return list(found.values())


def encode_resize_request(wish: ResizeRequest) -> bytes:
    """For the other members."""
    return msgspec.msgpack.encode(wish)


def decode_resize_request(data: bytes) -> ResizeRequest:
    """What `encode_wish` wrote. ValueError for anything else."""
    try:
        return msgspec.msgpack.decode(data, type=ResizeRequest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a wish: {error}") from None
