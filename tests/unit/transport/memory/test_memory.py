"""What is special about memory: no descriptors, one copy, nothing kept. The conformance suite tests the contract."""

import gc
import sys
import threading
import time
import weakref

import pytest

from nexar.transport.base import CarrierLost, ConnectRefused, Expected
from nexar.transport.memory import MemoryNetwork, MemoryTransport
from nexar.wire.frame import Frame, FrameKind, Lane, encode
from tests.conformance.harness import Pair, Recorder
from tests.unit.transport.memory.world import Bell, World


@pytest.fixture
def world() -> World:
    return World(1, 2)


def test_a_node_finds_the_name_it_asked_for_or_any(world: World) -> None:
    assert world.nodes[1].transport.address == "memory:1"
    network = MemoryNetwork()
    names = {
        MemoryTransport(Bell(), n, network).listen(text, world.nodes[1])
        for n, text in enumerate(("", "memory:0", "memory:", "x"))
    }
    assert len(names) == 4
    assert "memory:x" in names


def test_a_node_that_was_not_meant_learns_who_dialed(world: World) -> None:
    with pytest.raises(ConnectRefused) as refused:
        world.dial(1, 2, expected=3)
    assert refused.value.verification
    world.settle()
    assert len(world.nodes[2].refused) == 1
    assert world.nodes[2].accepted == []


def test_an_unknown_node_may_be_dialed_by_address_alone(world: World) -> None:
    assert world.dial(1, 2, expected=0).peer.node == 2


def test_a_node_may_dial_itself(world: World) -> None:
    pair = world.pair(1, 1)
    pair.left.send(b"to myself")
    world.settle()
    assert pair.right.received.frames[0][1] == b"to myself"


def test_immutable_bodies_are_not_even_copied(world: World) -> None:
    pair = world.pair(1, 2)
    body = bytes(100_000)
    before = sys.getrefcount(body)
    pair.left.send(body)
    assert sys.getrefcount(body) > before


def test_a_sender_kicks_its_peer_once_until_it_looks(world: World) -> None:
    pair = world.pair(1, 2)
    world.settle()
    bell = world.nodes[2].sleeper
    assert isinstance(bell, Bell)
    before = bell.kicks
    for _ in range(100):
        pair.left.send(b"x")
    assert bell.kicks == before + 1
    assert not world.nodes[2].transport.prepare_sleep()
    world.settle()
    assert world.nodes[2].transport.prepare_sleep()


def test_a_poll_takes_one_chunk_and_then_frames_first(world: World) -> None:
    pair = world.pair(1, 2)
    world.settle()
    into = bytearray(5 << 20)
    pair.right.carrier.expect_payload(1, memoryview(into))
    pair.left.carrier.send_payload(1, memoryview(b"\x01" * len(into)))
    world.nodes[2].poll()
    assert into.count(1) == 1 << 20
    pair.left.send(b"urgent")
    world.nodes[2].poll()
    assert [what for what, _ in pair.right.received.received] == ["frame"]
    world.settle()
    assert [what for what, _ in pair.right.received.received] == ["frame", "payload"]


def test_frames_that_never_stop_do_not_starve_a_payload(world: World) -> None:
    pair = world.pair(1, 2)
    pair.right.received.on_frame = lambda _carrier, _frame: pair.left.send(b"and another")
    pair.right.carrier.expect_payload(1, memoryview(bytearray(3 << 20)))
    pair.left.carrier.send_payload(1, memoryview(bytearray(3 << 20)))
    pair.left.send(b"first")
    for _ in range(5):
        world.nodes[2].poll()
    assert pair.right.received.payloads == [1]
    pair.right.received.on_frame = None


def test_one_busy_carrier_does_not_keep_another_waiting(world: World) -> None:
    busy, quiet = world.pair(1, 2), world.pair(1, 2)
    busy.right.received.on_frame = lambda _carrier, _frame: busy.left.send(b"and another")
    busy.left.send(b"first")
    quiet.left.send(b"me too")
    world.nodes[2].poll()
    world.nodes[2].poll()
    assert len(quiet.right.received.frames) == 1
    busy.right.received.on_frame = None


def test_frames_to_a_carrier_that_has_ended_are_not_kept(world: World) -> None:
    pair = world.pair(1, 2)
    pair.right.carrier.abort("gone")
    for _ in range(1000):
        pair.left.send(bytes(100_000), lane=Lane.BULK)
    assert pair.left.carrier.queued_bytes(Lane.BULK) == 0
    world.settle()
    assert len(pair.left.received.lost) == 1


def test_nothing_refers_to_a_carrier_that_has_ended(world: World) -> None:
    pair = world.pair(1, 2)
    memory = weakref.ref(pair.left.carrier), weakref.ref(pair.right.carrier)
    pair.left.carrier.finish()
    pair.right.carrier.finish()
    world.settle()
    del pair
    world.nodes[2].accepted.clear()
    gc.collect()
    assert [reference() for reference in memory] == [None, None]


def test_an_aborted_payload_is_let_go_by_both_sides(world: World) -> None:
    pair = world.pair(1, 2)
    data, into = bytearray(1000), bytearray(1000)
    pair.right.carrier.expect_payload(1, memoryview(into))
    pair.left.carrier.send_payload(1, memoryview(data))
    pair.right.carrier.abort("no")
    data.append(1)  # would be a BufferError if anybody still held a view
    into.append(1)


def test_a_loss_that_a_sink_raises_is_not_taken_for_that_of_its_carrier(world: World) -> None:
    pair = world.pair(1, 2)

    def raise_foreign_loss(_carrier: object, _frame: object) -> None:
        raise CarrierLost("peer", "of another carrier")

    pair.right.received.on_frame = raise_foreign_loss
    pair.left.send(b"x")
    with pytest.raises(CarrierLost, match="of another carrier"):
        world.settle()
    assert [lost.kind for lost in pair.right.received.lost] == ["fault"]


def test_a_transfer_is_expected_once_and_sent_once(world: World) -> None:
    pair = world.pair(1, 2)
    pair.right.carrier.expect_payload(1, memoryview(bytearray(10)))
    pair.left.carrier.send_payload(1, memoryview(bytes(10)))
    with pytest.raises(ValueError, match="already"):
        pair.right.carrier.expect_payload(1, memoryview(bytearray(10)))
    with pytest.raises(ValueError, match="already"):
        pair.left.carrier.send_payload(1, memoryview(bytes(10)))
    with pytest.raises(ValueError, match="read-only"):
        pair.right.carrier.expect_payload(2, memoryview(bytes(10)))


def test_abort_waits_for_a_sink_that_runs_in_another_thread(world: World) -> None:
    pair = world.pair(1, 2)
    inside, leave = threading.Event(), threading.Event()
    pair.right.received.on_frame = lambda _carrier, _frame: (inside.set(), leave.wait(10))
    pair.left.send(b"x")
    driver = threading.Thread(target=world.nodes[2].poll)
    driver.start()
    assert inside.wait(10)
    aborting = threading.Thread(target=pair.right.carrier.abort, args=("now",))
    aborting.start()
    aborting.join(0.05)
    assert aborting.is_alive()
    leave.set()
    aborting.join(10)
    driver.join(10)
    assert not aborting.is_alive()


def test_two_sinks_that_abort_each_others_carriers_do_not_wait_for_each_other(world: World) -> None:
    pair = world.pair(1, 2)
    both = threading.Barrier(2)

    def abort(carrier: object) -> object:
        def on_frame(_carrier: object, _frame: object) -> None:
            both.wait(10)
            carrier.abort("crossed")  # type: ignore[attr-defined]

        return on_frame

    pair.left.received.on_frame = abort(pair.right.carrier)  # type: ignore[assignment]
    pair.right.received.on_frame = abort(pair.left.carrier)  # type: ignore[assignment]
    pair.left.send(b"x")
    pair.right.send(b"x")
    threads = [threading.Thread(target=node.poll) for node in world.nodes.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_a_forked_child_notifies_nobody(world: World) -> None:
    pair = world.pair(1, 2)
    world.nodes[1].transport.abandon()
    with pytest.raises(CarrierLost):
        pair.left.send(b"from the child")
    world.settle()
    assert pair.right.received.lost == []


def test_a_closed_node_neither_dials_nor_is_dialed(world: World) -> None:
    world.nodes[1].transport.close()
    with pytest.raises(ConnectRefused):
        world.dial(2, 1)
    with pytest.raises(ConnectRefused):
        world.dial(1, 2)


def test_a_deadline_that_has_passed_is_a_timeout(world: World) -> None:
    with pytest.raises(TimeoutError):
        world.nodes[1].transport.connect("memory:2", Expected(2), time.monotonic() - 1)


def test_a_header_of_another_length_is_misbehaviour(world: World) -> None:
    pair = world.pair(1, 2)
    pair.left.carrier.send_frame(Lane.DATA, 0, b"short")
    world.settle()
    assert pair.right.received.lost[0].misbehaved


def test_a_body_of_another_length_than_its_header_says_is_misbehaviour(world: World) -> None:
    pair = world.pair(1, 2)
    pair.left.carrier.send_frame(Lane.DATA, 0, encode(Frame(kind=FrameKind.CONTROL, body=5)), b"1234")
    world.settle()
    assert pair.right.received.lost[0].misbehaved


def _check(world: World, pair: Pair) -> None:
    before = len(pair.right.received.frames)
    pair.left.send(b"still here")
    world.settle()
    assert len(pair.right.received.frames) == before + 1
    assert isinstance(pair.right.received, Recorder)
