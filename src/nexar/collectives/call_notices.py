"""Notices between ranks about calls that end without a result, and their errors.

Closing a communicator is local. At close, or in reply to a query, a rank notifies ranks that wait for a call it will
never make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from time import monotonic
from typing import Final, NamedTuple

from nexar.cluster.membership import Member, Membership
from nexar.collectives.call import Call
from nexar.collectives.fingerprint import Fingerprint, operation_name
from nexar.errors import (
    Cancelled,
    CollectiveMismatch,
    CollectiveTimeout,
    LinkClosed,
    NexarError,
    OperationTimeout,
    PeerLost,
    Revoked,
    error_text,
)
from nexar.group import Group
from nexar.links.link import Link
from nexar.links.mismatch_detector import CallFacts, differ, same_but_for_algorithm
from nexar.links.router import Notice
from nexar.types import AwaitedPeer, NodeId, Rank
from nexar.wire.control import Blamed, CallAborted, ProgressQuery, ProgressReply

ABORTED_KEPT: Final = 1024
"""Aborted calls that are remembered."""


class AbortedCalls(dict[int, CallAborted]):
    """Abort notices by sequence number. The owner's lock guards it."""

    def __init__(self) -> None:
        super().__init__()
        # the earliest notice of a rank that closed the communicator; it takes part in no call from there on
        self._last: CallAborted | None = None

    def add(self, notice: CallAborted) -> bool:
        """False: not new."""
        if notice.closed:
            if self._last is not None and self._last.sequence <= notice.sequence:
                return False
            self._last = notice
        elif self.find(notice.sequence) is not None:
            return False
        if len(self) >= ABORTED_KEPT:
            del self[min(self)]
        self.setdefault(notice.sequence, notice)
        return True

    def find(self, sequence: int) -> CallAborted | None:
        found = self.get(sequence)
        if found is None and self._last is not None and sequence >= self._last.sequence:
            return self._last
        return found


_REASON: Final = "it has closed this communicator"
_ACTIVITY: Final = "user code, which has closed this communicator"


class ClosingNotice(NamedTuple):
    """A rank has closed a communicator generation."""

    communicator: int
    generation: int
    rank: Rank
    sequence: int
    """The first call that it takes no part in."""

    @property
    def message(self) -> CallAborted:
        return CallAborted(self.communicator, self.generation, self.sequence, self.rank, _REASON, closed=True)

    def answer(self, question: ProgressQuery) -> CallAborted | ProgressReply:
        about = self.communicator, self.generation, question.number, self.rank
        if question.sequence < 0:
            return ProgressReply(*about, "absent", doing=_ACTIVITY)
        return ProgressReply(*about, "done") if question.sequence < self.sequence else self.message


_MAX_REASON_LENGTH: Final = 1000


class AbortReason:
    """The part of an error that the other ranks need."""

    def __init__(self, error: BaseException, rank_of: Callable[[NodeId], Rank | None]) -> None:
        """`rank_of` returns ranks of this communicator; link errors refer to the newest membership."""
        self.reason = (error_text(error) or type(error).__name__)[:_MAX_REASON_LENGTH]
        self.timeout = 0.0
        self.culprits: tuple[Blamed, ...] = ()
        if isinstance(error, OperationTimeout):
            self.timeout = error.timeout
            waiting = [] if isinstance(error.waiting_for, str) else error.waiting_for
            self.culprits = tuple(
                Blamed(peer.rank, peer.missing, peer.last_operation, peer.last_heard, peer.current_operation)
                for peer in waiting
                if peer.rank is not None
            )
        elif isinstance(error, (PeerLost, LinkClosed)):
            # PeerMisbehaved is excluded: that peer is alive, and ranks that treat it as lost would wait for a
            # successor.
            rank = error.rank if error.node is None else rank_of(error.node)
            self.culprits = () if rank is None else (Blamed(rank),)
            if self.culprits and isinstance(error, PeerLost):
                self.reason = error.cause  # without the remedy, which each rank adds itself
        elif isinstance(error, Cancelled):
            self.reason = error.reason or "the call was cancelled there"


def error_of(notice: CallAborted, entry: Call, known: Callable[[Rank], AwaitedPeer], rank: Rank) -> NexarError:
    """The aborting rank's error if it applies here too, else Cancelled."""
    if notice.closed:
        reason = f"rank {notice.rank} has closed it and takes no part in {entry.name}"
        return Revoked(communicator=str(notice.communicator), reason=reason, rank=notice.rank, closed=True)
    if notice.timeout > 0:
        return CollectiveTimeout(
            operation=entry.operation,
            sequence=entry.sequence,
            waiting_for=[_awaited(each, known, rank) for each in notice.culprits]
            or f"ranks that rank {notice.rank} waited for",
            timeout=notice.timeout,
        )
    if notice.culprits:
        peer = known(notice.culprits[0].rank)
        cause = f"reported by rank {notice.rank}: {notice.reason}"
        return PeerLost(rank=peer.rank, node=peer.node, address=peer.address, cause=cause, operation=entry.name)
    return Cancelled(operation=entry.name, reason=notice.reason, rank=notice.rank)


def timeout_caused_here(notice: CallAborted, rank: Rank, operation: int) -> CollectiveTimeout:
    """The timeout that this rank caused on others, for its dump; not raised. `operation`: a code, 0 if unknown."""
    awaited = [AwaitedPeer(rank=rank, missing=each.missing) for each in notice.culprits if each.rank == rank]
    return CollectiveTimeout(
        operation=operation_name(operation) if operation else "a collective",
        sequence=notice.sequence,
        waiting_for=awaited,
        timeout=notice.timeout,
    )


def with_call_name(error: BaseException, entry: Call) -> BaseException:
    """Completes an abort seen in shared memory, which names only a part of the call."""
    if isinstance(error, Cancelled) and error.rank is not None and error.operation != entry.name:
        return Cancelled(operation=entry.name, reason=error.reason, rank=error.rank)
    return error


def _awaited(culprit: Blamed, known: Callable[[Rank], AwaitedPeer], rank: Rank) -> AwaitedPeer:
    missing = culprit.missing
    if culprit.rank == rank:
        missing = f"{missing or 'its part'} (this rank, which was too late)"
    return replace(
        known(culprit.rank),
        missing=missing,
        last_operation=culprit.last_operation,
        last_heard=culprit.last_heard,
        current_operation=culprit.current_operation,
    )


def mismatch_of(sequence: int, calls: Mapping[Rank, CallFacts], rank: Rank) -> CollectiveMismatch:
    """Returns the error as `rank` sees it."""
    ours = calls.get(rank)
    with_algorithm = same_but_for_algorithm(calls.values())  # shown only if the calls differ in nothing else

    def describe(call: CallFacts) -> str:
        return Fingerprint(*call).describe(with_algorithm=with_algorithm)

    others = {other: call for other, call in calls.items() if ours is None or differ(call, ours)} or dict(calls)
    first = next(iter(others.values()))
    return CollectiveMismatch(
        expected="no such call yet" if ours is None else describe(ours),
        found=describe(first),
        ranks=sorted(other for other, call in others.items() if call == first),
        sequence=sequence,
        calls={other: describe(call) for other, call in sorted(calls.items())},
    )


class NoticeSender:
    """Sends notices over open links. Any thread, without the node's lock (except `known`)."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def links(self) -> dict[Rank, Link]:
        return {rank: link for rank, link in self._group.speakers().items() if rank != self._group.rank}

    def send(self, link: Link, notice: Notice) -> None:
        try:
            link.send_control(notice)
        except NexarError:
            return  # the link is lost; it fails its waiting operations itself

    def send_all(self, notice: Notice, but: Rank | None = None) -> None:
        """Send to all ranks except `but`. Each forwards it."""
        for rank, link in self.links().items():
            if rank != but:
                self.send(link, notice)

    def known(self, rank: Rank) -> AwaitedPeer:
        node = self._group.membership.members[rank].node
        found = self._group.matching.peers.get(node) or AwaitedPeer(rank=rank, node=node)
        heard = self._group.matching.mismatch_detector.heard.get(node)
        return replace(found, last_heard=None if heard is None else monotonic() - heard)


def peers_of(membership: Membership) -> dict[NodeId, AwaitedPeer]:
    """The members as peers to wait for."""
    return {
        member.node: AwaitedPeer(rank=rank, node=member.node, host=member.host, address=_address_of(member))
        for rank, member in enumerate(membership.members)
    }


def _address_of(member: Member) -> str | None:
    return next((address for ways in member.addresses.values() for address in ways), None)
