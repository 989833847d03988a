"""Runs the Paxos instances of `comm.agree()`: messages, timer and waiting callers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from copy import copy
from random import Random

from nexar.cluster.control_loop import ControlLoop
from nexar.cluster.decisions.agreement_instances import AgreementAction, AgreementInstances, ProposalFailed, ValueChosen
from nexar.cluster.decisions.membership_events import MembershipMessage, SendMessage
from nexar.cluster.membership import Departure
from nexar.errors import NexarError
from nexar.links.operation import Operation
from nexar.links.progress import Progress
from nexar.types import AwaitedPeer, NodeId
from nexar.wire.control import Instance, Suspect


class AgreedValue(Operation):
    """Completes when the value is chosen."""

    __slots__ = ("_value", "instance")

    def __init__(self, lock: threading.Lock, instance: Instance) -> None:
        super().__init__(lock)
        self.instance = instance
        self._value = b""

    @property
    def name(self) -> str:
        return f"agree #{self.instance[2]}"

    def awaited(self) -> AwaitedPeer:
        return AwaitedPeer(missing="the vote of a majority")

    def cancel(self) -> None:
        """Does nothing: the ballot continues for the other voters."""

    def settle(self, value: bytes) -> None:
        """Under the node's lock."""
        self._value = value
        self.finish()

    def value(self) -> bytes:
        return self._value


class Agreements:
    """The agreements of one node. Any thread. Close it before the mesh."""

    def __init__(
        self,
        me: NodeId,
        progress: Progress,
        control_loop: ControlLoop,
        send: Callable[[NodeId, MembershipMessage], None],
    ) -> None:
        """`send` must not block and may lose messages."""
        self._progress = progress
        self._send = send
        self._lock = threading.Lock()  # guards everything below
        self._instances = AgreementInstances(me, lambda instance: Random(hash((me, instance))))
        self._waiting: dict[Instance, list[AgreedValue]] = {}
        self._timer = control_loop.call_at(None, self._on_timer)

    def add_generation(self, communicator: int, generation: int, voters: frozenset[NodeId]) -> None:
        with self._lock:
            self._instances.add_generation(communicator, generation, voters)

    def end_generation(self, communicator: int, generation: int) -> None:
        """The node still votes for others, until newer generations displace this one."""
        with self._lock:
            actions = self._instances.end_generation(communicator, generation)
        self._perform(actions)

    def end_all(self, error: NexarError) -> None:
        """Pending and later proposals raise `error`."""
        with self._lock:
            actions = self._instances.end_all(error)
        self._perform(actions)

    def voters_removed(self, departures: Iterable[Departure]) -> None:
        """Without a majority, pending proposals raise PeerLost at once."""
        with self._lock:
            actions = self._instances.voters_removed(departures)
        self._perform(actions)

    def voter_lost(self, node: NodeId, cause: str) -> None:
        """Like `voters_removed`, until `voter_reachable`, for a voter that stays a member."""
        with self._lock:
            actions = self._instances.voter_lost(node, cause)
        self._perform(actions)

    def voter_reachable(self, node: NodeId) -> None:
        with self._lock:
            self._instances.voter_reachable(node)

    def propose(self, instance: Instance, value: bytes) -> AgreedValue:
        """Completes with the chosen value. Raises UsageError if that is forgotten, PeerLost without a majority, or the
        error of `end_all`.
        """
        now = time.monotonic()
        agreed = AgreedValue(self._progress.lock, instance)
        with self._lock:
            actions = self._instances.propose(instance, value, now)
            self._waiting.setdefault(instance, []).append(agreed)
            due = self._instances.due_of(instance, now)
        self._perform(actions)
        self._timer.wake_by(due)
        return agreed

    def receive(self, sender: NodeId, message: MembershipMessage) -> None:
        """Drops messages about unknown communicators; senders repeat them."""
        if isinstance(message, Suspect):
            return
        now = time.monotonic()
        with self._lock:
            actions = self._instances.receive(sender, message, now)
            due = self._instances.due_of(message.instance, now)
        self._perform(actions)
        self._timer.wake_by(due)

    def missing(self, instance: Instance) -> list[NodeId]:
        """Voters that have not answered this node's ballot."""
        with self._lock:
            return self._instances.missing(instance)

    def _on_timer(self, now: float) -> float | None:
        with self._lock:
            actions, due = self._instances.tick(now), self._instances.due(now)
        self._perform(actions)
        return due

    def _perform(self, actions: list[AgreementAction]) -> None:
        for action in actions:
            if isinstance(action, SendMessage):
                self._send(action.node, action.message)
            else:
                self._end(action)

    def _end(self, action: ValueChosen | ProposalFailed) -> None:
        with self._lock:
            waiting = self._waiting.pop(action.instance, [])
        with self._progress.lock:
            for agreed in waiting:
                if isinstance(action, ValueChosen):
                    agreed.settle(action.value)
                else:
                    agreed.finish(copy(action.error))
        self._progress.wake()  # the waiter may be the driver, and asleep

    def close(self) -> None:
        """Idempotent."""
        self._timer.close()
