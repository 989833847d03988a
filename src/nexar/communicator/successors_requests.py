"""Requests for successors, revocations and closing notices.

Law: a notice counts only from a member of the communicator, and never as an action of this node. A forwarded notice
names the rank that forwarded it, so a lying member accuses only itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from nexar.cluster.decisions.membership_events import ChangeRequested, RecoverNow
from nexar.cluster.failure_monitor import FailureMonitor
from nexar.cluster.membership_service import MembershipService
from nexar.communicator.generation import Generation
from nexar.communicator.successors import Successors
from nexar.communicator.successors_state import ClosedCommunicator
from nexar.errors import RecoveryTimeout, Revoked, sendable
from nexar.links.link import Link
from nexar.types import NodeId, Rank
from nexar.wire.control import MAX_CAUSE_CHARACTERS, Message, Revoke
from nexar.wire.text import foreign_line

_ASK_AGAIN: Final = 1.0  # seconds
_LOOK_AGAIN: Final = 0.01  # seconds: an investigation takes milliseconds


class SuccessorRequests:
    """Of one node. Any thread."""

    def __init__(
        self, successors: Successors, membership_service: MembershipService, failure_monitor: FailureMonitor
    ) -> None:
        self._successors = successors
        self._membership_service = membership_service
        self._failure_monitor = failure_monitor

    def succeed(self, generation: Generation, deadline: float, timeout: float) -> Any:
        """Return the next communicator: without the lost members, or the same members if none is lost."""
        while not self._successors.is_blocked_by_close(generation):
            pause = _ASK_AGAIN if self._ask(generation) else _LOOK_AGAIN
            found = self._successors.wait_for_successor(generation, min(deadline, time.monotonic() + pause))
            if found is not None:
                return found
            if time.monotonic() >= deadline:
                break
        if self._successors.is_blocked_by_close(generation) or generation.is_stalled:
            generation.outcome.check()
        raise RecoveryTimeout(missing_votes=self.missing(generation), timeout=timeout)

    def missing(self, generation: Generation) -> tuple[Rank, ...]:
        made = self._successors.missing(generation)
        if made:
            return made
        ranks = {generation.membership.rank_of(node) for node in self._membership_service.missing()}
        known = tuple(sorted(rank for rank in ranks if rank is not None))
        return known or tuple(rank for rank in range(generation.group.size) if rank != generation.group.rank)

    def _ask(self, generation: Generation) -> bool:
        """Repeated, because a request is forgotten with each epoch, which may not concern this communicator. False: too
        early, a possible loss is being investigated.
        """
        if generation.successor is not None:
            return True
        if self._failure_monitor.is_investigating(generation.nodes):
            return False
        epoch = self._membership_service.membership.epoch  # read first, so that a change in between is not missed
        if self._membership_service.suspects().keys() & generation.nodes:
            self._membership_service.put(RecoverNow())  # also during a build: with a lost member it fails
        elif not self._successors.is_concerned(generation):
            self._membership_service.put(ChangeRequested(renewed=(generation.communicator,), epoch=epoch))
        return True


_MOST_EARLY: Final = 64  # communicators with a notice that are not made yet


class Revocations:
    """Of one node. Any thread, except `heard`."""

    def __init__(self, me: NodeId, successors: Successors, say: Callable[[NodeId, Message], None]) -> None:
        """`say` must not block; it also reaches nodes without a link."""
        self._me = me
        self._successors = successors
        self._say = say
        self._lock = threading.Lock()  # guards the attributes below
        # By communicator, then by sender: no notice hides another sender's.
        self._early: dict[tuple[int, int], dict[tuple[NodeId, bool], Revoke]] = {}

    def revoke(self, generation: Generation, reason: str) -> None:
        self._revoke(generation, generation.group.rank, sendable(reason))

    def _revoke(self, generation: Generation, rank: Rank, reason: str, by: str = "") -> None:
        """Forward it once, so that no link is needed between the revoking rank and each member."""
        if isinstance(generation.outcome.error, Revoked) or generation.successor is not None:
            return
        error = Revoked(communicator=str(generation.communicator), reason=f"{reason}{by}", rank=rank)
        generation.outcome.resolve(error)
        generation.interrupt(error)
        message = Revoke(generation.communicator, generation.membership.epoch, rank, reason[:MAX_CAUSE_CHARACTERS])
        for link in generation.group.speakers().values():
            self._say(link.peer, message)

    def heard(self, link: Link, message: Message) -> None:
        """Called by the driver. A member may revoke a generation before it is made here: the notice is kept. Looking it
        up afterwards means that either this finds the generation or `listed` finds the notice.
        """
        assert isinstance(message, Revoke)
        about = message.communicator, message.generation
        with self._lock:
            self._early.setdefault(about, {})[link.peer, message.closed] = message
            while len(self._early) > _MOST_EARLY:
                del self._early[next(iter(self._early))]
        generation = self._successors.find(*about)
        if generation is not None:
            self.listed(generation)

    def listed(self, generation: Generation) -> None:
        """`find` returns the generation from now on."""
        with self._lock:
            early = self._early.pop((generation.communicator, generation.membership.epoch), {})
        for (peer, _), message in early.items():
            self._follow(generation, peer, message)

    def _follow(self, generation: Generation, peer: NodeId, message: Revoke) -> None:
        speaker = generation.membership.rank_of(peer)
        if speaker is None:
            return
        if message.closed:
            if message.rank == speaker:
                self._successors.closed_by(generation, peer)
        elif 0 <= message.rank < generation.group.size and message.rank != generation.group.rank:
            by = "" if message.rank == speaker else f" (as rank {speaker} passed on)"
            self._revoke(generation, message.rank, foreign_line(message.reason), by)

    def absent(self, absence: ClosedCommunicator) -> None:
        """Notify each member that this node closed it; members without a link may wait for this node too."""
        membership = absence.membership
        rank = membership.rank_of(self._me)
        assert rank is not None
        message = Revoke(absence.communicator, membership.epoch, rank, "it has closed it", closed=True)
        for member in membership.members:
            if member.node != self._me:
                self._say(member.node, message)
