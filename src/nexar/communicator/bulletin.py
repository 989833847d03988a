"""What this node tells the seed of itself, once a second: off the way of calls, from what they count anyway."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from time import monotonic
from typing import Any, Final, Protocol

from nexar.cluster.change import WORLD
from nexar.cluster.membership import Membership
from nexar.collectives.entry import Entry
from nexar.collectives.journal import Journal
from nexar.errors.base import list_ranks
from nexar.types import NodeId, Rank
from nexar.wire.bulletin import MAX_AWAITED, MAX_LATE, MAX_PEERS, Bulletin, Late, Traffic
from nexar.wire.line import line

_FEW: Final = 4  # ranks of a communicator that are worth naming each


class Line(Protocol):
    """What is asked of a link."""

    @property
    def schemes(self) -> tuple[str, ...]: ...
    @property
    def failure(self) -> Exception | None: ...
    def stats(self) -> dict[str, float]: ...


def write_bulletin(
    membership: Membership, me: NodeId, journals: Iterable[Journal], links: Mapping[NodeId, Line]
) -> Bulletin | None:
    """`journals` of its communicators, the world's first. None: this node is no member any more."""
    rank = membership.rank_of(me)
    if rank is None:
        return None
    journals = list(journals)
    totals = [journal.totals() for journal in journals]
    traffic = _traffic(membership, links)
    return Bulletin(
        rank=rank,
        epoch=membership.epoch,
        pid=os.getpid(),
        host=line(socket.gethostname()),
        **_doing(membership, journals),
        calls=sum(calls for calls, *_ in totals),
        call_bytes=sum(size_bytes for _, size_bytes, *_ in totals),
        errors=sum(errors for _, _, errors, _ in totals),
        seconds_waiting=sum((waiting for *_, waiting in totals), 0.0),
        messages_sent=_sum(traffic.values(), "messages_sent"),
        messages_received=_sum(traffic.values(), "messages_received"),
        bytes_sent=_sum(traffic.values(), "bytes_sent"),
        bytes_received=_sum(traffic.values(), "bytes_received"),
        peers=_peers(membership, links, traffic),
        late=_late(membership, journals[0]) if journals else (),
    )


def _late(membership: Membership, journal: Journal) -> tuple[Late, ...]:
    nodes = journal.nodes
    found = ((membership.rank_of(nodes[each.rank]), each) for each in journal.stragglers())
    late = [
        Late(rank, each.mean_lateness, each.worst, each.times_last, min(1.0, each.share))  # a sum of floats
        for rank, each in found
        if rank is not None
    ]
    return tuple(late[:MAX_LATE])


def _sum(counted: Iterable[Mapping[str, Any]], name: str) -> int:
    return sum(int(each[name]) for each in counted)


def _doing(membership: Membership, journals: list[Journal]) -> dict[str, Any]:
    """The call that has been in flight for longest, and the last that went well."""
    now = monotonic()
    calls = [(entry, journal) for journal in journals for entry in journal.in_flight()]
    found: dict[str, Any] = {}
    if calls:
        longest, journal = min(calls, key=lambda call: call[0].began)
        found = {
            "operation": _named(membership, longest.name, journal),
            "began": max(0.0, now - longest.began),
            "moved": max(0.0, now - longest.moved_at),
            "waiting_for": _awaited(membership, longest, journal),
        }
    ended = [(last, journal) for journal in journals if (last := journal.last_finished) is not None]
    if ended:
        (name, when), journal = max(ended, key=lambda each: each[0][1])
        found |= {"finished": _named(membership, name, journal), "finished_ago": max(0.0, now - when)}
    return found


def _named(membership: Membership, call: str, journal: Journal) -> str:
    """`all_reduce #3 of ranks 2, 3`: calls are numbered by each communicator, and the world's needs no name."""
    if journal.communicator == WORLD:
        return line(call)
    ranks = _ranks(membership, journal.nodes)
    return line(f"{call} of {list_ranks(ranks) if len(ranks) <= _FEW else f'{len(ranks)} ranks'}")


def _awaited(membership: Membership, entry: Entry, journal: Journal) -> tuple[Rank, ...]:
    """By their ranks in the world, which are those of the board: those in the communicator are others."""
    nodes = journal.nodes
    return _ranks(membership, (nodes[rank] for rank in entry.waiting_for()))[:MAX_AWAITED]


def _ranks(membership: Membership, nodes: Iterable[NodeId]) -> tuple[Rank, ...]:
    """Of those that are members, in their order."""
    return tuple(sorted(rank for node in nodes if (rank := membership.rank_of(node)) is not None))


def _traffic(membership: Membership, links: Mapping[NodeId, Line]) -> dict[NodeId, dict[str, float]]:
    return {node: link.stats() for node, link in links.items() if membership.rank_of(node) is not None}


def _peers(
    membership: Membership, links: Mapping[NodeId, Line], traffic: Mapping[NodeId, dict[str, float]]
) -> tuple[Traffic, ...]:
    """Those that carried most, by rank."""
    busiest = sorted(traffic, key=lambda node: -traffic[node]["bytes_sent"] - traffic[node]["bytes_received"])
    peers = [
        Traffic(
            rank=rank,
            carriers="+".join(links[node].schemes) if links[node].failure is None else "",
            bytes_sent=int(traffic[node]["bytes_sent"]),
            bytes_received=int(traffic[node]["bytes_received"]),
        )
        for node in busiest[:MAX_PEERS]
        if (rank := membership.rank_of(node)) is not None
    ]
    return tuple(sorted(peers, key=lambda peer: peer.rank))
