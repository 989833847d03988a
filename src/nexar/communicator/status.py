"""A node's current activity, the health of its peers, and its status report for the seed."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final, Literal, TypeAlias

from nexar.cluster.decisions.failure_detector import PeerLiveness
from nexar.cluster.decisions.refusals import brief
from nexar.cluster.membership import WORLD, Member, Membership
from nexar.collectives.call import Call
from nexar.collectives.call_log import CallLog
from nexar.errors import list_ranks
from nexar.links.link import Link
from nexar.links.progress import Progress
from nexar.transport.registry import capabilities_of
from nexar.types import NodeId, Rank, describe_peer, format_seconds
from nexar.wire.control import CurrentCall
from nexar.wire.status import MAX_AWAITED, MAX_LATE, MAX_PEERS, LateRank, PeerTraffic, StatusReport
from nexar.wire.text import line

# Prefix of the names of nexar's threads: their waits say nothing about user code.
_OWN_THREADS = "nexar-"


class NodeActivity:
    """Tells what a node does when a collective waits for it: a call of another communicator, a wait, or user code. Any
    thread. Takes no lock, so it works on a node that hangs.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._call_logs: dict[CallLog, None] = {}  # of open communicators; changed atomically

    def add(self, call_log: CallLog) -> None:
        self._call_logs[call_log] = None

    def remove(self, call_log: CallLog) -> None:
        self._call_logs.pop(call_log, None)

    def outside_of(self, communicator: int, generation: int) -> tuple[str, float] | None:
        """The oldest activity outside this generation's calls, and its start (time.monotonic); None: user code."""
        others = (each for each in self._call_logs.copy() if each.about != (communicator, generation))
        calls = [
            (f"{entry.name} of communicator {call_log.communicator}", entry.began)
            for call_log in others
            for entry in call_log.in_flight()
        ]
        return min(calls or self._waits(), key=lambda call: call[1], default=None)

    def _waits(self) -> list[tuple[str, float]]:
        ours = {thread.ident for thread in threading.enumerate() if thread.name.startswith(_OWN_THREADS)}
        return [(name, since) for thread, name, since in self._progress.waits() if thread not in ours]


HealthState: TypeAlias = Literal["self", "alive", "stuck", "silent", "lost", "unwatched"]

# Limit for a peer's own text.
_CHARACTERS: Final = 120


@dataclass(frozen=True, slots=True)
class Health:
    """Health of one rank."""

    rank: Rank
    node: NodeId
    state: HealthState
    """"stuck": alive without progress. "silent": nothing received for the heartbeat timeout. "lost": unreachable from
    here; the others are asked whether they reach it. "unwatched": other ranks watch it and reported nothing.
    """
    host: str
    """Id of its host, as in `comm.host`."""
    address: str | None
    """Address at which it listens; None: only within its host."""
    carriers: tuple[str, ...]
    """Current carriers to it: names of transports, such as "shm", or "relay"."""
    last_heard: float | None
    """Seconds since anything was received from it; None: unknown here."""
    doing: str
    """Its longest current call, as `all_reduce #1234 for 12 s`; empty: none or unknown here."""
    last_finished: str
    """The last call it finished, if known here."""
    cause: str = ""
    """Why it is lost."""

    def __str__(self) -> str:
        facts = [f"{describe_peer(self.rank, self.node, self.address)}: {self.state}"]
        if self.cause:
            facts.append(self.cause)
        if self.doing:
            facts.append(f"in {self.doing}")
        if self.last_finished:
            facts.append(f"last finished {self.last_finished}")
        if self.last_heard is not None and self.state != "self":
            facts.append(f"last heard {format_seconds(self.last_heard)} ago")
        return ", ".join(facts)


def health(
    membership: Membership,
    me: NodeId,
    mine: tuple[Sequence[CurrentCall], str],
    *,
    known: Callable[[NodeId], PeerLiveness | None],
    links: Mapping[NodeId, Link],
    suspects: Mapping[NodeId, str],
) -> dict[Rank, Health]:
    """Return the health of all members by rank. `mine`: this node's calls and the last finished one. `known`: the
    heartbeat's view; None: not watched. `suspects`: lost node → cause.
    """

    def of(rank: Rank, member: Member) -> Health:
        if member.node == me:
            doing, finished = mine
            return Health(
                rank, me, "self", member.host, _address(member), (), 0.0, _longest(doing), brief(finished, _CHARACTERS)
            )
        return _of_other(rank, member, known(member.node), links.get(member.node), suspects.get(member.node))

    return {rank: of(rank, member) for rank, member in enumerate(membership.members)}


def _of_other(
    rank: Rank, member: Member, known: PeerLiveness | None, link: Link | None, suspected: str | None
) -> Health:
    heartbeat = None if known is None else known.heartbeat
    return Health(
        rank=rank,
        node=member.node,
        state=_state(known, suspected),
        host=member.host,
        address=_address(member),
        carriers=() if link is None or link.failure is not None else link.schemes,
        last_heard=None if known is None else known.age,
        doing="" if known is None or heartbeat is None else _longest(heartbeat.doing, known.heartbeat_age),
        last_finished="" if heartbeat is None else brief(heartbeat.finished, _CHARACTERS),
        cause=suspected or "",
    )


def _state(known: PeerLiveness | None, suspected: str | None) -> HealthState:
    if suspected is not None:
        return "lost"
    if known is None:
        return "unwatched"
    return "stuck" if known.state == "hung" else known.state


def _longest(doing: Sequence[CurrentCall], since: float = 0.0) -> str:
    """`since`: age of the peer's report."""
    call = max(doing, key=lambda each: each.age, default=None)
    if call is None:
        return ""
    return f"{brief(call.operation, _CHARACTERS)} #{call.sequence} for {format_seconds(call.age + since)}"


def _address(member: Member) -> str | None:
    offered = member.addresses.items()
    found = [places[0] for scheme, places in offered if places and not capabilities_of(scheme).shares_memory]
    return found[0] if found else None


_FEW: Final = 4  # ranks of a communicator that are named individually


def make_status_report(
    membership: Membership, me: NodeId, call_logs: Iterable[CallLog], links: Mapping[NodeId, Link]
) -> StatusReport | None:
    """None if this node is no longer a member. `call_logs`: the world's first."""
    rank = membership.rank_of(me)
    if rank is None:
        return None
    call_logs = list(call_logs)
    totals = [call_log.totals() for call_log in call_logs]
    traffic = _traffic(membership, links)
    return StatusReport(
        rank=rank,
        epoch=membership.epoch,
        pid=os.getpid(),
        host=line(socket.gethostname()),
        **_doing(membership, call_logs),
        calls=sum(calls for calls, *_ in totals),
        call_bytes=sum(size_bytes for _, size_bytes, *_ in totals),
        errors=sum(errors for _, _, errors, _ in totals),
        seconds_waiting=sum((waiting for *_, waiting in totals), 0.0),
        messages_sent=_sum(traffic.values(), "messages_sent"),
        messages_received=_sum(traffic.values(), "messages_received"),
        bytes_sent=_sum(traffic.values(), "bytes_sent"),
        bytes_received=_sum(traffic.values(), "bytes_received"),
        peers=_peers(membership, links, traffic),
        late=_late(membership, call_logs[0]) if call_logs else (),
    )


def _late(membership: Membership, call_log: CallLog) -> tuple[LateRank, ...]:
    nodes = call_log.nodes
    found = ((membership.rank_of(nodes[each.rank]), each) for each in call_log.stragglers())
    late = [
        LateRank(rank, each.mean_lateness, each.worst, each.times_last, min(1.0, each.share))  # a sum of floats
        for rank, each in found
        if rank is not None
    ]
    return tuple(late[:MAX_LATE])


def _sum(counted: Iterable[Mapping[str, Any]], name: str) -> int:
    return sum(int(each[name]) for each in counted)


def _doing(membership: Membership, call_logs: list[CallLog]) -> dict[str, Any]:
    now = monotonic()
    calls = [(entry, call_log) for call_log in call_logs for entry in call_log.in_flight()]
    found: dict[str, Any] = {}
    if calls:
        longest, call_log = min(calls, key=lambda call: call[0].began)
        found = {
            "operation": _named(membership, longest.name, call_log),
            "began": max(0.0, now - longest.began),
            "moved": max(0.0, now - longest.moved_at),
            "waiting_for": _awaited(membership, longest, call_log),
        }
    ended = [(last, call_log) for call_log in call_logs if (last := call_log.last_finished) is not None]
    if ended:
        (name, when), call_log = max(ended, key=lambda each: each[0][1])
        found |= {"finished": _named(membership, name, call_log), "finished_ago": max(0.0, now - when)}
    return found


def _named(membership: Membership, call: str, call_log: CallLog) -> str:
    """Names the ranks unless it is the world's: each communicator numbers its own calls."""
    if call_log.communicator == WORLD:
        return line(call)
    ranks = _ranks(membership, call_log.nodes)
    return line(f"{call} of {list_ranks(ranks) if len(ranks) <= _FEW else f'{len(ranks)} ranks'}")


def _awaited(membership: Membership, entry: Call, call_log: CallLog) -> tuple[Rank, ...]:
    """As ranks of the world, which the status board uses."""
    nodes = call_log.nodes
    return _ranks(membership, (nodes[rank] for rank in entry.waiting_for()))[:MAX_AWAITED]


def _ranks(membership: Membership, nodes: Iterable[NodeId]) -> tuple[Rank, ...]:
    return tuple(sorted(rank for node in nodes if (rank := membership.rank_of(node)) is not None))


def _traffic(membership: Membership, links: Mapping[NodeId, Link]) -> dict[NodeId, dict[str, float]]:
    return {node: link.stats() for node, link in links.items() if membership.rank_of(node) is not None}


def _peers(
    membership: Membership, links: Mapping[NodeId, Link], traffic: Mapping[NodeId, dict[str, float]]
) -> tuple[PeerTraffic, ...]:
    busiest = sorted(traffic, key=lambda node: -traffic[node]["bytes_sent"] - traffic[node]["bytes_received"])
    peers = [
        PeerTraffic(
            rank=rank,
            carriers="+".join(links[node].schemes) if links[node].failure is None else "",
            bytes_sent=int(traffic[node]["bytes_sent"]),
            bytes_received=int(traffic[node]["bytes_received"]),
        )
        for node in busiest[:MAX_PEERS]
        if (rank := membership.rank_of(node)) is not None
    ]
    return tuple(sorted(peers, key=lambda peer: peer.rank))
