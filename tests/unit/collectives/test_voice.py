from nexar.collectives.voice import Voice
from nexar.wire.messages import GaveUp
from tests.unit.collectives.told_world import NODES, World

NOTICE = GaveUp(3, 1, 0, 0, "tired")


def test_what_is_spread_goes_to_all_that_are_linked_but_who_said_it() -> None:
    world = World(4, [(0, 1), (0, 2)])
    Voice(world[0]).spread(NOTICE)
    Voice(world[0]).spread(NOTICE, but=1)
    assert [(source, dest) for source, dest, _ in world.said] == [(0, 1), (0, 2), (0, 2)]


def test_a_lost_link_keeps_nobody_else_from_hearing() -> None:
    world = World(3)
    world[0].lines[1].cut = True
    Voice(world[0]).spread(NOTICE)
    assert [dest for _, dest, _ in world.said] == [2]


def test_a_rank_is_known_by_its_node_and_by_when_it_was_heard() -> None:
    world = World(2)
    peer = Voice(world[0]).known(1)
    assert (peer.rank, peer.node, peer.last_heard) == (1, NODES + 1, None)
    world[0].matching.ledger.heard[NODES + 1] = 0.0
    assert (Voice(world[0]).known(1).last_heard or 0.0) > 0.0
