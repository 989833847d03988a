"""Runs the Paxos instances of `comm.agree()`.

An instance is (communicator, generation, sequence). Nodes vote whether or not they have proposed.

Invariant: a node that has forgotten its vote never votes in that instance again; otherwise a late proposer could get a
second value chosen. Old instances are forgotten. Messages about future ones displace none: few are opened, up to a
fixed distance.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from copy import copy
from random import Random
from typing import Final, TypeAlias

from nexar.cluster.control_loop import ControlLoop
from nexar.cluster.decisions.membership_events import MembershipMessage, SendMessage
from nexar.cluster.decisions.paxos import Agreement, majority
from nexar.cluster.membership import Departure
from nexar.errors import NexarError, PeerLost, UsageError
from nexar.links.operation import Operation
from nexar.links.progress import Progress
from nexar.types import AwaitedPeer, NodeId
from nexar.wire.control import Instance, Suspect

VoterGroup: TypeAlias = tuple[int, int]
"""One generation of one communicator."""

_MAX_KEPT: Final = 1024  # newest instances, and newest ended communicators, that are remembered
_MAX_AHEAD: Final = 256  # instances of one communicator that peers may open ahead of all local ones
_MAX_DISTANCE: Final = 1 << 16  # sequence numbers that peers may be ahead
_MAX_KEPT_BYTES: Final = 32 << 20  # bytes of chosen values; the newest are kept


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
        """The ballot continues for the other voters."""

    def settle(self, value: bytes) -> None:
        """Under the node's lock."""
        self._value = value
        self.finish()

    def value(self) -> bytes:
        return self._value


class Agreements:
    """Any thread. Close it before the mesh."""

    def __init__(
        self,
        me: NodeId,
        progress: Progress,
        control_loop: ControlLoop,
        send: Callable[[NodeId, MembershipMessage], None],
    ) -> None:
        """`send` must not block and may lose messages."""
        self._me = me
        self._progress = progress
        self._send = send
        self._lock = threading.Lock()  # guards everything below
        self._voters: dict[VoterGroup, frozenset[NodeId]] = {}
        self._over: OrderedDict[VoterGroup, None] = OrderedDict()  # ended here; other voters may still be running them
        self._agreements: OrderedDict[Instance, Agreement] = OrderedDict()
        self._sizes: OrderedDict[Instance, int] = OrderedDict()  # bytes of chosen values, in order of choice
        self._bytes = 0  # sum of `_sizes`
        self._forgotten: dict[VoterGroup, int] = {}  # highest sequence that was forgotten
        self._reached: dict[VoterGroup, int] = {}  # highest sequence that was proposed or chosen here
        self._waiting: dict[Instance, list[AgreedValue]] = {}
        self._gone: dict[NodeId, str] = {}  # voters removed from the cluster, and why
        self._missed: dict[NodeId, str] = {}  # voters this node has lost, and why
        self._end: NexarError | None = None  # ends all instances permanently
        self._timer = control_loop.call_at(None, self._on_timer)

    def add_generation(self, communicator: int, generation: int, voters: frozenset[NodeId]) -> None:
        with self._lock:
            self._voters[communicator, generation] = voters

    def end_generation(self, communicator: int, generation: int) -> None:
        """The node still votes for the others, until newer generations displace this one."""
        with self._lock:
            if (communicator, generation) in self._voters:
                self._over[communicator, generation] = None
            while len(self._over) > _MAX_KEPT:
                self._forget_all_of(self._over.popitem(last=False)[0])

    def end_all(self, error: NexarError) -> None:
        """Pending and later proposals raise `error`."""
        with self._lock:
            self._end = error
            waiting = [agreed for each in self._waiting.values() for agreed in each]
            for known in (self._waiting, self._voters, self._over, self._agreements, self._sizes, self._reached):
                known.clear()
            self._bytes = 0
        with self._progress.lock:
            for agreed in waiting:
                agreed.finish(copy(error))
        self._progress.wake()  # the waiter may be the driver, and asleep

    def voters_removed(self, departures: Iterable[Departure]) -> None:
        """Without a majority, pending proposals raise PeerLost at once."""
        with self._lock:
            for each in departures:
                self._missed.pop(each.node, None)
                if self._votes(each.node):
                    self._gone[each.node] = each.cause
            waiting = self._take_hopeless()
        self._fail(waiting)

    def voter_lost(self, node: NodeId, cause: str) -> None:
        """Like `voters_removed`, until `voter_reachable`, for a voter that stays a member until a user removes it."""
        with self._lock:
            if self._votes(node):
                self._missed[node] = cause
            waiting = self._take_hopeless()
        self._fail(waiting)

    def voter_reachable(self, node: NodeId) -> None:
        with self._lock:
            self._missed.pop(node, None)

    def _votes(self, node: NodeId) -> bool:
        """Under the lock."""
        return any(node in voters for voters in self._voters.values())

    def _take_hopeless(self) -> list[tuple[AgreedValue, PeerLost]]:
        """Under the lock."""
        hopeless = [instance for instance in self._waiting if self._is_hopeless(instance)]
        return [(agreed, self._lost_error(instance)) for instance in hopeless for agreed in self._waiting.pop(instance)]

    def _fail(self, waiting: list[tuple[AgreedValue, PeerLost]]) -> None:
        with self._progress.lock:
            for agreed, error in waiting:
                agreed.finish(error)
        if waiting:
            self._progress.wake()  # the waiter may be the driver, and asleep

    def _is_hopeless(self, instance: Instance) -> bool:
        """Under the lock."""
        voters, agreement = self._voters.get(instance[:2], frozenset()), self._agreements.get(instance)
        is_chosen = agreement is not None and agreement.chosen is not None
        return not is_chosen and len(voters - self._gone.keys() - self._missed.keys()) < majority(voters)

    def _lost_error(self, instance: Instance) -> PeerLost:
        """Names the voter lost last. Under the lock."""
        causes = {**self._gone, **self._missed}
        node = next(node for node in reversed(causes) if node in self._voters[instance[:2]])
        return PeerLost(node=node, cause=causes[node], operation=f"agree #{instance[2]}")

    def propose(self, instance: Instance, value: bytes) -> AgreedValue:
        """Completes with the chosen value. Raises UsageError if that is forgotten, PeerLost without a majority, the
        error of `end_all`.
        """
        now = time.monotonic()
        agreed = AgreedValue(self._progress.lock, instance)
        with self._lock:
            if self._end is not None:
                raise copy(self._end)
            agreement = self._agreement(instance)
            if agreement is None:
                raise UsageError(
                    f"agree #{instance[2]} of communicator {instance[0]} comes too late: the others are far "
                    "ahead, and what was chosen is forgotten; call agree() on all ranks, as often on each"
                )
            if self._is_hopeless(instance):
                raise self._lost_error(instance)
            self._reached[instance[:2]] = max(instance[2], self._reached.get(instance[:2], 0))
            self._waiting.setdefault(instance, []).append(agreed)
            messages = agreement.propose(value, now)
            due = agreement.due(now)
        self._send_all(messages)
        self._settle(instance)
        self._timer.wake_by(due)
        return agreed

    def receive(self, sender: NodeId, message: MembershipMessage) -> None:
        """Messages about unknown communicators are dropped; senders repeat them."""
        if isinstance(message, Suspect):
            return
        now = time.monotonic()
        with self._lock:
            agreement = None if self._is_too_far(message.instance) else self._agreement(message.instance)
            if agreement is None or sender not in agreement.voters:
                return
            messages = agreement.receive(sender, message, now)
            due = agreement.due(now)
        self._send_all(messages)
        self._settle(message.instance)
        self._timer.wake_by(due)

    def missing(self, instance: Instance) -> list[NodeId]:
        with self._lock:
            agreement = self._agreements.get(instance)
            return [] if agreement is None else list(agreement.missing())

    def _agreement(self, instance: Instance) -> Agreement | None:
        """None if unknown or forgotten. Under the lock."""
        found, group = self._agreements.get(instance), instance[:2]
        voters = self._voters.get(group)
        if found is not None or voters is None or instance[2] <= self._forgotten.get(group, -1):
            return found
        made = Agreement(instance, self._me, voters, random=Random(hash((self._me, instance))))
        self._agreements[instance] = made
        while len(self._agreements) > _MAX_KEPT:
            self._forget(self._oldest())
        return made

    def _oldest(self) -> Instance:
        # Not a future one: no local proposal could follow for the instances before it.
        known = (each for each in self._agreements if each[2] <= self._reached.get(each[:2], 0))
        return next(known, next(iter(self._agreements)))

    def _is_too_far(self, instance: Instance) -> bool:
        """Drop such a message; its sender repeats it. Under the lock."""
        group, sequence = instance[:2], instance[2]
        reached = self._reached.get(group, 0)
        if instance in self._agreements or sequence <= reached + 1:
            return False
        ahead = sum(each[:2] == group and each[2] > reached + 1 for each in self._agreements)
        return sequence > reached + _MAX_DISTANCE or ahead >= _MAX_AHEAD

    def _forget(self, instance: Instance) -> None:
        """Under the lock."""
        del self._agreements[instance]
        self._bytes -= self._sizes.pop(instance, 0)
        self._waiting.pop(instance, None)
        group, sequence = instance[:2], instance[2]
        self._forgotten[group] = max(sequence, self._forgotten.get(group, -1))

    def _forget_all_of(self, group: VoterGroup) -> None:
        """Under the lock."""
        for instance in [each for each in self._agreements if each[:2] == group]:
            self._forget(instance)
        self._forgotten.pop(group, None)
        self._reached.pop(group, None)
        del self._voters[group]
        known = {node for voters in self._voters.values() for node in voters}
        self._gone = {node: cause for node, cause in self._gone.items() if node in known}
        self._missed = {node: cause for node, cause in self._missed.items() if node in known}

    def _send_all(self, messages: Iterable[SendMessage]) -> None:
        for each in messages:
            self._send(each.node, each.message)

    def _settle(self, instance: Instance) -> None:
        with self._lock:
            agreement = self._agreements.get(instance)
            chosen = None if agreement is None else agreement.chosen
            waiting = [] if chosen is None else self._waiting.pop(instance, [])
            if chosen is not None:
                self._reach(instance)
                self._remember(instance, len(chosen))
        if chosen is not None:
            with self._progress.lock:
                for agreed in waiting:
                    agreed.settle(chosen)
            self._progress.wake()  # the waiter may be the driver, and asleep

    def _reach(self, instance: Instance) -> None:
        """Follow the others by at most _MAX_AHEAD, since a peer may lie. Under the lock."""
        reached = self._reached.get(instance[:2], 0)
        if reached < instance[2] <= reached + _MAX_AHEAD:
            self._reached[instance[:2]] = instance[2]

    def _remember(self, instance: Instance, size: int) -> None:
        """Keep at least this one for late proposers. Under the lock."""
        if instance not in self._sizes:
            self._sizes[instance] = size
            self._bytes += size
        while self._bytes > _MAX_KEPT_BYTES and len(self._sizes) > 1:
            self._forget(next(iter(self._sizes)))

    def _on_timer(self, now: float) -> float | None:
        messages: list[SendMessage] = []
        with self._lock:
            for agreement in list(self._agreements.values()):
                due = agreement.due(now)
                if due is not None and due <= now:
                    messages += agreement.tick(now)
            dues = [due for each in self._agreements.values() if (due := each.due(now)) is not None]
        self._send_all(messages)
        return min(dues, default=None)

    def close(self) -> None:
        """Idempotent."""
        self._timer.close()
