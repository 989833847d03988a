"""A peer with several addresses: they are dialed side by side, and one that works is enough."""

import threading
import time

import pytest

from nexar.transport.base import Carrier, ConnectRefused, Expected
from tests.conformance.conftest import MakeNode
from tests.conformance.harness import EVENT_TIMEOUT, Node, Pair, Side, dial, in_thread, pump
from tests.conformance.transports import CHILD, LEFT, RIGHT, Case, World


@pytest.fixture(autouse=True)
def has_hosts(case: Case, request: pytest.FixtureRequest) -> None:
    if case.unresponsive_host is None and "closing" not in request.node.name:
        pytest.skip(f"the addresses of {case.name} are not host:port")


def connect(near: Node, far: list[Node], address: str, whom: int, timeout: float = EVENT_TIMEOUT) -> object:
    """What came of the dial."""
    thread, outcome = in_thread(lambda: near.transport.connect(address, Expected(whom), time.monotonic() + timeout))
    pump([near, *far], lambda: outcome, "the outcome of a dial")
    thread.join()
    return outcome[0]


def test_a_silent_address_hardly_delays_the_one_that_answers(make_node: MakeNode, case: Case, world: World) -> None:
    left, right = make_node(LEFT), make_node(RIGHT)
    with case.silent_address(world) as silent:  # type: ignore[attr-defined, misc]
        begin = time.monotonic()
        near, far = dial(left, right, f"{silent},{right.transport.address}")
        assert time.monotonic() - begin < 5
    pair = Pair(Side(left, near), Side(right, far))
    near.attach(pair.left.received)
    far.attach(pair.right.received)
    pair.check_usable()
    assert near.peer.address == right.transport.address


def test_an_address_where_somebody_else_lives_does_not_end_the_dial(make_node: MakeNode) -> None:
    left, right, other = make_node(LEFT), make_node(RIGHT), make_node(CHILD)
    carrier = connect(left, [right, other], f"{other.transport.address},{right.transport.address}", RIGHT)
    assert isinstance(carrier, Carrier), carrier
    assert carrier.peer.node == RIGHT


def test_if_nobody_is_right_every_reason_is_reported_and_that_somebody_was_not_believed(
    make_node: MakeNode, case: Case, world: World
) -> None:
    left, other = make_node(LEFT), make_node(CHILD)
    with case.silent_address(world) as silent:  # type: ignore[attr-defined, misc]
        refused = connect(left, [other], f"{silent},{other.transport.address}", RIGHT, timeout=1.0)
    assert isinstance(refused, ConnectRefused), refused
    assert refused.verification
    assert f"{silent}: no answer in time" in refused.reason
    assert f"{other.transport.address}: " in refused.reason
    assert f"expected node {RIGHT:016x} of cluster 'conformance', showed node {LEFT:016x}" in refused.reason


def test_of_two_addresses_of_one_node_one_carrier_comes(make_node: MakeNode) -> None:
    left, right = make_node(LEFT), make_node(RIGHT)
    address = right.transport.address
    near, _ = dial(left, right, f"{address},{address}")
    assert near.peer.node == RIGHT
    assert len(right.accepted) == 1


def test_closing_the_transport_ends_a_dial_that_nobody_answers(make_node: MakeNode, case: Case, world: World) -> None:
    if case.silent_address is None:
        pytest.skip(f"{case.name} has no address where somebody listens in silence")
    left = make_node(LEFT)
    with case.silent_address(world) as silent:  # type: ignore[attr-defined]
        begun = threading.Event()

        def dial_in_vain() -> Carrier:
            begun.set()
            return left.transport.connect(silent, Expected(RIGHT), time.monotonic() + EVENT_TIMEOUT)

        thread, outcome = in_thread(dial_in_vain)
        begun.wait(EVENT_TIMEOUT)
        begin = time.monotonic()
        thread.join(0.1)  # by now it waits for an answer
        left.transport.close()
        thread.join(EVENT_TIMEOUT)
    assert time.monotonic() - begin < EVENT_TIMEOUT / 2
    assert isinstance(outcome[0], ConnectRefused), outcome[0]
    assert not outcome[0].verification


def test_a_dial_after_closing_is_refused(make_node: MakeNode, case: Case, world: World) -> None:
    left, right = make_node(LEFT), make_node(RIGHT)
    address = right.transport.address_for(LEFT)
    assert address is not None
    left.transport.close()
    with pytest.raises(ConnectRefused):
        left.transport.connect(address, Expected(RIGHT), time.monotonic() + EVENT_TIMEOUT)
