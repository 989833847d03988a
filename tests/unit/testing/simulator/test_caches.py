"""What a run computes once gives the same run as computing it every time."""

from __future__ import annotations

from random import Random

import pytest

from nexar.cluster.decisions.node_machine import NodeMachine
from nexar.cluster.membership import Membership
from nexar.testing.simulator import Simulation
from nexar.testing.simulator.application import ApplicationPlan
from nexar.testing.simulator.generations import SimulatedGeneration
from nexar.testing.simulator.simulation import node_machine
from nexar.testing.simulator.world import RECOVERY_TIMEOUT
from nexar.types import NodeId

SEEDS = (*range(20, 30), 37)  # members join in some


@pytest.mark.parametrize("seed", SEEDS)
def test_sharing_memberships_does_not_change_a_run(seed: int) -> None:
    simulation = Simulation(seed, 9, remembered=None)
    is_active = simulation.cluster.world.policy == "automatic"

    def make(node: NodeId, membership: Membership, random: Random) -> NodeMachine:
        return node_machine(node, membership, random, active=is_active)

    assert Simulation(seed, 9, machine_factory=make, remembered=None).run() == simulation.run()


@pytest.mark.parametrize("seed", SEEDS)
def test_what_the_plan_keeps_does_not_change_a_run(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Simulation(seed, 9, remembered=None).run()
    draw, parts = ApplicationPlan._draw, ApplicationPlan.parts

    def draw_again(plan: ApplicationPlan, what: str, key: object, number: int) -> float:
        plan._draws.clear()
        return draw(plan, what, key, number)  # type: ignore[arg-type]

    def make_again(plan: ApplicationPlan, generation: SimulatedGeneration, number: int) -> list[object]:
        plan._parts.clear()
        return list(parts(plan, generation, number))

    monkeypatch.setattr(ApplicationPlan, "_draw", draw_again)
    monkeypatch.setattr(ApplicationPlan, "parts", make_again)
    assert Simulation(seed, 9, remembered=None).run() == expected


class _CheckedMachine(NodeMachine):
    asked = 0

    def due(self, now: float) -> float | None:
        remembered = super().due(now)
        self.membership_machine._due_is_old = self.successor_machine._due_is_old = True
        assert super().due(now) == remembered
        _CheckedMachine.asked += 1
        return remembered


@pytest.mark.parametrize("seed", SEEDS)
def test_a_machine_knows_at_any_time_when_it_is_due(seed: int) -> None:
    def make(node: NodeId, membership: Membership, random: Random) -> NodeMachine:
        return _CheckedMachine(node, membership, recovery_timeout=RECOVERY_TIMEOUT, random=random, longest_probe=3.0)

    before = _CheckedMachine.asked
    Simulation(seed, 9, machine_factory=make).run()
    assert _CheckedMachine.asked > before
