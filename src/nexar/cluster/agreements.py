"""Values that some members agree on by ballot, whatever happens to the others: the shell of `decisions.agreement`.

Each instance is a conversation of its own, known by (communicator, generation, sequence). Who is asked for its vote
gives it, whether or not it has a proposal itself; so a majority that is alive is enough, and who comes late is told
what was chosen.

Law: who has forgotten how it voted in an instance does not vote in it again, or a late proposer could have another
value chosen. Only so many instances are remembered, and only so many bytes of what was chosen; of those before them,
nothing is said any more. Who speaks of what is to come, far ahead of all that was brought or chosen here, makes nobody
forget anything: few such instances are opened, and none very far away.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from copy import copy
from random import Random
from typing import Final, Protocol, TypeAlias

from nexar.cluster.control_threads import TimerThread
from nexar.cluster.decisions.membership_events import MembershipMessage, SendMessage
from nexar.cluster.decisions.paxos import Agreement, majority
from nexar.cluster.membership import Departure
from nexar.errors import NexarError, PeerLost, UsageError
from nexar.links.operation import Operation
from nexar.types import AwaitedPeer, NodeId
from nexar.wire.control import Instance, Suspect

VoterGroup: TypeAlias = tuple[int, int]
"""Those who agree with one another: one generation of one communicator."""

_KEPT: Final = 1024
"""Instances, and communicators that are over here, that are remembered: the newest."""
_AHEAD: Final = 256
"""Instances of one communicator that others have opened, and that are above all that were brought or chosen here."""
_FURTHEST: Final = 1 << 16
"""Sequences that the others may be ahead."""
_KEPT_BYTES: Final = 32 << 20
"""Of values that were chosen: the newest."""


class AgreedValue(Operation):
    """Done when the value of an instance is chosen."""

    __slots__ = ("_value", "instance")

    def __init__(self, lock: threading.Lock, instance: Instance) -> None:
        super().__init__(lock)
        self.instance = instance
        self._value = b""

    @property
    def name(self) -> str:
        """As errors call it."""
        return f"agree #{self.instance[2]}"

    def awaited(self) -> AwaitedPeer:
        """A majority of the voters."""
        return AwaitedPeer(missing="the vote of a majority")

    def cancel(self) -> None:
        """The ballot goes on: who waits no longer changes nothing for the others."""

    def settle(self, value: bytes) -> None:
        """It was chosen. Under the node's lock."""
        self._value = value
        self.finish()

    def value(self) -> bytes:
        """What was chosen."""
        return self._value


class ProgressLock(Protocol):
    """What is asked of a Progress."""

    @property
    def lock(self) -> threading.Lock:
        """The node's."""

    def wake(self) -> None:
        """See Progress."""


class Agreements:
    """Of one node. Any thread. Close it before the mesh."""

    def __init__(self, me: NodeId, progress: ProgressLock, say: Callable[[NodeId, MembershipMessage], None]) -> None:
        """`progress` is the node's; `say` must not block, and what it says may be lost."""
        self._me = me
        self._progress = progress
        self._say = say
        self._lock = threading.Lock()  # over everything below
        self._voters: dict[VoterGroup, frozenset[NodeId]] = {}
        self._over: OrderedDict[VoterGroup, None] = OrderedDict()  # here; others of their voters may still be at it
        self._agreements: OrderedDict[Instance, Agreement] = OrderedDict()
        self._sizes: OrderedDict[Instance, int] = OrderedDict()  # bytes of what was chosen, in the order of choice
        self._bytes = 0  # all of these
        self._forgotten: dict[VoterGroup, int] = {}  # the highest sequence that was an agreement here and is none now
        self._reached: dict[VoterGroup, int] = {}  # the highest sequence that was brought or chosen here
        self._waiting: dict[Instance, list[AgreedValue]] = {}
        self._gone: dict[NodeId, str] = {}  # voters that were removed from the world, and why
        self._missed: dict[NodeId, str] = {}  # voters that this node has lost, and why
        self._end: NexarError | None = None  # of all of them, for good
        self._timer = TimerThread(self._on_timer)

    def know(self, communicator: int, generation: int, voters: frozenset[NodeId]) -> None:
        """From now on this node votes on what these members agree on."""
        with self._lock:
            self._voters[communicator, generation] = voters

    def end(self, communicator: int, generation: int) -> None:
        """It is over here. Others may need this node's vote a while longer, and have it."""
        with self._lock:
            if (communicator, generation) in self._voters:
                self._over[communicator, generation] = None
            while len(self._over) > _KEPT:
                self._forget_all_of(self._over.popitem(last=False)[0])

    def end_all(self, error: NexarError) -> None:
        """This node takes no part in anything any more: whoever waits raises this, at once."""
        with self._lock:
            self._end = error
            waiting = [agreed for each in self._waiting.values() for agreed in each]
            for known in (self._waiting, self._voters, self._over, self._agreements, self._sizes, self._reached):
                known.clear()
            self._bytes = 0
        with self._progress.lock:
            for agreed in waiting:
                agreed.finish(copy(error))
        self._progress.wake()  # who waits may lead, and sleep

    def lose(self, departures: Iterable[Departure]) -> None:
        """These were removed from the world, and their votes do not come any more. Where too few voters are left for a
        majority, whoever waits raises PeerLost at once: the generation is over, or needs a successor without them.
        """
        with self._lock:
            for each in departures:
                self._missed.pop(each.node, None)
                if self._votes(each.node):
                    self._gone[each.node] = each.cause
            waiting = self._take_vain()
        self._fail(waiting)

    def miss(self, node: NodeId, cause: str) -> None:
        """This node has lost a voter, and nobody removes it from the world until a user asks for that. As `lose`, until
        it is found.
        """
        with self._lock:
            if self._votes(node):
                self._missed[node] = cause
            waiting = self._take_vain()
        self._fail(waiting)

    def find(self, node: NodeId) -> None:
        """A voter that this node had lost is there again."""
        with self._lock:
            self._missed.pop(node, None)

    def _votes(self, node: NodeId) -> bool:
        """Under the lock."""
        return any(node in voters for voters in self._voters.values())

    def _take_vain(self) -> list[tuple[AgreedValue, PeerLost]]:
        """Who waits for what is not chosen any more, and why. Under the lock."""
        vain = [instance for instance in self._waiting if self._is_vain(instance)]
        return [(agreed, self._lost(instance)) for instance in vain for agreed in self._waiting.pop(instance)]

    def _fail(self, waiting: list[tuple[AgreedValue, PeerLost]]) -> None:
        with self._progress.lock:
            for agreed, error in waiting:
                agreed.finish(error)
        if waiting:
            self._progress.wake()  # who waits may lead, and sleep

    def _is_vain(self, instance: Instance) -> bool:
        """Whether too few voters are left, and nothing was chosen before. Under the lock."""
        voters, agreement = self._voters.get(instance[:2], frozenset()), self._agreements.get(instance)
        is_chosen = agreement is not None and agreement.chosen is not None
        return not is_chosen and len(voters - self._gone.keys() - self._missed.keys()) < majority(voters)

    def _lost(self, instance: Instance) -> PeerLost:
        """Names the voter of this instance that went last. Under the lock."""
        causes = {**self._gone, **self._missed}
        node = next(node for node in reversed(causes) if node in self._voters[instance[:2]])
        return PeerLost(node=node, cause=causes[node], operation=f"agree #{instance[2]}")

    def propose(self, instance: Instance, value: bytes) -> AgreedValue:
        """Bring a value; the operation gives the one that is chosen, perhaps another's. UsageError: what was chosen is
        not remembered any more. PeerLost: too few voters are left. Raises what ended all of them.
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
            if self._is_vain(instance):
                raise self._lost(instance)
            self._reached[instance[:2]] = max(instance[2], self._reached.get(instance[:2], 0))
            self._waiting.setdefault(instance, []).append(agreed)
            messages = agreement.propose(value, now)
            due = agreement.due(now)
        self._spread(messages)
        self._settle(instance)
        self._timer.wake_by(due)
        return agreed

    def hear(self, sender: NodeId, message: MembershipMessage) -> None:
        """A word about an instance. One of a communicator that is not known here is dropped: it will be repeated."""
        if isinstance(message, Suspect):
            return
        now = time.monotonic()
        with self._lock:
            agreement = None if self._is_too_far(message.instance) else self._agreement(message.instance)
            if agreement is None or sender not in agreement.voters:
                return
            messages = agreement.receive(sender, message, now)
            due = agreement.due(now)
        self._spread(messages)
        self._settle(message.instance)
        self._timer.wake_by(due)

    def missing(self, instance: Instance) -> list[NodeId]:
        """Whose vote is still missing."""
        with self._lock:
            agreement = self._agreements.get(instance)
            return [] if agreement is None else list(agreement.missing())

    def _agreement(self, instance: Instance) -> Agreement | None:
        """Under the lock. None: the communicator is not known, or the instance not any more."""
        found, conference = self._agreements.get(instance), instance[:2]
        voters = self._voters.get(conference)
        if found is not None or voters is None or instance[2] <= self._forgotten.get(conference, -1):
            return found
        made = Agreement(instance, self._me, voters, random=Random(hash((self._me, instance))))
        self._agreements[instance] = made
        while len(self._agreements) > _KEPT:
            self._forget(self._oldest())
        return made

    def _oldest(self) -> Instance:
        """The one to forget. Not one to come: nobody here could bring a value to those before it any more."""
        known = (each for each in self._agreements if each[2] <= self._reached.get(each[:2], 0))
        return next(known, next(iter(self._agreements)))

    def _is_too_far(self, instance: Instance) -> bool:
        """Whether nothing is heard of it yet: it will be repeated. Under the lock."""
        conference, sequence = instance[:2], instance[2]
        reached = self._reached.get(conference, 0)
        if instance in self._agreements or sequence <= reached + 1:
            return False
        ahead = sum(each[:2] == conference and each[2] > reached + 1 for each in self._agreements)
        return sequence > reached + _FURTHEST or ahead >= _AHEAD

    def _forget(self, instance: Instance) -> None:
        """Under the lock."""
        del self._agreements[instance]
        self._bytes -= self._sizes.pop(instance, 0)
        self._waiting.pop(instance, None)
        conference, sequence = instance[:2], instance[2]
        self._forgotten[conference] = max(sequence, self._forgotten.get(conference, -1))

    def _forget_all_of(self, conference: VoterGroup) -> None:
        """Under the lock. Without its voters there is no vote any more."""
        for instance in [each for each in self._agreements if each[:2] == conference]:
            self._forget(instance)
        self._forgotten.pop(conference, None)
        self._reached.pop(conference, None)
        del self._voters[conference]
        known = {node for voters in self._voters.values() for node in voters}
        self._gone = {node: cause for node, cause in self._gone.items() if node in known}
        self._missed = {node: cause for node, cause in self._missed.items() if node in known}

    def _spread(self, messages: Iterable[SendMessage]) -> None:
        for each in messages:
            self._say(each.node, each.message)

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
            self._progress.wake()  # who waits may lead, and sleep

    def _reach(self, instance: Instance) -> None:
        """Others have come so far, if it is no lie: then it is not far. Under the lock."""
        reached = self._reached.get(instance[:2], 0)
        if reached < instance[2] <= reached + _AHEAD:
            self._reached[instance[:2]] = instance[2]

    def _remember(self, instance: Instance, size: int) -> None:
        """Under the lock. This one at least: who comes a little late gets the same answer."""
        if instance not in self._sizes:
            self._sizes[instance] = size
            self._bytes += size
        while self._bytes > _KEPT_BYTES and len(self._sizes) > 1:
            self._forget(next(iter(self._sizes)))

    def _on_timer(self, now: float) -> float | None:
        messages: list[SendMessage] = []
        with self._lock:
            for agreement in list(self._agreements.values()):
                due = agreement.due(now)
                if due is not None and due <= now:
                    messages += agreement.tick(now)
            dues = [due for each in self._agreements.values() if (due := each.due(now)) is not None]
        self._spread(messages)
        return min(dues, default=None)

    def close(self) -> None:
        """Idempotent."""
        self._timer.close()
