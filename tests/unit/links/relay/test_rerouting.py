"""A way that breaks is replaced; where none is left, the two connect; only if they cannot, the carrier is lost."""

import re

import pytest

from nexar.topology.neighbors import neighbors
from tests.unit.links.relay.small_world import SmallWorld, say

WORDS = [b"%d" % number for number in range(50)]


@pytest.fixture
def parted() -> SmallWorld:
    """A ring of six whose ranks 1 and 4 have closed their connections, in the middle of what 0 says to 3."""
    world = SmallWorld(6)
    world.may_dial = True
    carrier = world.nodes[0].make(3)
    for word in WORDS[:25]:
        say(carrier, word)
    world.leave(1)
    world.leave(4)
    world.run()
    return world


def test_who_has_no_way_left_waits_and_wants_a_connection_to_the_peer_itself_once(parted: SmallWorld) -> None:
    carrier = parted.nodes[0].carriers[3]
    for word in WORDS[25:]:
        say(carrier, word)
    parted.run()
    assert carrier.error is None
    assert carrier.stranded is not None
    assert parted.dials.count((0, 3)) == 1


def test_when_the_two_are_connected_everything_arrives_once_and_in_order(parted: SmallWorld) -> None:
    carrier = parted.nodes[0].carriers[3]
    for word in WORDS[25:]:
        say(carrier, word)
    parted.dial(0, 3)
    say(parted.nodes[3].carriers[0], b"well heard")
    parted.settle(carrier)
    assert parted.nodes[3].ears[0].frames == WORDS
    assert parted.nodes[0].ears[3].frames == [b"well heard"]
    assert (carrier.route, carrier.stranded) == ((0, 3), None)


def test_when_no_connection_comes_about_it_is_lost_with_the_hop_and_the_reason(parted: SmallWorld) -> None:
    parted.nodes[0].station.unreachable(3, "nobody listens there")
    parted.nodes[0].station.unreachable(3, "and again")
    parted.run()
    (lost,) = parted.nodes[0].ears[3].lost
    named = r"no way is left over other nodes: node .*, and no connection of its own came about: nobody listens"
    assert re.search(named, lost.reason)


def test_one_that_is_not_stranded_does_not_care_whether_somebody_else_s_dial_failed() -> None:
    world = SmallWorld(6)
    carrier = world.nodes[0].make(3)
    world.nodes[0].station.unreachable(3, "of no interest")
    world.nodes[0].station.opened(3)
    say(carrier, b"over others")
    world.settle(carrier)
    assert (carrier.route, carrier.error) == ((0, 1, 2, 3), None)


def test_a_change_of_the_members_may_bring_a_way_before_the_dial_is_over(parted: SmallWorld) -> None:
    carrier = parted.nodes[0].carriers[3]
    parted.dial(0, 2)
    parted.topology = "k_regular:4"  # in which 2 is a neighbour of 0
    for node in (parted.nodes[0], parted.nodes[2], parted.nodes[3]):
        node.station.adopt(lambda number: number not in (1, 4))
    parted.nodes[0].station.unreachable(3, "it was not needed any more")
    say(carrier, b"over 2")
    parted.settle(carrier)
    assert (carrier.route, carrier.error) == ((0, 2, 3), None)
    assert parted.nodes[3].ears[0].frames == [*WORDS[:25], b"over 2"]


def test_who_does_not_answer_on_one_way_and_comes_on_another_is_spoken_to_there() -> None:
    """Rank 4 takes what 3 gives it for 0, and passes nothing on; nobody has missed it yet."""
    world = SmallWorld(6)
    there, back = world.nodes[0].make(3), world.nodes[3].make(0)
    world.nodes[3].station._rerouting._take(back, (3, 4, 5, 0))

    def step() -> None:
        world.wires[3, 4].clear()
        world.step()

    say(back, b"lost at 4")
    for now in (1e9, 2e9, 3e9):
        say(there, b"hello")
        world.nodes[3].station.tick(now)
        for _ in range(100):
            step()
    assert back.route == (3, 2, 1, 0)
    assert world.nodes[0].ears[3].frames == [b"lost at 4"]
    assert not back.outgoing.unacked


def test_a_question_is_answered_on_the_way_on_which_it_came() -> None:
    world = SmallWorld(6)
    there, back = world.nodes[0].make(3), world.nodes[3].make(0)
    world.nodes[3].station._rerouting._take(back, (3, 4, 5, 0))
    say(there, b"hello")
    world.nodes[0].station.tick(1e9)
    while there.outgoing.unacked:
        world.wires[3, 4].clear()
        assert world.step()
    assert back.route == (3, 4, 5, 0)


@pytest.mark.parametrize("topology", ["k_regular:2", "k_regular:4", "hypercube"])
@pytest.mark.parametrize("seed", range(12))
def test_whoever_leaves_or_dies_everything_between_those_that_stay_arrives(topology: str, seed: int) -> None:
    world = SmallWorld(9, topology, seed)
    world.may_dial = True
    chance = world.chance
    goers = chance.sample(range(9), 5)
    stayers = [number for number in range(9) if number not in goers]
    pairs = [(one, other) for one in stayers for other in stayers if other > one]
    far = [(one, other) for one, other in pairs if other not in neighbors(topology, 9, one)]
    talks = {(one, other): world.nodes[one].make(other) for one, other in far}
    said: dict[tuple[int, int], list[bytes]] = {pair: [] for pair in talks}
    for number in range(300):
        for pair, carrier in talks.items():
            said[pair].append(b"%d" % number + bytes(chance.choice((0, 100, 20_000))))
            say(carrier, said[pair][-1])
        for _ in range(chance.randrange(30)):
            world.step()
        if number % 50 == 25 and goers:
            (world.leave if number % 100 == 25 else world.kill)(goers.pop())
        if chance.random() < 0.2:
            world.dial_all()
    for _ in range(len(far) + 1):  # who is connected may only then hear that the other way is gone
        world.run()
        world.dial_all()
    world.settle(*talks.values())
    for (one, other), carrier in talks.items():
        assert carrier.error is None
        assert world.nodes[other].ears[one].frames == said[one, other]


def test_who_hears_the_peer_on_a_connection_of_its_own_takes_that_and_sends_again_what_is_elsewhere() -> None:
    world = SmallWorld(6)
    carrier = world.nodes[0].make(3)
    for word in WORDS:
        say(carrier, word)
    for _ in range(60):
        world.step()
    world.dial(0, 3)
    other = world.nodes[3].carriers.get(0) or world.nodes[3].make(0)
    world.nodes[3].station._rerouting.straighten(other)
    say(other, b"straight")
    world.settle(carrier, other)
    assert carrier.route == (0, 3)
    assert world.nodes[3].ears[0].frames == WORDS
    assert world.nodes[0].ears[3].frames == [b"straight"]
