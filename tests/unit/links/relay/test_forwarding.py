"""What waits to be believed: within a bound for each neighbour, the newest of it.

Room by hops travelled, and why it never comes to a circle of waits.

A way that breaks is replaced; where none is left, the two connect; only if they cannot, the carrier is lost.

What waits at which neighbour, and who is informed that there is room.
"""

import random
import re
from typing import Any, cast

import pytest

from nexar.errors import PeerLost
from nexar.links.relay.forwarding import (
    CLASS_BYTES,
    HELD_BYTES,
    MAX_SOURCES,
    NOTICE_BYTES,
    RETURN_BYTES,
    Forward,
    HeldFrames,
    NeighbourQueue,
    Neighbours,
    QueuedFrame,
    ReturnedCredit,
)
from nexar.topology import neighbors
from nexar.wire.frame import FrameError
from nexar.wire.relay import RelayHeader, RelayKind
from tests.unit.links.relay.small_world import SmallWorld, say


def header(source: int, over: int, sequence: int = 0, number: int = 1) -> RelayHeader:
    return RelayHeader(RelayKind.FRAME, 2, number, 1, sequence, 0, (source, over, 9))


def test_all_of_it_comes_back_in_order() -> None:
    held = HeldFrames()
    assert not held
    for number in range(3):
        held.put(header(1, 5, number), b"%d" % number)
    assert held
    assert [each.carried for each in held.take()] == [b"0", b"1", b"2"]
    assert not held
    assert held.take() == []


def test_that_of_one_source_comes_back_and_the_rest_stays() -> None:
    held = HeldFrames()
    for source in (1, 2, 1):
        held.put(header(source, 5), b"of %d" % source)
    assert [each.carried for each in held.take(1)] == [b"of 1", b"of 1"]
    assert [each.carried for each in held.take()] == [b"of 2"]


def test_the_oldest_makes_room_and_only_for_what_comes_over_the_same_neighbour() -> None:
    held = HeldFrames()
    held.put(header(1, 5), b"honest")
    for number in range(40):
        held.put(header(1000 + number, 6, number), bytes(HELD_BYTES // 4))
    frames = held.take()
    assert [each.carried for each in frames if each.header.route[1] == 5] == [b"honest"]
    assert [each.header.sequence for each in frames if each.header.route[1] == 6] == [37, 38, 39]
    assert held.displaced == 37


def test_frames_that_carry_nothing_count_too() -> None:
    held = HeldFrames()
    for number in range(10_000):
        held.put(header(1, 5, number), b"")
    assert len(held.take()) < HELD_BYTES // 256


def test_one_frame_is_held_however_large_it_is() -> None:
    held = HeldFrames()
    held.put(header(1, 5), bytes(2 * HELD_BYTES))
    assert len(held.take()) == 1


def hop(number: int = 1) -> NeighbourQueue:
    made = NeighbourQueue(number)
    made.link = cast(Any, object())
    return made


def test_nothing_goes_before_there_is_a_link() -> None:
    waits = NeighbourQueue(1)
    waits.put(QueuedFrame(1, b"x", None))
    assert waits.take() is None
    waits.link = cast(Any, object())
    assert waits.take() == QueuedFrame(1, b"x", None)


def test_a_class_takes_so_much_and_others_are_not_held_up_by_it() -> None:
    full = hop()
    full.sent(1, CLASS_BYTES)
    full.put(QueuedFrame(1, b"near", None))
    full.put(QueuedFrame(2, b"far", None))
    assert full.take() == QueuedFrame(2, b"far", None)
    assert full.take() is None
    assert full.waits == 1
    full.credit_returned(1, 1)
    assert full.take() == QueuedFrame(1, b"near", None)


def test_what_has_come_the_farthest_goes_first() -> None:
    waits = hop()
    for hops in (1, 3, 2):
        waits.put(QueuedFrame(hops, b"", None))
    assert [each.hops for each in iter(waits.take, None)] == [3, 2, 1]


def test_room_is_given_back_in_amounts_that_no_sender_waits_for() -> None:
    came = hop()
    came.count_received(1, RETURN_BYTES)
    assert came.count_forwarded(1, RETURN_BYTES - 1) == 0
    assert came.count_forwarded(1, 1) == RETURN_BYTES


def test_who_gives_more_than_there_is_room_for_is_found_out() -> None:
    came = hop()
    came.count_received(1, CLASS_BYTES)
    came.count_received(2, 1)
    with pytest.raises(FrameError, match="after 1 hops"):
        came.count_received(1, 1)


def test_what_waits_for_who_is_gone_can_be_had_back() -> None:
    waits = hop()
    for hops in (2, 1):
        waits.put(QueuedFrame(hops, b"", None))
    assert [each.hops for each in waits.drain()] == [1, 2]
    assert waits.waits == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_ring_full_of_frames_that_all_go_halfway_round_runs_empty(seed: int) -> None:
    """Each node of a ring sends without end to the one opposite: with one class for all, everybody would wait for
    everybody. What one frame may lie in is a class of its own for each hop, so all arrive.
    """
    chance, size, each = random.Random(seed), 8, 60_000
    out = [hop(node) for node in range(size)]  # out[n]: from n to n + 1
    came = [hop(node) for node in range(size)]  # came[n]: what n has from n - 1
    left, arrived = [40] * size, 0
    wire: list[list[tuple[int, bytes]]] = [[] for _ in range(size)]
    for _ in range(200_000):
        node = chance.randrange(size)
        if left[node] and out[node].has_room(1):
            left[node] -= 1
            out[node].sent(1, each)
            wire[node].append((1, bytes(each)))
        before = (node - 1) % size
        if wire[before]:
            hops, body = wire[before].pop(0)
            came[node].count_received(hops, each)
            if hops == size // 2:
                arrived += 1
                out[before].credit_returned(hops, came[node].count_forwarded(hops, each))
            else:
                out[node].put(QueuedFrame(hops + 1, body, came[node]))
        while (found := out[node].take()) is not None:
            wire[node].append((found.hops, bytes(found.body)))
            assert found.received_from is not None
            out[before].credit_returned(found.hops - 1, found.received_from.count_forwarded(found.hops - 1, each))
        if arrived == 40 * size:
            break
    assert arrived == 40 * size


def test_room_for_what_never_went_there_is_not_remembered() -> None:
    full = hop()
    full.sent(1, CLASS_BYTES)
    for hops in range(2, 1000):
        full.credit_returned(hops, 10)
    full.credit_returned(1, 2 * CLASS_BYTES)
    assert full.has_room(1)
    assert not full._sent


def test_messages_of_this_node_s_own_wait_within_a_bound_and_frames_of_others_do_not_count() -> None:
    waits = NeighbourQueue(1)
    waits.put(QueuedFrame(2, bytes(NOTICE_BYTES), hop(2)))
    assert waits.accepts_notices
    waits.put(QueuedFrame(1, bytes(NOTICE_BYTES), None))
    assert not waits.accepts_notices
    waits.link = cast(Any, object())
    while waits.take() is not None:
        continue
    assert waits.accepts_notices


def test_who_invents_sources_keeps_nobody_from_being_remembered() -> None:
    way = hop()
    way.remember((0, 5, 9))
    for invented in range(MAX_SOURCES + 10):
        way.remember((0, 6, 1000 + invented))
    way.remember((0, 6, 7))
    assert {(0, 5, 9), (0, 6, 7)} <= set(way.sources)
    assert len(way.sources) == MAX_SOURCES + 1


def test_who_says_that_it_brings_frames_of_another_does_not_take_its_place() -> None:
    way = hop()
    way.remember((0, 5, 9))
    way.remember((0, 6, 66, 9))
    way.remember((0, 5, 4, 9))
    assert way.sources == [(0, 5, 4, 9), (0, 6, 66, 9)]


MESSAGES = [b"%d" % number for number in range(50)]


@pytest.fixture
def parted() -> SmallWorld:
    """A ring of six whose ranks 1 and 4 have closed their connections, in the middle of what 0 says to 3."""
    world = SmallWorld(6)
    world.may_dial = True
    carrier = world.nodes[0].make(3)
    for message in MESSAGES[:25]:
        say(carrier, message)
    world.leave(1)
    world.leave(4)
    world.run()
    return world


def test_who_has_no_way_left_waits_and_wants_a_connection_to_the_peer_itself_once(parted: SmallWorld) -> None:
    carrier = parted.nodes[0].carriers[3]
    for message in MESSAGES[25:]:
        say(carrier, message)
    parted.run()
    assert carrier.error is None
    assert carrier.no_route is not None
    assert parted.dials.count((0, 3)) == 1


def test_when_the_two_are_connected_everything_arrives_once_and_in_order(parted: SmallWorld) -> None:
    carrier = parted.nodes[0].carriers[3]
    for message in MESSAGES[25:]:
        say(carrier, message)
    parted.dial(0, 3)
    say(parted.nodes[3].carriers[0], b"well heard")
    parted.settle(carrier)
    assert parted.nodes[3].ears[0].frames == MESSAGES
    assert parted.nodes[0].ears[3].frames == [b"well heard"]
    assert (carrier.route, carrier.no_route) == ((0, 3), None)


def test_when_no_connection_comes_about_it_is_lost_with_the_hop_and_the_reason(parted: SmallWorld) -> None:
    parted.nodes[0].relay.unreachable(3, "nobody listens there")
    parted.nodes[0].relay.unreachable(3, "and again")
    parted.run()
    (lost,) = parted.nodes[0].ears[3].lost
    named = r"no route over other nodes is left: node .*, and the direct connection failed: nobody listens"
    assert re.search(named, lost.reason)


def test_one_that_is_not_stranded_does_not_care_whether_somebody_else_s_dial_failed() -> None:
    world = SmallWorld(6)
    carrier = world.nodes[0].make(3)
    world.nodes[0].relay.unreachable(3, "of no interest")
    world.nodes[0].relay.opened(3)
    say(carrier, b"over others")
    world.settle(carrier)
    assert (carrier.route, carrier.error) == ((0, 1, 2, 3), None)


def test_a_change_of_the_members_may_bring_a_way_before_the_dial_is_over(parted: SmallWorld) -> None:
    carrier = parted.nodes[0].carriers[3]
    parted.dial(0, 2)
    parted.topology = "k_regular:4"  # in which 2 is a neighbour of 0
    for node in (parted.nodes[0], parted.nodes[2], parted.nodes[3]):
        node.relay.adopt(lambda number: number not in (1, 4))
    parted.nodes[0].relay.unreachable(3, "it was not needed any more")
    say(carrier, b"over 2")
    parted.settle(carrier)
    assert (carrier.route, carrier.error) == ((0, 2, 3), None)
    assert parted.nodes[3].ears[0].frames == [*MESSAGES[:25], b"over 2"]


def test_who_does_not_answer_on_one_way_and_comes_on_another_is_spoken_to_there() -> None:
    """Rank 4 takes what 3 gives it for 0, and passes nothing on; nobody has missed it yet."""
    world = SmallWorld(6)
    there, back = world.nodes[0].make(3), world.nodes[3].make(0)
    world.nodes[3].relay._rerouting._take(back, (3, 4, 5, 0))

    def step() -> None:
        world.wires[3, 4].clear()
        world.step()

    say(back, b"lost at 4")
    for now in (1e9, 2e9, 3e9):
        say(there, b"hello")
        world.nodes[3].relay.tick(now)
        for _ in range(100):
            step()
    assert back.route == (3, 2, 1, 0)
    assert world.nodes[0].ears[3].frames == [b"lost at 4"]
    assert not back.outgoing.unacked


def test_a_question_is_answered_on_the_way_on_which_it_came() -> None:
    world = SmallWorld(6)
    there, back = world.nodes[0].make(3), world.nodes[3].make(0)
    world.nodes[3].relay._rerouting._take(back, (3, 4, 5, 0))
    say(there, b"hello")
    world.nodes[0].relay.tick(1e9)
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
    for _ in range(len(far) + 1):  # who is connected may only then learn that the other way is gone
        world.run()
        world.dial_all()
    world.settle(*talks.values())
    for (one, other), carrier in talks.items():
        assert carrier.error is None
        assert world.nodes[other].ears[one].frames == said[one, other]


def test_who_receives_from_the_peer_on_a_connection_of_its_own_takes_that_and_sends_again_what_is_elsewhere() -> None:
    world = SmallWorld(6)
    carrier = world.nodes[0].make(3)
    for message in MESSAGES:
        say(carrier, message)
    for _ in range(60):
        world.step()
    world.dial(0, 3)
    other = world.nodes[3].carriers.get(0) or world.nodes[3].make(0)
    world.nodes[3].relay._rerouting.take_direct(other)
    say(other, b"straight")
    world.settle(carrier, other)
    assert carrier.route == (0, 3)
    assert world.nodes[3].ears[0].frames == MESSAGES
    assert world.nodes[0].ears[3].frames == [b"straight"]


class Around:
    """One neighbour has a link, one is about to have one, all others are none."""

    def __init__(self) -> None:
        self.links: dict[int, Any] = {1: Link(1)}
        self.opening: list[int] = []

    def link(self, node: int) -> Any:
        return self.links.get(node)

    def open(self, node: int) -> bool:
        self.opening.append(node)
        return node == 2


class Link:
    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.failure: PeerLost | None = None


def test_a_neighbour_is_opened_once_and_who_is_none_is_no_way() -> None:
    around = Around()
    ways = Neighbours(cast(Any, around))
    assert ways.get_or_open(1) is ways.get(1) is not None
    assert ways.get_or_open(2) is ways.get_or_open(2) is not None
    assert ways.get_or_open(3) is None
    assert around.opening == [2, 3]


def test_what_waits_for_a_link_goes_when_it_is_there() -> None:
    around = Around()
    ways = Neighbours(cast(Any, around))
    hop = ways.get_or_open(2)
    assert hop is not None
    ways.put(hop, QueuedFrame(1, b"word", None))
    assert ways.next() is None
    around.links[2] = Link(2)
    ways.wake(hop)
    assert ways.next() == Forward(around.links[2], (b"word",), None)
    assert ways.next() is None
    assert not ways.is_busy


def test_a_link_that_is_lost_is_no_way() -> None:
    around = Around()
    ways = Neighbours(cast(Any, around))
    hop = ways.get_or_open(1)
    around.links[1].failure = PeerLost(node=1, cause="cut")
    assert hop is not None
    assert ways.get_or_open(1) is None
    assert ways.using(around.links[1]) is hop
    assert ways.using(cast(Any, Link(1))) is None
    assert ways.lost() == [1]


def relaying() -> tuple[Neighbours, NeighbourQueue, Any]:
    """Something of node 5 waits to go on over node 1. Also by whom it came."""
    ways = Neighbours(cast(Any, Around()))
    came, body = ways.attach(cast(Any, Link(5))), bytes(RETURN_BYTES)
    hop = ways.get_or_open(1)
    assert hop is not None
    came.count_received(1, len(body))
    ways.put(hop, QueuedFrame(2, body, came))
    return ways, hop, came


def test_who_sent_it_is_thanked_when_it_has_gone_on() -> None:
    ways, _, came = relaying()
    step = ways.next()
    assert step is not None
    assert step.credit == ReturnedCredit(cast(Any, came.link), 1, RETURN_BYTES)


def test_who_sent_what_could_not_go_on_is_thanked_too_and_sources_are_known() -> None:
    ways, hop, came = relaying()
    hop.remember((0, 5, 9))
    assert ways.forget(1) == [(0, 5, 9)]
    assert ways.forget(1) == []
    step = ways.next()
    assert step is not None
    assert (step.parts, step.credit) == ((), ReturnedCredit(cast(Any, came.link), 1, RETURN_BYTES))
