"""What this node tells the seed of itself, once a second: off the way of calls, from what they count anyway."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from time import monotonic
from typing import Any, Protocol

from nexar.cluster.membership import Membership
from nexar.collectives.entry import Entry
from nexar.collectives.journal import Journal
from nexar.collectives.lateness import Straggler
from nexar.types import NodeId
from nexar.wire.bulletin import MAX_AWAITED, MAX_LATE, MAX_PEERS, Bulletin, Late, Traffic, line


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
        **_doing(journals),
        calls=sum(calls for calls, *_ in totals),
        call_bytes=sum(size_bytes for _, size_bytes, *_ in totals),
        errors=sum(errors for _, _, errors, _ in totals),
        seconds_waiting=sum((waiting for *_, waiting in totals), 0.0),
        messages_sent=_sum(traffic.values(), "messages_sent"),
        messages_received=_sum(traffic.values(), "messages_received"),
        bytes_sent=_sum(traffic.values(), "bytes_sent"),
        bytes_received=_sum(traffic.values(), "bytes_received"),
        peers=_peers(membership, links, traffic),
        late=tuple(_late(each) for each in journals[0].stragglers()[:MAX_LATE]) if journals else (),
    )


def _late(each: Straggler) -> Late:
    return Late(each.rank, each.mean_lateness, each.worst, each.times_last, min(1.0, each.share))  # sums of floats


def _sum(counted: Iterable[Mapping[str, Any]], name: str) -> int:
    return sum(int(each[name]) for each in counted)


def _doing(journals: list[Journal]) -> dict[str, Any]:
    """The call that has been in flight for longest, and the last that went well."""
    now = monotonic()
    calls = [entry for journal in journals for entry in journal.in_flight()]
    found: dict[str, Any] = {}
    longest = min(calls, key=lambda entry: entry.began, default=None)
    if longest is not None:
        found = {
            "operation": line(longest.name),
            "began": max(0.0, now - longest.began),
            "moved": max(0.0, now - longest.moved_at),
            "waiting_for": _awaited(longest),
        }
    ended = [last for journal in journals if (last := journal.last_finished) is not None]
    if ended:
        name, when = max(ended, key=lambda last: last[1])
        found |= {"finished": line(name), "finished_ago": max(0.0, now - when)}
    return found


def _awaited(entry: Entry) -> tuple[int, ...]:
    return tuple(sorted(entry.waiting_for()))[:MAX_AWAITED]


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
