"""Rules of `agree()` that are broken on purpose, at least one for each law of `agreement_laws`."""

from typing import Any
from unittest.mock import patch

from nexar.cluster.decisions.agreement_instances import AgreementInstances, ValueChosen
from nexar.cluster.decisions.paxos import Agreement
from nexar.testing.simulator import Simulation, SimulationResult
from tests.unit.testing.simulator.mutants import Running

_agreement = AgreementInstances._agreement
_after = AgreementInstances._after
_forget = AgreementInstances._forget
_end_all = AgreementInstances.end_all


def _patched(place: Any, name: str, instead: object) -> Running:
    def run(seed: int, nodes: int) -> SimulationResult:
        with patch.object(place, name, instead):
            return Simulation(seed, nodes).run()

    return run


def _own_value(self: AgreementInstances, agreement: Agreement, messages: Any, now: float) -> Any:
    """Each member takes its own value for the chosen one."""
    return [
        ValueChosen(each.instance, f"{self._me} in {each.instance}".encode()) if isinstance(each, ValueChosen) else each
        for each in _after(self, agreement, messages, now)
    ]


def _invents(self: AgreementInstances, agreement: Agreement, messages: Any, now: float) -> Any:
    """The result is a value that nobody proposed."""
    actions = _after(self, agreement, messages, now)
    return [ValueChosen(each.instance, b"x") if isinstance(each, ValueChosen) else each for each in actions]


def _one_vote(self: AgreementInstances, instance: Any) -> Any:
    """One vote is enough."""
    made, actions = _agreement(self, instance)
    if made is not None:
        made.needed = 1
    return made, actions


def _votes_again(self: AgreementInstances, instance: Any) -> Any:
    """A node does not remember which instances it forgot."""
    actions = _forget(self, instance)
    self._forgotten.clear()
    return actions


def _votes_after_end(self: AgreementInstances, error: Any) -> Any:
    """A terminated node ends its calls, and still votes."""
    voters = dict(self._voters)
    actions = _end_all(self, error)
    self._voters.update(voters)
    return actions


AGREEMENT_MUTANTS: dict[str, tuple[Running, str | tuple[str, ...], int]] = {
    "each member takes its own value": (_patched(AgreementInstances, "_after", _own_value), "one agreed value", 60),
    "a value is invented": (_patched(AgreementInstances, "_after", _invents), "an agreed value is proposed", 20),
    "one vote is enough": (_patched(AgreementInstances, "_agreement", _one_vote), "a majority agrees", 20),
    "forgotten instances are voted in again": (
        _patched(AgreementInstances, "_forget", _votes_again),
        "votes are remembered",
        300,
    ),
    "lost voters are waited for": (
        _patched(AgreementInstances, "voters_removed", lambda *_: []),
        "agreements end",
        200,
    ),
    "ballots are not repeated": (_patched(AgreementInstances, "tick", lambda *_: []), "agreements end", 100),
    "terminated nodes vote": (
        _patched(AgreementInstances, "end_all", _votes_after_end),
        "a terminated node agrees on nothing",
        300,
    ),
}
"""What is broken; the law by which it is found; and within how many seeds."""
