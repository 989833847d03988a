"""Asking for what comes after a communicator, until it is there.

Communicators that a rank declares over, and those that it has closed: what members say to one another of that.

Law: a word counts only from a member of the communicator, and nobody can say in another's name that this node did
something. Who passes on what a third one said is named with it: a member that lies accuses nobody but itself.
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
_LOOK_AGAIN: Final = 0.01  # likewise: whoever is looked into is found, or lost, in some milliseconds


class SuccessorRequests:
    """Of one node. Any thread."""

    def __init__(
        self, successors: Successors, membership_service: MembershipService, failure_monitor: FailureMonitor
    ) -> None:
        self._successors = successors
        self._membership_service = membership_service
        self._failure_monitor = failure_monitor

    def succeed(self, generation: Generation, deadline: float, timeout: float) -> Any:
        """The communicator after this one: without who is lost; if nobody is, the same members once more."""
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
        """Whom the next membership, or what is made of it, waits for, so far as is known here: by their ranks."""
        made = self._successors.missing(generation)
        if made:
            return made
        ranks = {generation.membership.rank_of(node) for node in self._membership_service.missing()}
        known = tuple(sorted(rank for rank in ranks if rank is not None))
        return known or tuple(rank for rank in range(generation.group.size) if rank != generation.group.rank)

    def _ask(self, generation: Generation) -> bool:
        """Again and again: what was asked for in one epoch is forgotten in the next, which may come for other reasons
        and not concern this communicator. False: not yet, for whether a member is lost is just being found out, and
        the next is to be without it.
        """
        if generation.successor is not None:
            return True
        if self._failure_monitor.is_investigating(generation.nodes):
            return False
        epoch = (
            self._membership_service.membership.epoch
        )  # before the look at what has come: a change between them is not missed
        if self._membership_service.suspects().keys() & generation.nodes:
            self._membership_service.put(
                RecoverNow()
            )  # also if a successor is being made: with who is lost it comes to nothing
        elif not self._successors.is_concerned(generation):
            self._membership_service.put(ChangeRequested(renewed=(generation.communicator,), epoch=epoch))
        return True


_MOST_EARLY: Final = 64  # communicators that are not made yet, and of which something was said


class Revocations:
    """Of one node. Any thread, but for `heard`."""

    def __init__(self, me: NodeId, successors: Successors, say: Callable[[NodeId, Message], None]) -> None:
        """`say` must not block, and finds a way to whom there is no link yet."""
        self._me = me
        self._successors = successors
        self._say = say
        self._lock = threading.Lock()  # over what is below
        # About what is not made yet, by who said it: nobody's word hides another's, least of all that of a stranger.
        self._early: dict[tuple[int, int], dict[tuple[NodeId, bool], Revoke]] = {}

    def revoke(self, generation: Generation, reason: str) -> None:
        """This communicator is over, for all its members."""
        self._revoke(generation, generation.group.rank, sendable(reason))

    def _revoke(self, generation: Generation, rank: Rank, reason: str, by: str = "") -> None:
        """Passed on, once, so that it needs no link that is not there."""
        if isinstance(generation.outcome.error, Revoked) or generation.successor is not None:
            return
        error = Revoked(communicator=str(generation.communicator), reason=f"{reason}{by}", rank=rank)
        generation.outcome.resolve(error)
        generation.interrupt(error)
        message = Revoke(generation.communicator, generation.membership.epoch, rank, reason[:MAX_CAUSE_CHARACTERS])
        for link in generation.group.speakers().values():
            self._say(link.peer, message)

    def heard(self, link: Link, message: Message) -> None:
        """From the driving thread. Who made it a moment before us may revoke it before we have it: kept until then.
        Looked up afterwards, so either this finds the branch, or who lists the branch finds this.
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
        """It can be found from now on."""
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
        """Tell its members, one by one, that this node has closed it: also who has no link with it may wait for it."""
        membership = absence.membership
        rank = membership.rank_of(self._me)
        assert rank is not None  # it was a member's to close
        message = Revoke(absence.communicator, membership.epoch, rank, "it has closed it", closed=True)
        for member in membership.members:
            if member.node != self._me:
                self._say(member.node, message)
