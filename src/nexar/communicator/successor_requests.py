"""Requests of one node: for successors, for changes at the next checkpoint, revocations and closing notices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from nexar.cluster.decisions.membership_events import ChangeRequested, RecoverNow
from nexar.cluster.decisions.resize import ResizeRequest
from nexar.cluster.decisions.successor_events import GenerationKey, RevokeReceived, RevokeRequested, SendNotice
from nexar.cluster.failure_monitor import FailureMonitor
from nexar.cluster.machine_runner import MachineRunner
from nexar.cluster.membership import Member
from nexar.cluster.membership_service import MembershipService
from nexar.communicator.generation import Generation
from nexar.communicator.successors import Successors
from nexar.errors import RecoveryTimeout
from nexar.links.link import Link
from nexar.types import NodeId, Rank
from nexar.wire.control import Message, Revoke

if TYPE_CHECKING:
    from nexar.communicator.communicator import Communicator  # which imports this package's modules

_REQUEST_INTERVAL: Final = 1.0  # seconds
_RECHECK_INTERVAL: Final = 0.01  # seconds: an investigation takes milliseconds


class SuccessorRequests:
    """Requests of one node. Any thread."""

    def __init__(
        self,
        successors: Successors,
        membership_service: MembershipService,
        failure_monitor: FailureMonitor,
        runner: MachineRunner,
    ) -> None:
        self._runner = runner
        self._successors = successors
        self._membership_service = membership_service
        self._failure_monitor = failure_monitor

    def request_successor(self, generation: Generation, deadline: float, timeout: float) -> Communicator:
        """Block until the successor exists, and return it. Raises what `wait_for_successor` raises, Revoked if a member
        closed the generation, NoQuorum or RecoveryTimeout at the deadline.
        """
        while True:
            if self._successors.is_blocked_by_close(generation):
                generation.outcome.check()
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
        """Repeat it: each epoch forgets requests and may not concern this communicator. False: a possible loss is being
        investigated.
        """
        if generation.successor is not None:
            return True
        if self._failure_monitor.is_investigating(generation.nodes):
            return False
        epoch = self._membership_service.membership.epoch  # read first, so that a change in between is not missed
        if self._membership_service.suspects().keys() & generation.nodes:
            self._runner.put(RecoverNow())  # also during a build: with a lost member it fails
        elif not self._successors.is_concerned(generation):
            self._runner.put(ChangeRequested(renewed=(generation.communicator,), epoch=epoch))
        return True


class CheckpointRequests:
    """What this node asks for at the next checkpoint: joiners that wait, its own leave, removals. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # over everything below
        self._waiting: tuple[Member, ...] = ()
        self._leaving = False
        self._departure_reported = False
        self._removals: dict[NodeId, str] = {}

    def set_waiting(self, members: tuple[Member, ...]) -> None:
        with self._changed:
            self._waiting = members
            self._changed.notify_all()

    def leave(self) -> None:
        with self._changed:
            self._leaving = True

    def report_departure(self) -> bool:
        """True for the first checkpoint of a node that has left: it returns that, and later ones raise Expelled."""
        with self._changed:
            is_first, self._departure_reported = not self._departure_reported, True
            return is_first

    def remove(self, node: NodeId, reason: str) -> None:
        with self._changed:
            self._removals[node] = reason[:1000]

    def settle(self, gone: frozenset[NodeId]) -> None:
        with self._changed:
            for node in gone:
                self._removals.pop(node, None)

    def wait(self, count: int, timeout: float, is_over: Callable[[], bool]) -> bool:
        """Block until `count` joiners wait. False: timeout, or `is_over`; call `recheck` after `is_over` changes."""
        with self._changed:
            seconds = min(timeout, threading.TIMEOUT_MAX)
            self._changed.wait_for(lambda: len(self._waiting) >= count or is_over(), seconds)
            return len(self._waiting) >= count

    def recheck(self) -> None:
        """Make waiters check `is_over`. Never blocks."""
        with self._changed:
            self._changed.notify_all()

    def mine(self) -> ResizeRequest:
        with self._changed:
            return ResizeRequest(self._waiting, self._leaving, dict(self._removals))


class Revocations:
    """Sends and receives one node's revocations and closing notices. Any thread, except `received`."""

    def __init__(self, successors: Successors, runner: MachineRunner, send: Callable[[NodeId, Message], None]) -> None:
        """`send` must not block. It reaches nodes without a link too."""
        self._runner = runner
        self._successors = successors
        self._send = send

    def revoke(self, generation: Generation, reason: str) -> None:
        key = GenerationKey(generation.communicator, generation.membership.epoch)
        self._runner.put(RevokeRequested(key, reason))

    def received(self, link: Link, message: Message) -> None:
        """Called by the driver."""
        assert isinstance(message, Revoke)
        key = GenerationKey(message.communicator, message.generation)
        self._runner.put(RevokeReceived(link.peer, key, message.rank, message.reason, message.closed))

    def send_notice(self, notice: SendNotice) -> None:
        """Sends a revocation to members with a link, which forward it. A closing notice goes to all, because any of
        them may wait for the member that closed.
        """
        message = Revoke(*notice.key, notice.rank, notice.reason, closed=notice.closed)
        for node in notice.nodes if notice.closed else self._linked(notice):
            self._send(node, message)

    def _linked(self, notice: SendNotice) -> list[NodeId]:
        generation = self._successors.find(*notice.key)
        if generation is None:
            return []  # it has a successor
        return [link.peer for link in generation.group.speakers().values() if link.peer in notice.nodes]
