"""Machines that are broken on purpose, one law each: the simulator is worth what it finds of them."""

from collections.abc import Callable
from random import Random
from unittest.mock import patch

import msgspec

from nexar.cluster.decisions.membership_events import MembershipAction, MembershipInput, MessageReceived
from nexar.cluster.decisions.membership_machine import MembershipMachine
from nexar.cluster.decisions.node_machine import NodeMachine
from nexar.cluster.decisions.paxos import OK, Agreement, Electorate, Vote
from nexar.cluster.decisions.proposal import ChangeVoter
from nexar.cluster.membership import Membership
from nexar.testing.simulator import Simulation, SimulationResult
from nexar.testing.simulator.command import nodes_of
from nexar.testing.simulator.world import PROBE_TIMEOUT, RECOVERY_TIMEOUT
from nexar.wire.control import Suspect

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
    """No fence: messages of an older epoch count in this one, whoever says them."""

    def _instance(self) -> Agreement:
        agreement = super()._instance()
        agreement.voters = Anybody(self.membership)
        return agreement

    def step(self, event: MembershipInput, now: float) -> list[MembershipAction]:
        if isinstance(event, MessageReceived) and not isinstance(event.message, Suspect):
            communicator, epoch, sequence = event.message.instance
            if epoch < self.membership.epoch:
                instance = (communicator, self.membership.epoch, sequence)
                event = MessageReceived(event.sender, msgspec.structs.replace(event.message, instance=instance))
        return super().step(event, now)


class OnlyFirst(MembershipMachine):
    """Nobody but rank 0 proposes."""

    def _turn(self) -> float | None:
        return super()._turn() if self.membership.rank_of(self.me) == 0 else None


MUTANTS: dict[str, tuple[Running, str | tuple[str, ...], int]] = {
    "a third is enough": (_made(ThirdIsEnough), "a minority never decides", 10),
    "no fence": (_made(Unfenced), "an expelled node takes no part", 60),
    "stale ballots are accepted": (_patched(Vote, "allows", lambda *_: True), "no node votes below", 60),
    "removals are not judged": (_patched(ChangeVoter, "check", lambda *_: OK), "one node alone cannot expel", 20),
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
