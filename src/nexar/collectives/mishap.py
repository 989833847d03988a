"""What ends a call on all ranks, as an error here and as a message to the others. Pure translation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from nexar.collectives.entry import Entry
from nexar.collectives.fingerprint import Fingerprint
from nexar.errors import (
    Cancelled,
    CollectiveMismatch,
    CollectiveTimeout,
    LinkClosed,
    NexarError,
    OperationTimeout,
    PeerLost,
    Revoked,
)
from nexar.errors.base import told
from nexar.links.ledger import Call, differ, same_but_for_the_way
from nexar.types import AwaitedPeer, NodeId, Rank
from nexar.wire.messages import Culprit, GaveUp

_LONGEST_REASON: Final = 1000


class Mishap:
    """Why a rank left a call without its result, so far as the others have to know."""

    def __init__(self, error: BaseException, rank_of: Callable[[NodeId], Rank | None]) -> None:
        """`rank_of`: on this communicator. What a link says of ranks is meant for the newest membership of all."""
        self.reason = (told(error) or type(error).__name__)[:_LONGEST_REASON]
        self.timeout = 0.0
        self.culprits: tuple[Culprit, ...] = ()
        if isinstance(error, OperationTimeout):
            self.timeout = error.timeout
            waiting = [] if isinstance(error.waiting_for, str) else error.waiting_for
            self.culprits = tuple(
                Culprit(peer.rank, peer.missing, peer.last_operation, peer.last_heard, peer.current_operation)
                for peer in waiting
                if peer.rank is not None
            )
        elif isinstance(error, (PeerLost, LinkClosed)):
            # Who misbehaved is none of those: it lives, and whoever took it for lost would wait for its successor.
            rank = error.rank if error.node is None else rank_of(error.node)
            self.culprits = () if rank is None else (Culprit(rank),)
            if self.culprits and isinstance(error, PeerLost):
                self.reason = error.cause  # without the remedy, which each says for itself
        elif isinstance(error, Cancelled):
            self.reason = error.reason or "it was cancelled there"


def error_of(notice: GaveUp, entry: Entry, known: Callable[[Rank], AwaitedPeer], rank: Rank) -> NexarError:
    """What a call raises that another rank has given up: what that rank raised, if it means the same here."""
    if notice.closed:
        reason = f"rank {notice.rank} has closed it, and takes no part in {entry.name}"
        return Revoked(communicator=str(notice.communicator), reason=reason, rank=notice.rank, closed=True)
    if notice.timeout > 0:
        return CollectiveTimeout(
            operation=entry.operation,
            sequence=entry.sequence,
            waiting_for=[_awaited(each, known, rank) for each in notice.culprits]
            or f"others, as rank {notice.rank} says",
            timeout=notice.timeout,
        )
    if notice.culprits:
        peer = known(notice.culprits[0].rank)
        cause = f"so says rank {notice.rank}: {notice.reason}"
        return PeerLost(rank=peer.rank, node=peer.node, address=peer.address, cause=cause, operation=entry.name)
    return Cancelled(operation=entry.name, reason=notice.reason, rank=notice.rank)


def awaited_here(notice: GaveUp, rank: Rank) -> CollectiveTimeout:
    """Others have given up a call because this rank, which has not come to it, was missing. It raises nothing now."""
    awaited = [AwaitedPeer(rank=rank, missing=each.missing) for each in notice.culprits if each.rank == rank]
    operation = awaited[0].missing.partition(" #")[0] if awaited else ""
    return CollectiveTimeout(
        operation=operation or "a collective",
        sequence=notice.sequence,
        waiting_for=awaited,
        timeout=notice.timeout,
    )


def named(error: BaseException, entry: Entry) -> BaseException:
    """Another rank gave up some part of the call, as shared memory shows. The user knows the call, not its parts."""
    if isinstance(error, Cancelled) and error.rank is not None and error.operation != entry.name:
        return Cancelled(operation=entry.name, reason=error.reason, rank=error.rank)
    return error


def _awaited(culprit: Culprit, known: Callable[[Rank], AwaitedPeer], rank: Rank) -> AwaitedPeer:
    missing = culprit.missing
    if culprit.rank == rank:
        missing = f"{missing or 'its part'} (that is this rank, which came too late)"
    return replace(
        known(culprit.rank),
        missing=missing,
        last_operation=culprit.last_operation,
        last_heard=culprit.last_heard,
        current_operation=culprit.current_operation,
    )


def mismatch_of(sequence: int, calls: Mapping[Rank, Call], rank: Rank) -> CollectiveMismatch:
    """As `rank` sees it, whose own call may not be among those known."""
    ours = calls.get(rank)
    way = same_but_for_the_way(calls.values())  # named only if nothing else tells the calls apart

    def describe(call: Call) -> str:
        return Fingerprint(*call).describe(way=way)

    others = {other: call for other, call in calls.items() if ours is None or differ(call, ours)} or dict(calls)
    first = next(iter(others.values()))
    return CollectiveMismatch(
        expected="no such call yet" if ours is None else describe(ours),
        found=describe(first),
        ranks=sorted(other for other, call in others.items() if call == first),
        sequence=sequence,
        calls={other: describe(call) for other, call in sorted(calls.items())},
    )
