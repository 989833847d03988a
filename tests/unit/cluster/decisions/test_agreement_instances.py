"""Proposals of many nodes at once, in virtual time."""

import heapq
import math
from random import Random

import pytest

from nexar.cluster.decisions.agreement_instances import (
    AgreementAction,
    AgreementInstances,
    AgreementLimits,
    ProposalFailed,
    ValueChosen,
)
from nexar.cluster.decisions.membership_events import MembershipMessage, SendMessage
from nexar.cluster.membership import Departure
from nexar.errors import PeerLost, UsageError
from nexar.types import NodeId
from nexar.wire.control import Accept, Accepted, BallotNumber, Chosen, Prepare

INSTANCE = (7, 1, 1)


class Network:
    """Every message takes `latency` seconds."""

    def __init__(self, size: int, latency: float) -> None:
        self.now = 0.0
        self.sent = 0
        self.chosen: dict[int, bytes] = {}
        self.away: set[int] = set()  # nodes that receive nothing
        self.nodes = {node: AgreementInstances(node, lambda each: Random(str(each))) for node in range(1, size + 1)}
        self._latency = latency
        self._due: list[tuple[float, int, int, int, MembershipMessage]] = []  # heap
        for each in self.nodes.values():
            each.add_generation(*INSTANCE[:2], frozenset(self.nodes))

    def propose(self, *nodes: int) -> None:
        for node in nodes:
            self._do(node, self.nodes[node].propose(INSTANCE, b"of %d" % node, self.now))

    def run(self, awaited: int, longest: float) -> None:
        """Until so many nodes have the value."""
        while len(self.chosen) < awaited:
            ticks = {node: each.due(self.now) for node, each in self.nodes.items()}
            first = min((due for due in ticks.values() if due is not None), default=math.inf)
            arrival = self._due[0][0] if self._due else math.inf
            self.now = max(self.now, min(first, arrival))
            assert self.now <= longest, f"{len(self.chosen)} of {awaited} after {longest} s, {self.sent} messages"
            if arrival <= first:
                _, _, sender, node, message = heapq.heappop(self._due)
                if node not in self.away:
                    self._do(node, self.nodes[node].receive(sender, message, self.now))
            else:
                for node in [node for node, due in ticks.items() if due is not None and due <= self.now]:
                    self._do(node, self.nodes[node].tick(self.now))

    def reconnect(self) -> None:
        """What was sent to nodes that were away is lost."""
        self._due = [each for each in self._due if each[3] not in self.away]
        heapq.heapify(self._due)
        self.away = set()

    def _do(self, node: int, actions: list[AgreementAction]) -> None:
        for action in actions:
            if isinstance(action, SendMessage):
                self.sent += 1
                message = (self.now + self._latency, self.sent, node, action.node, action.message)
                heapq.heappush(self._due, message)
            else:
                assert isinstance(action, ValueChosen)
                self.chosen[node] = action.value


@pytest.mark.parametrize(("latency", "messages_each"), [(0.001, 8), (0.05, 240), (0.2, 240)])
def test_many_that_propose_at_once_agree(latency: float, messages_each: int) -> None:
    network = Network(60, latency)
    network.propose(*network.nodes)
    network.run(60, longest=60.0)
    assert len(set(network.chosen.values())) == 1
    assert network.sent < 60 * messages_each


def test_one_that_proposes_alone_waits_only_for_its_turn() -> None:
    network = Network(60, 0.001)
    network.propose(60)
    network.run(1, longest=1.1)
    assert network.chosen == {60: b"of 60"}


def test_many_that_propose_late_learn_what_was_chosen_together() -> None:
    network = Network(60, 0.001)
    network.away = set(range(31, 61)) - {45}
    network.propose(*range(1, 31))
    network.run(30, longest=2.0)
    network.reconnect()
    network.propose(*range(31, 61))
    network.run(60, longest=network.now + 3.0)
    assert len(set(network.chosen.values())) == 1


def forgetful() -> AgreementInstances:
    """It remembers one instance."""
    instances = AgreementInstances(1, lambda each: Random(str(each)), AgreementLimits(kept=1))
    instances.add_generation(7, 1, frozenset({1, 2, 3}))
    instances.add_generation(8, 1, frozenset({1, 4, 5}))
    return instances


def test_a_waiting_proposal_that_is_forgotten_ends() -> None:
    instances = forgetful()
    instances.propose(INSTANCE, b"x", 0.0)
    failed = [each for each in instances.propose((8, 1, 1), b"y", 0.0) if isinstance(each, ProposalFailed)]
    assert [each.instance for each in failed] == [INSTANCE]
    assert isinstance(failed[0].error, UsageError)
    assert not instances.votes_in(INSTANCE)


def test_a_proposal_that_raises_displaces_no_other() -> None:
    instances = forgetful()
    instances.propose(INSTANCE, b"x", 0.0)
    instances.voters_removed([Departure(4, "gone"), Departure(5, "gone")])
    with pytest.raises(PeerLost):
        instances.propose((8, 1, 1), b"y", 0.0)
    with pytest.raises(UsageError, match="too late"):
        instances.propose((9, 1, 1), b"y", 0.0)
    assert instances.votes_in(INSTANCE)


def test_a_failed_proposal_is_not_repeated() -> None:
    instances = AgreementInstances(1, lambda each: Random(str(each)))
    instances.add_generation(7, 1, frozenset({1, 2, 3}))
    instances.propose(INSTANCE, b"x", 0.0)
    instances.tick(1.0)
    failed = instances.voters_removed([Departure(2, "gone"), Departure(3, "gone")])
    assert [type(each) for each in failed] == [ProposalFailed]
    assert instances.due(2.0) is None
    assert instances.tick(60.0) == []


def _prepares_ahead(node: AgreementInstances, sender: NodeId, communicators: range) -> list[AgreementAction]:
    return [
        action
        for communicator in communicators
        for sequence in range(60_000, 60_300)
        for action in node.receive(sender, Prepare((communicator, 1, sequence), BallotNumber(1, sender)), 0.0)
    ]


@pytest.mark.parametrize("sender", [2, 66], ids=["voter of all", "voter of none"])
def test_messages_about_instances_ahead_displace_no_proposal(sender: NodeId) -> None:
    communicators = range(1, 6)
    node = AgreementInstances(1, lambda _: Random(1))
    for communicator in communicators:
        node.add_generation(communicator, 1, frozenset({1, 2, 3}))
    node.propose((1, 1, 1), b"value", 0.0)
    actions = _prepares_ahead(node, sender, communicators)
    assert not [each for each in actions if isinstance(each, ProposalFailed)]
    for communicator in communicators:
        node.propose((communicator, 1, 2), b"value", 0.0)


def test_a_node_that_is_no_voter_opens_no_instance() -> None:
    node = AgreementInstances(1, lambda _: Random(1))
    node.add_generation(1, 1, frozenset({1, 2, 3}))
    _prepares_ahead(node, 66, range(1, 2))
    assert node.due(0.0) is None
    assert node.missing((1, 1, 60_000)) == []


def _is_accepted(node: AgreementInstances, sequence: int, value: bytes) -> bool:
    """Ask it for its vote."""
    accept = Accept((1, 1, sequence), BallotNumber(1, 2), value)
    answers = [each.message for each in node.receive(2, accept, 0.0) if isinstance(each, SendMessage)]
    assert all(isinstance(each, Accepted) for each in answers)
    return bool(answers)


def test_values_that_are_accepted_and_never_chosen_have_a_bound() -> None:
    limits = AgreementLimits(kept_bytes=1000)
    node = AgreementInstances(1, lambda _: Random(1), limits)
    node.add_generation(1, 1, frozenset({1, 2, 3}))
    ahead = range(2, 2 + limits.ahead)
    accepted = [sequence for sequence in ahead if _is_accepted(node, sequence, bytes(100))]
    assert accepted == list(range(2, 12)), "10 values have 1000 bytes"
    assert _is_accepted(node, 2, bytes(100)), "again, when the answer was lost"
    node.propose((1, 1, 1), b"mine", 0.0)
    assert _is_accepted(node, 1, bytes(100)), "where this node proposes, it votes"
    node.receive(2, Chosen((1, 1, 1), bytes(100)), 0.0)
    assert not _is_accepted(node, 50, bytes(100))
    node.receive(2, Chosen((1, 1, 2), bytes(100)), 0.0)
    assert _is_accepted(node, 50, bytes(100)), "when another one is chosen, its sender has repeated it"
