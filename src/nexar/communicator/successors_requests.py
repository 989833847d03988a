"""Requests for successors, revocations and closing notices.

Invariant: a notice counts only from a member of the communicator, never as this node's action. A forwarded notice names
the forwarding rank, so a lying member accuses only itself.
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

_REQUEST_INTERVAL: Final = 1.0  # seconds
_RECHECK_INTERVAL: Final = 0.01  # seconds: an investigation takes milliseconds


class SuccessorRequests:
    """Requests of one node. Any thread."""

    def __init__(
        self, successors: Successors, membership_service: MembershipService, failure_monitor: FailureMonitor
    ) -> None:
        self._successors = successors
        self._membership_service = membership_service
        self._failure_monitor = failure_monitor

    def succeed(self, generation: Generation, deadline: float, timeout: float) -> Any:
        while not self._successors.is_blocked_by_close(generation):
            pause = _REQUEST_INTERVAL if self._ask(generation) else _RECHECK_INTERVAL
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
        """Repeated, because each epoch forgets requests and may not concern this communicator. False: a possible loss
        is being investigated.
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


_MAX_PENDING: Final = 64  # communicators with a notice that are not made yet


class Revocations:
    """Revocations of one node. Any thread, except `received`."""

    def __init__(self, me: NodeId, successors: Successors, send: Callable[[NodeId, Message], None]) -> None:
        """`send` must not block; it also reaches nodes without a link."""
        self._me = me
        self._successors = successors
        self._send = send
        self._lock = threading.Lock()  # guards the attributes below
        # By communicator, then by sender: no notice hides another sender's.
        self._pending: dict[tuple[int, int], dict[tuple[NodeId, bool], Revoke]] = {}

    def revoke(self, generation: Generation, reason: str) -> None:
        self._revoke(generation, generation.group.rank, sendable(reason))

    def _revoke(self, generation: Generation, rank: Rank, reason: str, by: str = "") -> None:
        """Forward it once: the revoking rank may have no link to each member."""
        if isinstance(generation.outcome.error, Revoked) or generation.successor is not None:
            return
        error = Revoked(communicator=str(generation.communicator), reason=f"{reason}{by}", rank=rank)
        generation.outcome.resolve(error)
        generation.interrupt(error)
        message = Revoke(generation.communicator, generation.membership.epoch, rank, reason[:MAX_CAUSE_CHARACTERS])
        for link in generation.group.speakers().values():
            self._send(link.peer, message)

    def received(self, link: Link, message: Message) -> None:
        """Called by the driver. A generation may be revoked before it is made here, so the notice is stored before the
        lookup: either this finds the generation or `listed` the notice.
        """
        assert isinstance(message, Revoke)
        about = message.communicator, message.generation
        with self._lock:
            self._pending.setdefault(about, {})[link.peer, message.closed] = message
            while len(self._pending) > _MAX_PENDING:
                del self._pending[next(iter(self._pending))]
        generation = self._successors.find(*about)
        if generation is not None:
            self.listed(generation)

    def listed(self, generation: Generation) -> None:
        """`find` returns the generation from now on."""
        with self._lock:
            pending = self._pending.pop((generation.communicator, generation.membership.epoch), {})
        for (peer, _), message in pending.items():
            self._follow(generation, peer, message)

    def _follow(self, generation: Generation, peer: NodeId, message: Revoke) -> None:
        sender = generation.membership.rank_of(peer)
        if sender is None:
            return
        if message.closed:
            if message.rank == sender:
                self._successors.closed_by(generation, peer)
        elif 0 <= message.rank < generation.group.size and message.rank != generation.group.rank:
            by = "" if message.rank == sender else f" (as rank {sender} passed on)"
            self._revoke(generation, message.rank, foreign_line(message.reason), by)

    def absent(self, absence: ClosedCommunicator) -> None:
        """Tell all members that this node closed it: those without a link may wait too."""
        membership = absence.membership
        rank = membership.rank_of(self._me)
        assert rank is not None
        message = Revoke(absence.communicator, membership.epoch, rank, "it has closed it", closed=True)
        for member in membership.members:
            if member.node != self._me:
                self._send(member.node, message)
