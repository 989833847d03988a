"""Calls that come to nothing because a rank has left them, or will never make them. Pure.

The last word of a rank whose user has closed a communicator that others may still use. Pure.

Closing is local, and most often everybody does so after the same call: then nobody needs to hear of it. But who waits
in a call that this rank will never make is told: when it closes, if it knows of that call, and else by the answer to
the question what has become of it, which every call asks that lasts.

What ends a call on all ranks, as an error here and as a message to the others. Pure translation.

How one rank speaks to the others about a call: along the links that are open, never waiting for one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import Final, NamedTuple, Protocol

from nexar.cluster.membership import Member, Membership
from nexar.collectives.call import Call
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
    told,
)
from nexar.links.matching import Matching
from nexar.links.mismatch_detector import CallFacts, differ, same_but_for_algorithm
from nexar.links.operation import Operation
from nexar.links.router import Notice, NoticeTarget, Router
from nexar.types import AwaitedPeer, NodeId, Rank
from nexar.wire.control import Blamed, CallAborted, ProgressQuery, ProgressReply

ABORTED_KEPT: Final = 1024
"""Calls given up that are remembered."""


class AbortedCalls(dict[int, CallAborted]):
    """What was said of calls, by sequence, also of calls to come. Empty: nothing was. Under the lock of who has it."""

    def __init__(self) -> None:
        super().__init__()
        self._last: CallAborted | None = None  # from that call on a rank takes no part any more: the lowest of them

    def add(self, notice: CallAborted) -> bool:
        """One more. False: nothing new."""
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
        """What ends this call; None: nothing that is known."""
        found = self.get(sequence)
        if found is None and self._last is not None and sequence >= self._last.sequence:
            return self._last
        return found


_REASON: Final = "it has closed this communicator"
_DOING: Final = "user code, which has closed this communicator"


class ClosingNotice(NamedTuple):
    """Of one generation of one communicator."""

    communicator: int
    generation: int
    rank: Rank
    sequence: int
    """Of the first call that it has no part in."""

    @property
    def message(self) -> CallAborted:
        """To those who wait."""
        return CallAborted(self.communicator, self.generation, self.sequence, self.rank, _REASON, closed=True)

    def answer(self, question: ProgressQuery) -> CallAborted | ProgressReply:
        """What was asked for has ended well here, or will never begin; who waits for a message is told where it is."""
        about = self.communicator, self.generation, question.number, self.rank
        if question.sequence < 0:
            return ProgressReply(*about, "absent", doing=_DOING)
        return ProgressReply(*about, "done") if question.sequence < self.sequence else self.message


_LONGEST_REASON: Final = 1000


class AbortReason:
    """Why a rank left a call without its result, so far as the others have to know."""

    def __init__(self, error: BaseException, rank_of: Callable[[NodeId], Rank | None]) -> None:
        """`rank_of`: on this communicator. What a link says of ranks is meant for the newest membership of all."""
        self.reason = (told(error) or type(error).__name__)[:_LONGEST_REASON]
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
            # Who misbehaved is none of those: it lives, and whoever took it for lost would wait for its successor.
            rank = error.rank if error.node is None else rank_of(error.node)
            self.culprits = () if rank is None else (Blamed(rank),)
            if self.culprits and isinstance(error, PeerLost):
                self.reason = error.cause  # without the remedy, which each says for itself
        elif isinstance(error, Cancelled):
            self.reason = error.reason or "it was cancelled there"


def error_of(notice: CallAborted, entry: Call, known: Callable[[Rank], AwaitedPeer], rank: Rank) -> NexarError:
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


def awaited_here(notice: CallAborted, rank: Rank) -> CollectiveTimeout:
    """Others have given up a call because this rank, which has not come to it, was missing. It raises nothing now."""
    awaited = [AwaitedPeer(rank=rank, missing=each.missing) for each in notice.culprits if each.rank == rank]
    operation = awaited[0].missing.partition(" #")[0] if awaited else ""
    return CollectiveTimeout(
        operation=operation or "a collective",
        sequence=notice.sequence,
        waiting_for=awaited,
        timeout=notice.timeout,
    )


def named(error: BaseException, entry: Call) -> BaseException:
    """Another rank gave up some part of the call, as shared memory shows. The user knows the call, not its parts."""
    if isinstance(error, Cancelled) and error.rank is not None and error.operation != entry.name:
        return Cancelled(operation=entry.name, reason=error.reason, rank=error.rank)
    return error


def _awaited(culprit: Blamed, known: Callable[[Rank], AwaitedPeer], rank: Rank) -> AwaitedPeer:
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


def mismatch_of(sequence: int, calls: Mapping[Rank, CallFacts], rank: Rank) -> CollectiveMismatch:
    """As `rank` sees it, whose own call may not be among those known."""
    ours = calls.get(rank)
    way = same_but_for_algorithm(calls.values())  # named only if nothing else tells the calls apart

    def describe(call: CallFacts) -> str:
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


class GroupView(Protocol):
    """What a journal needs of its group."""

    @property
    def rank(self) -> Rank:
        """Mine."""

    @property
    def communicator(self) -> int:
        """Its id."""

    @property
    def membership(self) -> Membership:
        """Who takes part."""

    @property
    def matching(self) -> Matching:
        """Of its messages."""

    @property
    def router(self) -> Router:
        """Of its node."""

    def carried_bytes(self) -> float:
        """What its links have sent and received so far."""

    def speakers(self) -> Mapping[Rank, NoticeTarget]:
        """Links to the other ranks, those that are open or need no connection."""

    def rank_of(self, node: NodeId) -> Rank:
        """Of a node that takes part."""

    def wait(self, operations: Sequence[Operation], deadline: float, alarm: Operation | None = None) -> None:
        """See Progress.wait."""


class NoticeSender:
    """Of one communicator. Any thread, without the node's lock, but for `known`, which does not care."""

    def __init__(self, group: GroupView) -> None:
        self._group = group

    def links(self) -> dict[Rank, NoticeTarget]:
        """Those that are open, to the other ranks."""
        return {rank: link for rank, link in self._group.speakers().items() if rank != self._group.rank}

    def say(self, link: NoticeTarget, notice: Notice) -> None:
        """To one of them."""
        try:
            link.send_control(notice)
        except NexarError:
            return  # the link is lost: who waits for that peer hears of it from the link itself

    def spread(self, notice: Notice, but: Rank | None = None) -> None:
        """To all of them, each of whom passes it on; `but` has said it."""
        for rank, link in self.links().items():
            if rank != but:
                self.say(link, notice)

    def known(self, rank: Rank) -> AwaitedPeer:
        """What is known of a rank, with how long it has been silent."""
        node = self._group.membership.members[rank].node
        found = self._group.matching.peers.get(node) or AwaitedPeer(rank=rank, node=node)
        heard = self._group.matching.mismatch_detector.heard.get(node)
        return replace(found, last_heard=None if heard is None else monotonic() - heard)


def peers_of(membership: Membership) -> dict[NodeId, AwaitedPeer]:
    """What a membership says of each member, as somebody waited for."""
    return {
        member.node: AwaitedPeer(rank=rank, node=member.node, host=member.host, address=_address_of(member))
        for rank, member in enumerate(membership.members)
    }


def _address_of(member: Member) -> str | None:
    """The one it would rather be dialed at; where it really was, its link says."""
    return next((address for ways in member.addresses.values() for address in ways), None)
