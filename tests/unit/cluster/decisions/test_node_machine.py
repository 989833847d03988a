"""Membership and successors in one machine: what one decides, the other follows."""

from random import Random

from nexar.cluster.decisions.membership_events import ChangeRequested
from nexar.cluster.decisions.node_machine import NodeMachine
from nexar.cluster.decisions.successor_events import (
    AdoptMembership,
    BeginRequested,
    BuildFinished,
    Interrupt,
    StartBuild,
)
from nexar.cluster.membership import WORLD
from tests.unit.cluster.decisions.successor_scene import key, membership


def alone() -> NodeMachine:
    """A world of one decides at once."""
    machine = NodeMachine(1, membership(1), recovery_timeout=30.0, random=Random(0))
    machine.step(BeginRequested(1, WORLD, membership(1)), 0.0)
    machine.step(BuildFinished(1), 0.0)
    return machine


def test_a_decided_membership_becomes_the_actions_of_the_successor_machine_in_order() -> None:
    machine = alone()
    actions = machine.step(ChangeRequested(renewed=(WORLD,), epoch=1), 0.0)
    assert [type(action) for action in actions] == [Interrupt, AdoptMembership, StartBuild]
    assert actions[0] == Interrupt(key(WORLD, 1))
    assert machine.membership_machine.membership == machine.successor_machine.world == membership(1, epoch=2)
