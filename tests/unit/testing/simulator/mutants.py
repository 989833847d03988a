"""Machines that are broken on purpose, one law each: the simulator is worth what it finds of them."""

from collections.abc import Callable
from contextlib import ExitStack
from random import Random
from typing import Any
from unittest.mock import patch

import msgspec

from nexar.cluster.decisions.membership_events import (
    MembershipAction,
    MembershipDecided,
    MembershipInput,
    MembershipMessage,
    MessageReceived,
    SelfExpelled,
    SendMessage,
)
from nexar.cluster.decisions.membership_machine import MembershipMachine
from nexar.cluster.decisions.node_machine import NodeAction, NodeMachine
from nexar.cluster.decisions.paxos import _RETRY_INTERVAL, OK, Agreement, Ballot, Electorate, Vote, accept_any
from nexar.cluster.decisions.proposal import ChangeVoter, PendingChanges
from nexar.cluster.decisions.successor_events import AdoptMembership, RequestRenewal
from nexar.cluster.decisions.successor_machine import SuccessorMachine
from nexar.cluster.membership import Change, Membership
from nexar.testing.simulator import Simulation, SimulationResult
from nexar.testing.simulator.cluster import described_member
from nexar.testing.simulator.command import nodes_of
from nexar.testing.simulator.world import PROBE_TIMEOUT, RECOVERY_TIMEOUT
from nexar.wire.control import Accept, BallotNumber, Chosen, Prepare, Promise, Suspect

Running = Callable[[int, int], SimulationResult]
"""Runs a seed with so many nodes, with a broken machine."""


def _made(kind: type[MembershipMachine]) -> Running:
    def make(node: int, membership: Membership, random: Random) -> NodeMachine:
        timeouts = {"recovery_timeout": RECOVERY_TIMEOUT, "probe_timeout": PROBE_TIMEOUT}
        machine = NodeMachine(node, membership, **timeouts, random=random)
        machine.membership_machine = kind(node, membership, **timeouts, random=random)
        return machine

    return lambda seed, nodes: Simulation(seed, nodes, machine_factory=make).run()


def _patched(kind: type, name: str, instead: object) -> Running:
    def run(seed: int, nodes: int) -> SimulationResult:
        with patch.object(kind, name, instead):
            return Simulation(seed, nodes).run()

    return run


def _patched_all(*places: tuple[type, str, object]) -> Running:
    def run(seed: int, nodes: int) -> SimulationResult:
        with ExitStack() as stack:
            for place in places:
                stack.enter_context(patch.object(*place))
            return Simulation(seed, nodes).run()

    return run


class ThirdIsEnough(MembershipMachine):
    """No majority: a third of the voters decides."""

    def _instance(self) -> Agreement:
        agreement = super()._instance()
        agreement.needed = max(1, len(agreement.voters) // 3)
        return agreement


class Anybody(Electorate):
    """Takes everybody for a voter."""

    def __contains__(self, node: object) -> bool:
        return True


class Unfenced(MembershipMachine):
    """No fence: messages of an older epoch count in this one, whoever says them, except questions for changes: who is
    behind would ask for ever.
    """

    def _instance(self) -> Agreement:
        agreement = super()._instance()
        agreement.voters = Anybody(self.membership)
        return agreement

    def step(self, event: MembershipInput, now: float) -> list[MembershipAction]:
        if isinstance(event, MessageReceived) and not isinstance(event.message, Suspect) and not _asks(event.message):
            communicator, epoch, sequence = event.message.instance
            if epoch < self.membership.epoch:
                instance = (communicator, self.membership.epoch, sequence)
                event = MessageReceived(event.sender, msgspec.structs.replace(event.message, instance=instance))
        return super().step(event, now)


def _asks(message: MembershipMessage) -> bool:
    return isinstance(message, Prepare) and message.ballot.round == 0


class AdoptsOwnRemoval(MembershipMachine):
    """A removed node enters the membership without it."""

    def _adopt(self, value: bytes, now: float) -> list[MembershipAction]:
        actions = super()._adopt(value, now)
        if not any(isinstance(each, SelfExpelled) for each in actions):
            return actions
        return [MembershipDecided(Change.decode(value)), *actions]


class OnlyFirst(MembershipMachine):
    """Nobody but rank 0 proposes."""

    def _turn(self) -> float | None:
        return super()._turn() if self.membership.rank_of(self.me) == 0 else None


def _allows_stale(vote: Vote, ballot: BallotNumber) -> bool:
    """A promise about the next membership is not kept."""
    return vote.instance[2] == 0 or _allows(vote, ballot)


_allows = Vote.allows


def _two_memberships(self: Agreement, sender: int, message: Any, now: float, check: Any = accept_any) -> Any:
    """A node that is told of the next membership takes another one."""
    if isinstance(message, Chosen) and message.instance[2] == 0:
        message = msgspec.structs.replace(message, value=_renewing(message.value, 77))
    return _receive(self, sender, message, now, check)


def _renewing(value: bytes, communicator: int) -> bytes:
    """The change that also renews this communicator."""
    return msgspec.structs.replace(Change.decode(value), renewed=(communicator,)).encode()


_receive = Agreement.receive


def _adopts_twice(self: NodeMachine, first: Any, now: float) -> list[NodeAction]:
    """Each membership is adopted two times."""
    actions = _follow(self, first, now)
    return [each for action in actions for each in (action,) * (1 + isinstance(action, AdoptMembership))]


_follow = NodeMachine._follow


def _two_values(self: Agreement, ballot: Ballot) -> Accept:
    """A proposer that repeats its request asks for another value."""
    accept = _accept(self, ballot)
    if accept.instance[2] == 0 and ballot.interval > _RETRY_INTERVAL:
        return msgspec.structs.replace(accept, value=_renewing(accept.value, 77))
    return accept


_accept = Agreement._accept


def _forgets_accepted(self: Agreement, sender: int, message: Any, check: Any) -> Any:
    """A promise does not name what the voter has accepted."""
    answers = _handle_request(self, sender, message, check)
    return [
        SendMessage(each.node, msgspec.structs.replace(each.message, accepted=None, value=b""))
        if isinstance(each.message, Promise) and each.message.instance[2] == 0
        else each
        for each in answers
    ]


_handle_request = Agreement._handle_request


def _readmits(self: PendingChanges, suspicions: Any, *, may_remove_lost: bool = True) -> Change | None:
    """A change that follows a removal lets the removed node in again."""
    draft = _draft(self, suspicions, may_remove_lost=may_remove_lost)
    if draft is None or not draft.gone:
        return draft
    return msgspec.structs.replace(draft, joined=tuple(described_member(node) for node in sorted(draft.gone)))


def _invites(self: PendingChanges, suspicions: Any, *, may_remove_lost: bool = True) -> Change | None:
    """Every change also lets in a node that nobody admitted."""
    draft = _draft(self, suspicions, may_remove_lost=may_remove_lost)
    return None if draft is None else msgspec.structs.replace(draft, joined=(described_member(500),))


_draft = PendingChanges.draft


def _never_content(self: NodeMachine, action: Any, now: float) -> Any:
    """Every change is followed by another one."""
    actions = _consequences(self, action, now)
    return [*actions, RequestRenewal((0,), 0)] if isinstance(action, MembershipDecided) else actions


_consequences = NodeMachine._consequences


def _fails(self: SuccessorMachine, number: int, failure: Any) -> Any:
    """A failed build is an error of the machine."""
    raise LookupError(number)


MUTANTS: dict[str, tuple[Running, str | tuple[str, ...], int]] = {
    "a third is enough": (_made(ThirdIsEnough), "a minority never decides", 10),
    "no fence": (_made(Unfenced), "an expelled node takes no part", 60),
    "stale ballots are accepted": (_patched(Vote, "allows", _allows_stale), "no node votes below", 60),
    "removals are not judged": (_patched(ChangeVoter, "check", lambda *_: OK), "one node alone cannot expel", 20),
    "two memberships in one epoch": (
        _patched(Agreement, "receive", _two_memberships),
        "each epoch has one membership",
        20,
    ),
    "memberships are adopted twice": (_patched(NodeMachine, "_follow", _adopts_twice), "epochs grow one by one", 20),
    "a repeated request has another value": (_patched(Agreement, "_accept", _two_values), "a ballot has one value", 60),
    "a promise does not name the accepted value": (
        _patched(Agreement, "_handle_request", _forgets_accepted),
        "votes are remembered",
        60,
    ),
    "a removed node adopts its removal": (_made(AdoptsOwnRemoval), "an expelled node takes no part", 60),
    "removed nodes join again": (
        _patched_all((PendingChanges, "draft", _readmits), (PendingChanges, "expects", lambda *_: True)),
        "an expelled node takes no part",
        60,
    ),
    "anybody joins": (
        _patched_all((PendingChanges, "draft", _invites), (PendingChanges, "expects", lambda *_: True)),
        "only admitted nodes join",
        60,
    ),
    "changes follow changes for ever": (
        _patched(NodeMachine, "_consequences", _never_content),
        "a cluster settles",
        20,
    ),
    "a machine raises": (_patched(SuccessorMachine, "_build_failed", _fails), "a machine does not fail", 60),
    "only rank 0 proposes": (_made(OnlyFirst), ("a live majority continues", "calls end"), 20),
}
"""What is broken; the law, or one of the laws, by which it is found; and within how many seeds."""


def first_caught(run: Running, *, within: int, first: int = 0) -> tuple[SimulationResult, int] | None:
    """The first run in which a law was broken, and its seed; None: it was broken in none of so many."""
    for seed in range(first, first + within):
        outcome = run(seed, nodes_of(seed, 3, 9))
        if outcome.broken:
            return outcome, seed
    return None
