"""Each fault does on a memory network what its name says, in virtual time."""

import time

import pytest

from nexar.testing import DoubleDial, Faults, LinkCut, LinkDelay, LinkStall, RefuseDial, SilentDial, partition
from nexar.transport.base import ConnectRefused, Expected
from nexar.wire.frame import Lane
from tests.unit.transport.memory.world import World


@pytest.fixture
def world() -> World:
    return World(1, 2, 3)


def test_a_delay_holds_frames_and_payloads_back_until_their_time(world: World) -> None:
    Faults(world.network, LinkDelay(0.5, source=1, destination=2))
    pair = world.pair(1, 2)
    into = bytearray(200_000)
    pair.right.carrier.expect_payload(1, memoryview(into))
    pair.left.send(b"slow")
    pair.left.carrier.send_payload(1, memoryview(b"\x01" * len(into)))
    pair.right.send(b"fast")
    world.settle()
    assert len(pair.left.received.frames) == 1
    assert pair.right.received.received == []
    world.advance(0.49)
    assert pair.right.received.received == []
    world.advance(0.01)
    assert [what for what, _ in pair.right.received.received] == ["frame", "payload"]
    assert into == b"\x01" * len(into)


def test_delayed_frames_keep_their_order(world: World) -> None:
    Faults(world.network, LinkDelay(1.0))
    pair = world.pair(1, 2)
    for tag in range(10):
        pair.left.send(tag=tag, lane=Lane.DATA)
        world.advance(0.1)
    world.advance(1.0)
    assert pair.right.received.tags == list(range(10))


def test_delays_add_up_and_the_system_clock_says_when_they_end(world: World) -> None:
    Faults(world.network, LinkDelay(0.25), LinkDelay(0.5, destination=2))
    pair = world.pair(1, 2)
    pair.left.send(b"x")
    world.advance(0.7)
    assert pair.right.received.frames == []
    world.advance(0.05)
    assert len(pair.right.received.frames) == 1
    assert world.nodes[2].transport.due() is None  # in virtual time nobody needs to wake up by himself


def test_a_half_close_is_delayed_like_everything_before_it(world: World) -> None:
    Faults(world.network, LinkDelay(1.0))
    pair = world.pair(1, 2)
    pair.left.send(b"last")
    pair.left.carrier.finish()
    world.advance(0.9)
    assert pair.right.received.received == []
    world.advance(0.1)
    assert [what for what, _ in pair.right.received.received] == ["frame", "finished"]


def test_a_stall_holds_everything_until_it_is_lifted(world: World) -> None:
    pair = world.pair(1, 2)
    faults = Faults(world.network, LinkStall(source=1, destination=2, after_frames=3))
    for tag in range(6):
        pair.left.send(tag=tag)
    pair.left.carrier.abort("nobody will hear of it")
    world.advance(100)
    assert pair.right.received.tags == [0, 1, 2]
    assert pair.right.received.lost == []
    faults.clear()
    world.settle()
    assert pair.right.received.tags == list(range(6))
    assert len(pair.right.received.lost) == 1


def test_a_cut_is_a_loss_on_both_sides(world: World) -> None:
    pair = world.pair(1, 2)
    Faults(world.network, LinkCut(source=1, destination=2, after_frames=2))
    for tag in range(5):
        pair.left.send(tag=tag)
    world.settle()
    assert pair.right.received.tags == [0, 1]
    assert [error.kind for error in pair.right.received.lost + pair.left.received.lost] == ["peer", "peer"]


def test_a_cut_in_mid_payload_leaves_it_incomplete(world: World) -> None:
    pair = world.pair(1, 2)
    Faults(world.network, LinkCut(after_payload_bytes=300_000))
    into = bytearray(1 << 20)
    pair.right.carrier.expect_payload(1, memoryview(into))
    pair.left.carrier.send_payload(1, memoryview(b"\x01" * len(into)))
    world.settle()
    assert 300_000 <= into.count(1) < 400_000
    assert pair.right.received.payloads == []
    assert len(pair.right.received.lost) == len(pair.left.received.lost) == 1
    into.append(0)  # nobody holds its memory any more


def test_a_refused_dial_and_a_silent_one(world: World) -> None:
    Faults(world.network, RefuseDial(destination=2), SilentDial(destination=3))
    with pytest.raises(ConnectRefused):
        world.dial(1, 2)
    with pytest.raises(TimeoutError):
        world.nodes[1].transport.connect("memory:3", Expected(3), time.monotonic() + 0.01)


def test_a_dial_that_arrives_twice_is_accepted_twice_and_one_of_them_is_lost(world: World) -> None:
    Faults(world.network, DoubleDial(source=1))
    pair = world.pair(1, 2)
    accepted = world.nodes[2].accepted
    assert len(accepted) == 2
    assert pair.right.carrier is accepted[1]
    pair.left.send(b"on the one that stays")
    world.settle()
    assert len(pair.right.received.frames) == 1


def test_a_partition_separates_two_sets_and_nobody_else(world: World) -> None:
    pairs = {ends: world.pair(*ends) for ends in ((1, 2), (1, 3), (2, 3))}
    faults = Faults(world.network, *partition({1, 2}, {3}))
    for pair in pairs.values():
        pair.left.send(b"hello")
        pair.right.send(b"hello")
    world.advance(10)
    received = {ends: len(pair.left.received.frames) + len(pair.right.received.frames) for ends, pair in pairs.items()}
    assert received == {(1, 2): 2, (1, 3): 0, (2, 3): 0}
    faults.remove(*partition({1, 2}, {3}))
    world.settle()
    assert all(len(pair.right.received.frames) == 1 for pair in pairs.values())


def test_a_fault_is_a_value() -> None:
    assert LinkDelay(0.5, source=1) == LinkDelay(0.5, source=1)
    assert len({LinkCut(source=1), LinkCut(source=1), LinkStall(source=1)}) == 2
