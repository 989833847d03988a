"""The laws of every run, checked after every event. A law is an invariant that the simulator checks.

- Each epoch has one membership.
- At each node epochs grow, one by one.
- A minority never decides: a chosen value has a majority of that epoch's votes in one ballot.
- A ballot has one value, and no node votes below its promise.
- Votes are remembered: the promises of a voter name the highest ballot in which it accepted a value.
- An expelled node enters no epoch, never becomes a member again, and nobody votes at its request.
- One node alone cannot expel another: a voter for a removal could not reach the node itself, or the node asked for it,
  or an earlier ballot's votes leave no choice.
- Only admitted nodes join.

Laws about `agree()`, checked after every step of every node:

- One agreed value: all members that get a result of one instance get the same.
- An agreed value is proposed: by a member, in this instance.
- A majority agrees: a value counts as chosen only with the votes of a majority of the generation in one ballot.
- Votes are remembered: a voter also rejects ballots below its promise. So it never votes in an instance that it forgot.
- Agreements end: with an error as soon as the membership lacks a majority of the voters, and with a value if the
  network is calm and a majority of them votes.
- A terminated node agrees on nothing.

The first node that calls a value chosen must have received its votes. A proposer's own vote counts as cast.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from nexar.cluster.decisions.membership_events import (
    ChangeRequested,
    Loss,
    MembershipAction,
    MembershipDecided,
    MembershipMessage,
    MessageReceived,
    PeerLossFound,
    PeerReachable,
    ProbeFinished,
    ResignRequested,
    SelfExpelled,
    SendMessage,
)
from nexar.cluster.decisions.node_machine import NodeAction, NodeInput
from nexar.cluster.decisions.successor_events import AdoptMembership, GenerationKey
from nexar.cluster.membership import Change, Membership, next_generation, pin_of
from nexar.errors import NexarError
from nexar.types import NodeId
from nexar.wire.control import Accept, Accepted, BallotNumber, Chosen, Instance, Prepare, Promise


class Violation(AssertionError):
    """`law` names the law; the text says how it was violated."""

    def __init__(self, law: str, details: str, *nodes: NodeId) -> None:
        super().__init__(f"{law}: {details}")
        self.law = law
        self.nodes = nodes
        """The nodes concerned, if known."""


@dataclass(frozen=True, slots=True)
class ReferenceElectorate:
    """The voters on the successor of a membership."""

    voters: frozenset[NodeId]

    @staticmethod
    def of(membership: Membership) -> ReferenceElectorate:
        """The seed votes if the number of members is even."""
        seed = [membership.seed.node] if membership.seed is not None and membership.size % 2 == 0 else []
        return ReferenceElectorate(frozenset([*(member.node for member in membership.members), *seed]))

    @property
    def majority(self) -> int:
        return len(self.voters) // 2 + 1


class Laws:
    """Checks the laws of one run."""

    def __init__(self, first: Membership) -> None:
        self.memberships: dict[int, Membership] = {first.epoch: first}
        """Chosen memberships by epoch."""
        self.admitted: set[NodeId] = set()
        """Nodes that may join."""
        self.removed: dict[NodeId, int] = {}
        """Node → epoch that removed it."""
        self.changes: list[Change] = []
        """Chosen changes; that to epoch e has index e - 2."""
        self.last_change = 0.0
        """When the last change was chosen, if `now` is set."""
        self.now: Callable[[], float] = lambda: 0.0
        self._generations: dict[tuple[int, int, int], tuple[Membership, Membership | None]] = {}
        self._electorates = {first.epoch: ReferenceElectorate.of(first)}
        self._chosen: dict[int, bytes] = {}  # by the epoch it creates
        self._values: dict[tuple[int, BallotNumber], bytes] = {}
        self._votes: defaultdict[tuple[int, BallotNumber], set[NodeId]] = defaultdict(set)
        self._heard: defaultdict[tuple[NodeId, int, BallotNumber], set[NodeId]] = defaultdict(set)
        self._promised: dict[tuple[NodeId, int], BallotNumber] = {}
        self._accepted: dict[tuple[NodeId, int], BallotNumber] = {}
        self._unreachable: defaultdict[NodeId, set[NodeId]] = defaultdict(set)
        self._willing: set[NodeId] = set()
        self._epochs: dict[NodeId, int] = {}
        self._expelled: set[NodeId] = set()
        self._gone: dict[bytes, frozenset[NodeId]] = {}

    @property
    def last(self) -> Membership:
        """The membership of the highest epoch chosen."""
        return self.memberships[max(self.memberships)]

    def generation_after(self, communicator: int, membership: Membership, epoch: int) -> Membership | None:
        """The next generation according to the changes up to this epoch."""
        key = (communicator, membership.epoch, epoch)
        found = self._generations.get(key)
        if found is None or found[0].members != membership.members:
            world, changes = self.memberships[epoch], self.changes[membership.epoch - 1 : epoch - 1]
            found = self._generations[key] = (membership, next_generation(communicator, membership, world, changes))
        return found[1]

    def all_willing(self, old: int, new: int) -> bool:
        """Whether every departure between these epochs was willing."""
        return all(departure.willing for change in self.changes[old - 1 : new - 1] for departure in change.left)

    def enters(self, node: NodeId, epoch: int) -> None:
        """Records that a node starts in this epoch."""
        self._epochs[node] = epoch

    def before_step(self, node: NodeId, event: NodeInput) -> None:
        """Records what the node learns from the event. Call it before the node's step."""
        match event:
            case MessageReceived(sender=sender, message=Accepted(instance=instance, ballot=ballot)):
                self._heard[node, instance[1], ballot].add(sender)
            case PeerLossFound(node=lost, willing=willing):
                self._unreachable[node].add(lost)
                self._willing |= {lost} if willing else set()
            case PeerReachable(node=found):
                self._unreachable[node].discard(found)
            case ProbeFinished(node=lost, loss=Loss()):
                self._unreachable[node].add(lost)
            case ChangeRequested(left=left):
                self._willing |= {departure.node for departure in left}
            case ResignRequested():
                self._willing.add(node)
            case _:
                return

    def after_step(self, node: NodeId, event: NodeInput, actions: Iterable[MembershipAction | NodeAction]) -> None:
        """Checks the actions of a step. Raises Violation."""
        for action in actions:
            if type(action) is SendMessage:
                if (check := self._checks.get(type(action.message))) is not None:
                    check(self, node, action.message, event)
            elif type(action) is MembershipDecided or type(action) is AdoptMembership:
                self._check_adoption(node, action.change)
            elif type(action) is SelfExpelled:
                self._expelled.add(node)

    # -- messages

    def _check_promise(self, node: NodeId, message: Promise, event: NodeInput) -> None:
        epoch = self._epoch_of_vote(node, message.instance, event)
        _check_remembered(node, message, self._accepted.get((node, epoch)))
        known = self._promised.get((node, epoch))
        if known is None or known < message.ballot:
            self._promised[node, epoch] = message.ballot

    def _check_proposal(self, node: NodeId, message: Accept, _: NodeInput) -> None:
        epoch = message.instance[1]
        known = self._values.setdefault((epoch, message.ballot), message.value)
        if known != message.value:
            raise Violation("a ballot has one value", f"node {node} asks for two in ballot {message.ballot}")
        if node in self._gone_by(message.value):
            self._willing.add(node)
        self._check_removals(node, epoch, message.ballot)

    def _check_vote(self, node: NodeId, message: Accepted, event: NodeInput) -> None:
        epoch = self._epoch_of_vote(node, message.instance, event)
        votes = self._votes[epoch, message.ballot]
        if node in votes:
            return  # a repeated message, not another vote
        promised = self._promised.get((node, epoch))
        if promised is not None and promised > message.ballot:
            raise Violation(
                "no node votes below its promise",
                f"node {node} votes in {message.ballot} of epoch {epoch} after it has promised {promised}",
            )
        if (epoch, message.ballot) not in self._values:
            raise Violation("a ballot has one value", f"node {node} votes in {message.ballot}, which has none")
        self._check_removals(node, epoch, message.ballot)
        votes.add(node)
        self._accepted[node, epoch] = message.ballot

    def _check_chosen(self, node: NodeId, message: Chosen, _: NodeInput) -> None:
        if message.instance[:1] == (0,):
            self._check_decision(node, message.instance[1] + 1, message.value)

    _checks: dict[type, Callable[..., None]] = {  # noqa: RUF012 - never written
        Promise: _check_promise,
        Accept: _check_proposal,
        Accepted: _check_vote,
        Chosen: _check_chosen,
    }

    def _epoch_of_vote(self, node: NodeId, instance: Instance, event: NodeInput) -> int:
        """The epoch of a vote or promise. Raises Violation if it is not permitted."""
        epoch = instance[1]
        if node in self._expelled:
            raise Violation("an expelled node takes no part", f"node {node} votes in epoch {epoch}")
        asked = isinstance(event, MessageReceived) and isinstance(event.message, Prepare | Accept)
        if asked and event.sender not in self._electorates[epoch].voters:  # type: ignore[union-attr]
            raise Violation(
                "an expelled node takes no part",
                f"node {node} votes in epoch {epoch} at the request of node {event.sender}",  # type: ignore[union-attr]
            )
        return epoch

    def _check_removals(self, node: NodeId, epoch: int, ballot: BallotNumber) -> None:
        """Raises Violation if this node may not vote for the value's removals."""
        value = self._values[epoch, ballot]
        unjustified = self._gone_by(value) - self._unreachable[node] - self._willing - {ballot.node}
        if unjustified and not self._voted_before(epoch, ballot, value):
            raise Violation(
                "one node alone cannot expel another",
                f"node {node} votes in {ballot} of epoch {epoch} for the removal of {sorted(unjustified)}, "
                "which it has never failed to reach",
            )

    def _voted_before(self, epoch: int, ballot: BallotNumber, value: bytes) -> bool:
        return any(
            known == value and key[0] == epoch and key[1] < ballot and self._votes[key]
            for key, known in self._values.items()
        )

    def _gone_by(self, value: bytes) -> frozenset[NodeId]:
        if value not in self._gone:
            self._gone[value] = Change.decode(value).gone
        return self._gone[value]

    # -- decisions

    def _check_adoption(self, node: NodeId, change: Change) -> None:
        if node in self._expelled:
            raise Violation("an expelled node takes no part", f"node {node} goes on to epoch {change.epoch}")
        if change.epoch != self._epochs[node] + 1:
            raise Violation("epochs grow one by one", f"node {node} goes from {self._epochs[node]} to {change.epoch}")
        self._epochs[node] = change.epoch
        self._check_decision(node, change.epoch, change.encode())
        if pin_of(self.memberships[change.epoch], node) is None:
            raise Violation("an expelled node takes no part", f"node {node} goes on to epoch {change.epoch} without it")

    def _check_decision(self, node: NodeId, epoch: int, value: bytes) -> None:
        known = self._chosen.get(epoch)
        if known is None:
            self._count_votes(node, epoch, value)
        elif known != value:
            raise Violation(
                "each epoch has one membership",
                f"node {node} takes {Change.decode(value)} for epoch {epoch}; others have {Change.decode(known)}",
            )

    def _count_votes(self, node: NodeId, epoch: int, value: bytes) -> None:
        """Counts the votes for the first node that calls the value chosen."""
        electorate = self._electorates[epoch - 1]
        ballots = [key for key, known in self._values.items() if key[0] == epoch - 1 and known == value]
        counts = [len((self._heard[node, *key] | ({node} & {key[1].node})) & electorate.voters) for key in ballots]
        most = max(counts, default=0)
        if most < electorate.majority and electorate.voters != {node}:
            raise Violation(
                "a minority never decides",
                f"node {node} takes a value for epoch {epoch} that has {most} votes of {len(electorate.voters)}",
            )
        self._apply(epoch, value)

    def _apply(self, epoch: int, value: bytes) -> None:
        change = Change.decode(value)
        following = change.apply(self.memberships[epoch - 1])
        self.removed |= dict.fromkeys(change.gone, epoch)
        returned = [member.node for member in following.members if member.node in self.removed]
        if returned:
            raise Violation("an expelled node takes no part", f"{returned} are members of epoch {epoch}")
        not_admitted = {member.node for member in change.joined} - self.admitted
        if not_admitted:
            raise Violation("only admitted nodes join", f"{sorted(not_admitted)} are members of epoch {epoch}")
        self._chosen[epoch] = value
        self.changes.append(change)
        self.last_change = self.now()
        self.memberships[epoch] = following
        self._electorates[epoch] = ReferenceElectorate.of(following)


def _check_remembered(node: NodeId, promise: Promise, accepted: BallotNumber | None) -> None:
    """`accepted`: the last ballot in which the node accepted a value. A promise may also name its own ballot."""
    if accepted is not None and (promise.accepted is None or promise.accepted < accepted):
        raise Violation(
            "votes are remembered",
            f"node {node} has accepted {accepted} of {promise.instance} and says {promise.accepted}",
            node,
        )


# -- laws about agree()

_ENOUGH_SECONDS: Final = 8.0  # for an agreement, once the network is calm


class _InstanceState:
    """What the laws know of one instance."""

    def __init__(self) -> None:
        self.proposed: set[bytes] = set()
        self.chosen: bytes | None = None
        self.values: dict[BallotNumber, bytes] = {}
        self.votes: defaultdict[BallotNumber, set[NodeId]] = defaultdict(set)
        self.promised: dict[NodeId, BallotNumber] = {}
        self.accepted: dict[NodeId, BallotNumber] = {}


class AgreementLaws:
    """Checks the laws of one run."""

    def __init__(self, now: Callable[[], float], votes: Callable[[NodeId, NodeId, Instance], bool]) -> None:
        """`votes`: whether the second node runs, is reached by the first one, and votes in this instance."""
        self.calm_since: float | None = None
        """When all faults ended."""
        self._now = now
        self._votes = votes
        self._voters: dict[tuple[int, int], frozenset[NodeId]] = {}
        self._instances: defaultdict[Instance, _InstanceState] = defaultdict(_InstanceState)
        self._pending: defaultdict[NodeId, dict[Instance, float]] = defaultdict(dict)  # when they began
        self._terminated: set[NodeId] = set()

    def opened(self, key: GenerationKey, voters: frozenset[NodeId]) -> None:
        self._voters[key] = voters

    def died(self, node: NodeId) -> None:
        self._pending.pop(node, None)

    def terminated(self, node: NodeId) -> None:
        self._terminated.add(node)

    def has_pending(self, since: float, lives: Callable[[NodeId], bool]) -> bool:
        """Whether a living node has a call that began before `since`."""
        return any(pending and min(pending.values()) < since and lives(node) for node, pending in self._pending.items())

    # -- calls

    def proposed(self, node: NodeId, instance: Instance, value: bytes) -> None:
        self._instances[instance].proposed.add(value)
        self._pending[node][instance] = self._now()

    def ended(self, node: NodeId, instance: Instance, result: bytes | NexarError | None) -> None:
        """`result` is the value or the error of the call; None: its user stopped waiting."""
        self._pending[node].pop(instance, None)
        if isinstance(result, bytes):
            if node in self._terminated:
                raise Violation("a terminated node agrees on nothing", f"node {node} gets a value of {instance}", node)
            self._check_value(node, instance, result)

    def _check_value(self, node: NodeId, instance: Instance, value: bytes) -> None:
        state = self._instances[instance]
        if value not in state.proposed:
            raise Violation("an agreed value is proposed", f"node {node} gets {value!r} of {instance}", node)
        if state.chosen is None:
            self._check_majority(node, instance, value)
            state.chosen = value
        elif state.chosen != value:
            raise Violation(
                "one agreed value", f"node {node} gets {value!r} of {instance}, others {state.chosen!r}", node
            )

    def _check_majority(self, node: NodeId, instance: Instance, value: bytes) -> None:
        """A proposer's own vote counts as cast."""
        state, voters = self._instances[instance], self._voters[instance[:2]]
        ballots = [ballot for ballot, known in state.values.items() if known == value]
        most = max((len((state.votes[each] | {each.node}) & voters) for each in ballots), default=0)
        if most <= len(voters) // 2 and len(voters) > 1:
            raise Violation("a majority agrees", f"node {node} takes {value!r} of {instance} with {most} votes", node)

    def timed_out(self, node: NodeId, instance: Instance) -> None:
        """Raises Violation if a majority would have voted all the time."""
        began = self._pending[node].get(instance)
        if began is None or self.calm_since is None or self._now() < max(began, self.calm_since) + _ENOUGH_SECONDS:
            return
        voters = self._voters[instance[:2]]
        voting = [each for each in voters if self._votes(node, each, instance)]
        if len(voting) > len(voters) // 2:
            raise Violation(
                "agreements end", f"{instance} of node {node} does not, and {len(voting)} of {len(voters)} vote", node
            )

    def check_hope(self, node: NodeId, world: Membership) -> None:
        """Raises Violation if a pending call has no majority in the membership of its node."""
        for instance in self._pending.get(node, ()):
            voters = self._voters[instance[:2]]
            left = len(voters & world.nodes)
            if left <= len(voters) // 2:
                raise Violation(
                    "agreements end", f"node {node} waits in {instance} for {left} of {len(voters)} voters", node
                )

    def overdue(self, calm: float, bound: float, lives: Callable[[NodeId], bool]) -> None:
        """Raises Violation if a call of a living node is older than `bound` since `calm`."""
        limit = self._now() - bound
        for node, pending in self._pending.items() if calm <= limit else ():
            for instance, began in pending.items():
                if began < limit and lives(node):
                    raise Violation("agreements end", f"{instance} of node {node} is pending", node)

    # -- messages

    def sends(self, node: NodeId, message: MembershipMessage) -> None:
        """Checks a message before it leaves."""
        if node in self._terminated:
            raise Violation("a terminated node agrees on nothing", f"node {node} sends {message}", node)
        match message:
            case Promise(instance, ballot):
                _check_remembered(node, message, self._instances[instance].accepted.get(node))
                self._check_ballot(node, instance, ballot)
            case Accept(instance, ballot, value):
                self._instances[instance].values[ballot] = value
            case Accepted(instance, ballot):
                self._check_vote(node, instance, ballot)
            case Chosen(instance, value):
                self._check_value(node, instance, value)
            case _:
                return

    def _check_vote(self, node: NodeId, instance: Instance, ballot: BallotNumber) -> None:
        self._check_ballot(node, instance, ballot)
        state = self._instances[instance]
        state.accepted[node] = ballot
        state.votes[ballot].add(node)

    def _check_ballot(self, node: NodeId, instance: Instance, ballot: BallotNumber) -> None:
        promised = self._instances[instance].promised
        known = promised.get(node)
        if known is not None and ballot < known:
            raise Violation("votes are remembered", f"node {node} votes in {ballot} of {instance} after {known}", node)
        promised[node] = ballot
