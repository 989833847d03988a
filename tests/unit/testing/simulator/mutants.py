"""Machines that are broken on purpose, one law each: the simulator is worth what it finds of them."""

from collections.abc import Callable
from random import Random
from unittest.mock import patch

import msgspec

from nexar.cluster.decisions.agreement import Agreement
from nexar.cluster.decisions.ballot import Ballot
from nexar.cluster.decisions.judging import Judging
from nexar.cluster.decisions.succession import Succession
from nexar.cluster.decisions.succession_events import Action, Event, Heard
from nexar.cluster.decisions.vote import OK, Vote
from nexar.cluster.decisions.witness import Witness
from nexar.cluster.membership import Membership
from nexar.testing.simulator import Outcome, Simulation
from nexar.testing.simulator.command import nodes_of
from nexar.testing.simulator.world import PROBE_TIMEOUT, RECOVERY_TIMEOUT
from nexar.wire.messages import Prepare, Suspect

Running = Callable[[int, int], Outcome]
"""Runs a seed with so many nodes, with a broken machine."""


def _made(kind: type[Succession]) -> Running:
    def make(node: int, membership: Membership, random: Random) -> Succession:
        timeouts = {"recovery_timeout": RECOVERY_TIMEOUT, "probe_timeout": PROBE_TIMEOUT}
        return kind(node, membership, **timeouts, random=random)

    return lambda seed, nodes: Simulation(seed, nodes, making=make).run()


def _patched(kind: type, name: str, instead: object) -> Running:
    def run(seed: int, nodes: int) -> Outcome:
        with patch.object(kind, name, instead):
            return Simulation(seed, nodes).run()

    return run


class ThirdIsEnough(Succession):
    """No majority: a third of the voters decides."""

    def _instance(self) -> Agreement:
        agreement = super()._instance()
        agreement.needed = max(1, len(agreement.voters) // 3)
        return agreement


class Unfenced(Succession):
    """No fence: words of an older epoch count in this one."""

    def step(self, event: Event, now: float) -> list[Action]:
        if isinstance(event, Heard) and not isinstance(event.word, Suspect):
            communicator, epoch, sequence = event.word.instance
            if epoch < self.membership.epoch:
                instance = (communicator, self.membership.epoch, sequence)
                event = Heard(event.sender, msgspec.structs.replace(event.word, instance=instance))
        return super().step(event, now)


class Secretive(Succession):
    """Who is behind is not told what was chosen."""

    def step(self, event: Event, now: float) -> list[Action]:
        if (
            isinstance(event, Heard)
            and isinstance(event.word, Prepare)
            and event.word.instance[1] < self.membership.epoch
        ):
            return []
        return super().step(event, now)

    def changes_since(self, epoch: int) -> list[bytes]:
        return []


def _forgetful(seed: int, nodes: int) -> Outcome:
    """A seed that was started again has forgotten its vote, and votes."""
    return Simulation(seed, nodes, witnessing=lambda membership, _, __: Witness(membership)).run()


MUTANTS: dict[str, Running] = {
    "a third is enough": _made(ThirdIsEnough),
    "no fence": _made(Unfenced),
    "stale ballots are accepted": _patched(Vote, "allows", lambda *_: True),
    "promises are not looked at": _patched(Ballot, "binding", lambda *_: None),
    "removals are not judged": _patched(Judging, "judge", lambda *_: OK),
    "who is behind is not told": _made(Secretive),
    "the seed forgets its vote": _forgetful,
}


def first_caught(run: Running, *, within: int, least: int = 3, most: int = 9) -> Outcome | None:
    """The first run in which a law was broken; None: in none of them."""
    outcomes = (run(seed, nodes_of(seed, least, most)) for seed in range(within))
    return next((outcome for outcome in outcomes if outcome.broken), None)
