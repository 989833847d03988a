"""The laws about `agree()`, checked after every step of every node.

- One agreed value: all members that get a result of one instance get the same.
- An agreed value is proposed: by a member, in this instance.
- A majority agrees: a value counts as chosen only with the votes of a majority of the generation in one ballot.
- Votes are remembered: a voter rejects ballots below its promise, and its promises name the highest ballot in which it
  accepted a value. So it never votes in an instance that it forgot.
- Agreements end: with an error as soon as the membership lacks a majority of the voters, and with a value if the
  network is calm and a majority of them votes.
- A terminated node agrees on nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Final

from nexar.cluster.decisions.membership_events import MembershipMessage
from nexar.cluster.decisions.successor_events import GenerationKey
from nexar.cluster.membership import Membership
from nexar.errors import NexarError
from nexar.testing.simulator.laws import Violation
from nexar.types import NodeId
from nexar.wire.control import Accept, Accepted, BallotNumber, Chosen, Instance, Promise

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
        """None: its user does not wait any more."""
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
            left = sum(world.rank_of(each) is not None for each in voters)
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
            case Promise(instance, ballot, accepted):
                self._check_promise(node, instance, ballot, accepted)
            case Accept(instance, ballot, value):
                self._instances[instance].values[ballot] = value
            case Accepted(instance, ballot):
                self._check_vote(node, instance, ballot)
            case Chosen(instance, value):
                self._check_value(node, instance, value)
            case _:
                return

    def _check_promise(
        self, node: NodeId, instance: Instance, ballot: BallotNumber, accepted: BallotNumber | None
    ) -> None:
        state = self._instances[instance]
        known = state.accepted.get(node)
        if known is not None and (accepted is None or accepted < known):
            raise Violation(
                "votes are remembered", f"node {node} has accepted {known} of {instance} and says {accepted}", node
            )
        self._check_ballot(node, instance, ballot)

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
