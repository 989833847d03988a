"""Which generation comes next, when it is built, and what calls on the old one raise: events and their actions."""

from nexar.cluster.decisions.successor_events import (
    AdoptMembership,
    DropPeer,
    Interrupt,
    OpenGeneration,
    SetOutcome,
    StartBuild,
    Superseded,
)
from nexar.cluster.decisions.successor_machine import FIRST_BUILD
from nexar.cluster.membership import WORLD, Change
from tests.unit.cluster.decisions.successor_scene import Scene, key, killed, membership, only

# ---------------------------------------------------------------- a loss


def test_a_first_generation_is_built_and_opened() -> None:
    scene = Scene()
    assert scene.request() == [StartBuild(1, WORLD, membership(1, 2, 3), None)]
    assert scene.finish(StartBuild(1, WORLD, membership(1, 2, 3), None)) == [OpenGeneration(1, key(WORLD, 1), None)]
    assert scene.machine.generations() == [key(WORLD, 1)]


def test_a_loss_interrupts_the_world_before_links_close_and_then_its_successor_is_built() -> None:
    scene = Scene()
    world = scene.begin()
    change, after = Change(2, left=killed(2)), membership(1, 3, epoch=2)
    assert scene.change(left=killed(2)) == [
        Interrupt(world),
        AdoptMembership(change, after),
        DropPeer(2, "node 2 was killed"),
        StartBuild(FIRST_BUILD, WORLD, after, world),
    ]
    new = key(WORLD, 2)
    assert scene.finish(StartBuild(FIRST_BUILD, WORLD, after, world), 4) == [
        OpenGeneration(FIRST_BUILD, new, world),
        SetOutcome(world, Superseded(new, {1: "node 2 was killed"}, (), 4, agreed=False)),
    ]
    assert scene.machine.generations() == [new]


def test_a_joiner_is_named_by_its_new_rank() -> None:
    scene = Scene()
    world = scene.begin()
    made = only(scene.change(left=killed(2), joined=membership(8, 9).members))
    (_, outcome) = scene.finish(made)
    assert outcome == SetOutcome(world, Superseded(made.key, {1: "node 2 was killed"}, (2, 3), None, agreed=False))
