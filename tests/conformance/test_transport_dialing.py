"""Dialing and listening: who answers, who does not, and how long one waits."""

import socket
import time

import pytest

from nexar.transport.base import Carrier, CarrierLost, ConnectRefused, Expected
from tests.conformance.conftest import MakeNode
from tests.conformance.harness import EVENT_TIMEOUT, Pair, Recorder, Side, dial, in_thread, pump
from tests.conformance.transports import LEFT, RIGHT, Case, World


def test_both_ends_know_each_other(pair: Pair, case: Case) -> None:
    assert pair.left.carrier.peer.node == RIGHT
    assert pair.right.carrier.peer.node == LEFT
    assert pair.left.carrier.peer.verified
    assert pair.right.carrier.peer.verified
    assert pair.left.carrier.dialed
    assert not pair.right.carrier.dialed
    for side in (pair.left, pair.right):
        assert side.carrier.scheme == side.node.transport.scheme == case.name


def test_the_address_that_listen_gave_can_be_dialed(make_node: MakeNode) -> None:
    left, right = make_node(LEFT), make_node(RIGHT)
    assert right.transport.address is not None
    near, _ = dial(left, right)
    assert near.peer.node == RIGHT


def test_nothing_is_read_before_a_sink_is_attached(make_node: MakeNode) -> None:
    left, right = make_node(LEFT), make_node(RIGHT)
    near, far = dial(left, right)
    pair = Pair(Side(left, near), Side(right, far))
    near.attach(pair.left.received)
    for tag in range(10):
        pair.left.send(b"early", tag=tag)
    pair.quieten()
    far.attach(pair.right.received)
    pair.until(lambda: len(pair.right.received.frames) == 10, "the early frames")
    assert pair.right.received.tags == list(range(10))


def test_a_sink_attached_after_the_peer_is_gone_learns_of_it(make_node: MakeNode) -> None:
    left, right = make_node(LEFT), make_node(RIGHT)
    near, far = dial(left, right)
    near.abort("changed my mind")
    received = Recorder()
    far.attach(received)
    pump([left, right], lambda: received.lost, "the loss of a carrier that ended before its sink was attached")
    assert len(received.lost) == 1


def test_two_carriers_between_the_same_nodes_are_independent(make_node: MakeNode) -> None:
    left, right = make_node(LEFT), make_node(RIGHT)
    pairs = []
    for near, far in (dial(left, right), dial(right, left)):
        sides = (
            [Side(left, near), Side(right, far)] if near.peer.node == RIGHT else [Side(right, near), Side(left, far)]
        )
        for side in sides:
            side.carrier.attach(side.received)
        pairs.append(Pair(*sides))
    for pair in pairs:
        pair.check_usable()
    pairs[0].left.carrier.abort("one of two")
    pairs[0].until(lambda: pairs[0].right.received.lost, "the loss of the first")
    pairs[1].check_usable()


def test_many_dials_at_once_all_succeed(make_node: MakeNode) -> None:
    left, right = make_node(LEFT), make_node(RIGHT)
    address = right.transport.address_for(LEFT)
    assert address is not None
    deadline = time.monotonic() + EVENT_TIMEOUT
    calls = [in_thread(lambda: left.transport.connect(address, Expected(RIGHT), deadline)) for _ in range(8)]
    pump([left, right], lambda: all(outcome for _, outcome in calls) and len(right.accepted) == 8, "eight dials")
    for thread, outcome in calls:
        thread.join()
        assert isinstance(outcome[0], Carrier), outcome[0]


def test_a_dial_to_nobody_is_refused(make_node: MakeNode, case: Case, world: World) -> None:
    if case.dead_address is None:
        pytest.skip(f"{case.name} has no address where nobody listens")
    left = make_node(LEFT)
    with pytest.raises(ConnectRefused) as refused:
        left.transport.connect(case.dead_address(world), Expected(RIGHT), time.monotonic() + EVENT_TIMEOUT)
    assert not refused.value.verification


def test_a_dial_that_finds_another_node_is_refused_as_a_failed_verification(make_node: MakeNode) -> None:
    left, right = make_node(LEFT), make_node(RIGHT)
    address = right.transport.address_for(LEFT)
    assert address is not None
    deadline = time.monotonic() + EVENT_TIMEOUT
    thread, outcome = in_thread(lambda: left.transport.connect(address, Expected(77), deadline))
    pump([left, right], lambda: outcome, "the refusal")
    thread.join()
    assert isinstance(outcome[0], ConnectRefused), outcome[0]
    assert outcome[0].verification


def test_a_dial_without_an_answer_ends_at_its_deadline(make_node: MakeNode, case: Case, world: World) -> None:
    if case.silent_address is None:
        pytest.skip(f"{case.name} has no address where somebody listens in silence")
    left = make_node(LEFT)
    with case.silent_address(world) as address:  # type: ignore[attr-defined]
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            left.transport.connect(address, Expected(RIGHT), begin + 0.2)
        waited = time.monotonic() - begin
    assert 0.2 <= waited < 5


def test_a_name_is_tried_at_each_of_its_addresses_although_the_first_is_silent(
    make_node: MakeNode, case: Case, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case.unresponsive_host is None:
        pytest.skip(f"{case.name} looks no names up")
    left, right = make_node(LEFT), make_node(RIGHT)
    host, _, port = str(right.transport.address).rpartition(":")
    with case.unresponsive_host(int(port)) as silent_host:  # type: ignore[attr-defined]
        places = [(socket.AF_INET, 0, 0, "", (there, int(port))) for there in (silent_host, host)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)
        near, far = dial(left, right, f"a.name:{port}", patience=3.0)
    assert near.peer.node == RIGHT
    assert far.peer.node == LEFT


def test_a_closed_node_is_not_dialed_and_its_carriers_are_lost(pair: Pair) -> None:
    address = pair.right.node.transport.address_for(LEFT)
    assert address is not None
    pair.right.node.transport.close()
    pair.right.node.transport.close()
    pair.until(lambda: pair.left.received.lost, "the loss of the carrier to a closed node")
    with pytest.raises((ConnectRefused, TimeoutError)):
        pair.left.node.transport.connect(address, Expected(RIGHT), time.monotonic() + 1)
    with pytest.raises(CarrierLost):
        pair.right.send(b"too late")


def test_two_nodes_cannot_listen_on_one_address(make_node: MakeNode, case: Case, world: World) -> None:
    if not case.address_is_exclusive:
        pytest.skip(f"{case.name} chooses the address itself")
    right = make_node(RIGHT)
    transport, sleeper = case.make(LEFT, world)
    try:
        with pytest.raises(OSError):  # noqa: PT011 - the text is the system's
            transport.listen(str(right.transport.address), right)
    finally:
        transport.close()
        if sleeper is not transport:
            sleeper.close()  # type: ignore[attr-defined]
