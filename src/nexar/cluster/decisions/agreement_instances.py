"""The Paxos instances of `comm.agree()` at one node. Pure.

An instance is (communicator, generation, sequence). Nodes vote whether or not they have proposed.

Invariant: a node that has forgotten its vote never votes in that instance again; otherwise a late proposer could get a
second value chosen. Old instances are forgotten. Messages about future ones displace none: few are opened, up to a
fixed distance.

All members of a communicator call `agree()` at about the same time. They begin their ballots one after another, in the
order of their ids, and a proposer waits for a higher ballot, longer with each round. So one
ballot is usually enough, with messages in proportion to the number of members. If all began at once, the ballots of
some dozens would outbid each other for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from nexar.cluster.decisions.membership_events import MembershipMessage, SendMessage
from nexar.cluster.decisions.paxos import Agreement, majority
from nexar.cluster.membership import Departure
from nexar.errors import NexarError, PeerLost, UsageError
from nexar.types import NodeId
from nexar.wire.control import Accept, BallotNumber, Chosen, Instance, Suspect

if TYPE_CHECKING:
    from random import Random

VoterGroup: TypeAlias = tuple[int, int]
"""One generation of one communicator."""


class AgreementLimits(msgspec.Struct, frozen=True):
    """What one node remembers."""

    kept: int = 1024  # newest instances, and newest ended communicators
    ahead: int = 256  # instances of one communicator that peers may open ahead of all local ones
    distance: int = 1 << 16  # sequence numbers that peers may be ahead
    kept_bytes: int = 32 << 20  # of chosen values, the newest are kept; and of values accepted before one is chosen


DEFAULT_LIMITS: Final = AgreementLimits()

_TURN: Final = 0.02  # seconds between the first ballots of two nodes: a ballot usually takes less
_LATER_TURN: Final = 0.0005  # the same after the first nodes, so that the last of many does not wait long
_FIRST_NODES: Final = 50
_YIELD: Final = 0.25  # seconds for the higher ballot of another node; doubles with each round
_MAX_DOUBLINGS: Final = 4


class ValueChosen(msgspec.Struct, frozen=True):
    """Proposals of this node in this instance end with the value."""

    instance: Instance
    value: bytes


class ProposalFailed(msgspec.Struct, frozen=True):
    """Proposals of this node in this instance end with the error."""

    instance: Instance
    error: NexarError


AgreementAction: TypeAlias = SendMessage | ValueChosen | ProposalFailed


class AgreementInstances:
    """The owner calls `tick` when `due`, and performs the actions that the methods return, in order."""

    def __init__(
        self, me: NodeId, random: Callable[[Instance], Random], limits: AgreementLimits = DEFAULT_LIMITS
    ) -> None:
        self._me = me
        self._random = random
        self._limits = limits
        self._voters: dict[VoterGroup, frozenset[NodeId]] = {}
        self._over: OrderedDict[VoterGroup, None] = OrderedDict()  # ended here; other voters may still be running them
        self._agreements: OrderedDict[Instance, Agreement] = OrderedDict()
        self._sizes: OrderedDict[Instance, int] = OrderedDict()  # bytes of chosen values, in order of choice
        self._bytes = 0  # sum of `_sizes`
        self._accepted: dict[Instance, int] = {}  # bytes of values that this node accepted, where none is chosen
        self._accepted_bytes = 0  # sum of `_accepted`
        self._forgotten: dict[VoterGroup, int] = {}  # highest sequence that was forgotten
        self._reached: dict[VoterGroup, int] = {}  # highest sequence that was proposed or chosen here
        self._waiting: dict[Instance, None] = {}  # proposed here, without a result
        self._yielded: dict[Instance, BallotNumber] = {}  # the last ballot to which a proposal of this node yielded
        self._gone: dict[NodeId, str] = {}  # voters removed from the cluster, and why
        self._missed: dict[NodeId, str] = {}  # voters this node has lost, and why
        self._end: NexarError | None = None  # ends all instances permanently

    # ------------------------------------------------------------ voters

    def add_generation(self, communicator: int, generation: int, voters: frozenset[NodeId]) -> None:
        if self._end is None:
            self._voters[communicator, generation] = voters

    def end_generation(self, communicator: int, generation: int) -> list[AgreementAction]:
        """The node still votes for the others, until newer generations displace this one."""
        if (communicator, generation) in self._voters:
            self._over[communicator, generation] = None
        actions: list[AgreementAction] = []
        while len(self._over) > self._limits.kept:
            actions += self._forget_all_of(self._over.popitem(last=False)[0])
        return actions

    def end_all(self, error: NexarError) -> list[AgreementAction]:
        """Pending and later proposals end with `error`. The node votes no more."""
        if self._end is not None:
            return []
        self._end = error
        failed = [ProposalFailed(instance, copy(error)) for instance in self._waiting]
        for known in (
            self._waiting, self._voters, self._over, self._agreements, self._sizes, self._accepted, self._reached,
            self._yielded,
        ):  # fmt: skip
            known.clear()
        self._bytes = self._accepted_bytes = 0
        return [*failed]

    def voters_removed(self, departures: Iterable[Departure]) -> list[AgreementAction]:
        """Without a majority, pending proposals end with PeerLost at once."""
        for each in departures:
            self._missed.pop(each.node, None)
            if self._votes(each.node):
                self._gone[each.node] = each.cause
        return self._fail_hopeless()

    def voter_lost(self, node: NodeId, cause: str) -> list[AgreementAction]:
        """Like `voters_removed`, until `voter_reachable`, for a voter that stays a member until a user removes it."""
        if self._votes(node):
            self._missed[node] = cause
        return self._fail_hopeless()

    def voter_reachable(self, node: NodeId) -> None:
        self._missed.pop(node, None)

    def _votes(self, node: NodeId) -> bool:
        return any(node in voters for voters in self._voters.values())

    def _fail_hopeless(self) -> list[AgreementAction]:
        hopeless = [instance for instance in self._waiting if self._is_hopeless(instance)]
        return [self._fail(instance, self._lost_error(instance)) for instance in hopeless]

    def _fail(self, instance: Instance, error: NexarError) -> AgreementAction:
        del self._waiting[instance]
        if instance in self._agreements:  # no caller waits: a ballot would be repeated for ever
            self._agreements[instance].withdraw()
        return ProposalFailed(instance, error)

    def _is_hopeless(self, instance: Instance) -> bool:
        voters, agreement = self._voters.get(instance[:2], frozenset()), self._agreements.get(instance)
        is_chosen = agreement is not None and agreement.chosen is not None
        return not is_chosen and len(voters - self._gone.keys() - self._missed.keys()) < majority(voters)

    def _lost_error(self, instance: Instance) -> PeerLost:
        """Names the voter lost last."""
        causes = {**self._gone, **self._missed}
        node = next(node for node in reversed(causes) if node in self._voters[instance[:2]])
        return PeerLost(node=node, cause=causes[node], operation=f"agree #{instance[2]}")

    # ------------------------------------------------------------ ballots

    def propose(self, instance: Instance, value: bytes, now: float) -> list[AgreementAction]:
        """Raises UsageError if what was chosen is forgotten, PeerLost without a majority, the error of `end_all`."""
        if self._end is not None:
            raise copy(self._end)
        if instance not in self._agreements and not self._may_open(instance):
            raise _too_late(instance)
        if self._is_hopeless(instance):
            raise self._lost_error(instance)
        agreement, forgotten = self._agreement(instance)  # after the checks: raising would lose what is forgotten
        assert agreement is not None
        self._reached[instance[:2]] = max(instance[2], self._reached.get(instance[:2], 0))
        self._waiting[instance] = None
        if not agreement.proposing:
            agreement.retry_after(now, self._turn(agreement))
        messages = agreement.propose(value, now)
        return [*forgotten, *self._after(agreement, messages, now)]

    def receive(self, sender: NodeId, message: MembershipMessage, now: float) -> list[AgreementAction]:
        """Messages about unknown communicators are dropped; senders repeat them."""
        if isinstance(message, Suspect):
            return []
        if sender not in self._voters.get(message.instance[:2], ()) or self._is_too_far(message.instance):
            return []
        if isinstance(message, Accept) and self._is_too_much(message):
            return []
        agreement, forgotten = self._agreement(message.instance)
        if agreement is None:
            return forgotten
        is_active = agreement.ballot is not None
        messages = agreement.receive(sender, message, now)
        if is_active and isinstance(message, Chosen) and agreement.chosen is not None:
            messages += self._pass_on(agreement, sender, agreement.chosen)
        return [*forgotten, *self._after(agreement, messages, now)]

    def _pass_on(self, agreement: Agreement, sender: NodeId, value: bytes) -> list[SendMessage]:
        """A proposer that learns what was chosen before tells the others: those that do not know it yield to its
        ballot, which does not continue.
        """
        chosen = Chosen(agreement.instance, value)
        return [SendMessage(voter, chosen) for voter in agreement.voters if voter not in (self._me, sender)]

    def due(self, now: float) -> float | None:
        """When `tick` must be called."""
        return min((due for each in self._agreements.values() if (due := each.due(now)) is not None), default=None)

    def due_of(self, instance: Instance, now: float) -> float | None:
        """As `due`, for one instance."""
        agreement = self._agreements.get(instance)
        return None if agreement is None else agreement.due(now)

    def tick(self, now: float) -> list[AgreementAction]:
        """Repeats what was not answered, and starts new ballots."""
        actions: list[AgreementAction] = []
        for agreement in list(self._agreements.values()):
            due = agreement.due(now)
            if due is not None and due <= now:
                actions += self._after(agreement, agreement.tick(now), now)
        return actions

    def votes_in(self, instance: Instance) -> bool:
        """Whether this node would answer a ballot of this instance now."""
        return instance in self._agreements or (self._may_open(instance) and not self._is_too_far(instance))

    def missing(self, instance: Instance) -> list[NodeId]:
        """Voters that have not answered the ballot of this node; all others if it has none at the moment."""
        agreement = self._agreements.get(instance)
        if agreement is None or agreement.chosen is not None:
            return []
        return (
            agreement.missing()
            if agreement.ballot is not None
            else [each for each in agreement.voters if each != self._me]
        )

    def _after(self, agreement: Agreement, messages: Sequence[SendMessage], now: float) -> list[AgreementAction]:
        """The messages, and what follows if a value is chosen or another ballot is higher."""
        self._count_accepted(agreement)
        if agreement.chosen is None:
            self._yield(agreement, now)
            return [*messages]
        instance = agreement.instance
        actions: list[AgreementAction] = [*messages]
        self._yielded.pop(instance, None)
        if instance in self._waiting:
            del self._waiting[instance]
            actions.append(ValueChosen(instance, agreement.chosen))
        self._reach(instance)
        return [*actions, *self._remember(instance, len(agreement.chosen))]

    # ------------------------------------------------------------ turns

    def _turn(self, agreement: Agreement) -> float:
        """Seconds until this node begins a ballot: after the voters before it, and after a ballot that it has seen."""
        gone = self._gone.keys() | self._missed.keys()
        position = sum(each < self._me and each not in gone for each in agreement.voters)
        turn = _TURN * min(position, _FIRST_NODES) + _LATER_TURN * max(0, position - _FIRST_NODES)
        return turn + self._yield_seconds(agreement)

    def _yield_seconds(self, agreement: Agreement) -> float:
        promised = agreement.vote.promised
        if promised is None or promised.node == self._me:
            return 0.0
        return _YIELD * 2.0 ** min(max(0, promised.round - 1), _MAX_DOUBLINGS)

    def _yield(self, agreement: Agreement, now: float) -> None:
        """Stop proposing for a while if this node has promised another ballot than its own."""
        promised, ballot = agreement.vote.promised, agreement.ballot
        if promised is None or promised == self._yielded.get(agreement.instance) or not agreement.proposing:
            return
        if promised.node != self._me and (ballot is None or ballot.number < promised):
            self._yielded[agreement.instance] = promised
            agreement.retry_after(now, self._turn(agreement))

    # ------------------------------------------------------------ memory

    def _agreement(self, instance: Instance) -> tuple[Agreement | None, list[AgreementAction]]:
        """None if unknown or forgotten; and what follows for instances that it displaces."""
        found = self._agreements.get(instance)
        if found is not None or not self._may_open(instance):
            return found, []
        voters = self._voters[instance[:2]]
        self._agreements[instance] = Agreement(instance, self._me, voters, random=self._random(instance))
        actions: list[AgreementAction] = []
        while len(self._agreements) > self._limits.kept:
            actions += self._forget(self._oldest(instance))
        return self._agreements[instance], actions

    def _may_open(self, instance: Instance) -> bool:
        """The communicator is known, and the instance is not forgotten."""
        group = instance[:2]
        return group in self._voters and instance[2] > self._forgotten.get(group, -1)

    def _oldest(self, new: Instance) -> Instance:
        # Not a future one: no local proposal could follow for the instances before it. The new one is the last.
        known = (each for each in self._agreements if each[2] <= self._reached.get(each[:2], 0) and each != new)
        return next(known, next(iter(self._agreements)))

    def _is_too_far(self, instance: Instance) -> bool:
        """Such a message is dropped; its sender repeats it."""
        group, sequence = instance[:2], instance[2]
        reached = self._reached.get(group, 0)
        if instance in self._agreements or sequence <= reached + 1:
            return False
        if sequence > reached + self._limits.distance:
            return True
        ahead = [each[:2] for each in self._agreements if each[2] > self._reached.get(each[:2], 0) + 1]
        # Half of the memory stays for instances that this node has reached: those ahead never displace them.
        return ahead.count(group) >= self._limits.ahead or len(ahead) >= self._limits.kept // 2

    def _is_too_much(self, accept: Accept) -> bool:
        """Such a message is dropped; its sender repeats it. A value is kept until one is chosen, and a peer that lies
        completes no ballot. Where this node proposes, it votes in any case: its callers are few.
        """
        others = self._accepted_bytes - self._accepted.get(accept.instance, 0)
        too_many = others > 0 and others + len(accept.value) > self._limits.kept_bytes  # one has any size
        return too_many and accept.instance not in self._waiting

    def _count_accepted(self, agreement: Agreement) -> None:
        size = len(agreement.vote.value) if agreement.chosen is None else 0
        self._accepted_bytes += size - self._accepted.pop(agreement.instance, 0)
        if size:
            self._accepted[agreement.instance] = size

    def _forget(self, instance: Instance) -> list[AgreementAction]:
        """A proposal that waits for it has come too late: the others are far ahead."""
        del self._agreements[instance]
        self._bytes -= self._sizes.pop(instance, 0)
        self._accepted_bytes -= self._accepted.pop(instance, 0)
        self._yielded.pop(instance, None)
        group, sequence = instance[:2], instance[2]
        self._forgotten[group] = max(sequence, self._forgotten.get(group, -1))
        return [self._fail(instance, _too_late(instance))] if instance in self._waiting else []

    def _forget_all_of(self, group: VoterGroup) -> list[AgreementAction]:
        instances = [each for each in self._agreements if each[:2] == group]
        actions = [action for instance in instances for action in self._forget(instance)]
        self._forgotten.pop(group, None)
        self._reached.pop(group, None)
        del self._voters[group]
        known = {node for voters in self._voters.values() for node in voters}
        self._gone = {node: cause for node, cause in self._gone.items() if node in known}
        self._missed = {node: cause for node, cause in self._missed.items() if node in known}
        return actions

    def _reach(self, instance: Instance) -> None:
        """Follow the others by at most the limit, since a peer may lie."""
        reached = self._reached.get(instance[:2], 0)
        if reached < instance[2] <= reached + self._limits.ahead:
            self._reached[instance[:2]] = instance[2]

    def _remember(self, instance: Instance, size: int) -> list[AgreementAction]:
        """Keep at least this one for late proposers."""
        if instance not in self._sizes:
            self._sizes[instance] = size
            self._bytes += size
        actions: list[AgreementAction] = []
        while self._bytes > self._limits.kept_bytes and len(self._sizes) > 1:
            actions += self._forget(next(iter(self._sizes)))
        return actions


def _too_late(instance: Instance) -> UsageError:
    return UsageError(
        f"agree #{instance[2]} of communicator {instance[0]} comes too late: the others are far "
        "ahead, and what was chosen is forgotten; call agree() on all ranks, as often on each"
    )
