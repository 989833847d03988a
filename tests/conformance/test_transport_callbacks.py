"""Sinks and acceptors that raise: what they raise comes out of poll, and costs the one carrier it concerned."""

import time
from collections.abc import Callable

import pytest

from nexar.transport.base import Carrier, CarrierLost, ConnectRefused, Expected
from nexar.wire.frame import Lane
from tests.conformance.conftest import MakeNode
from tests.conformance.harness import EVENT_TIMEOUT, Node, Pair, Recorder, Side, dial, in_thread, pump
from tests.conformance.transports import LEFT, RIGHT


class Clumsy(Exception):
    """What the callbacks of these tests raise."""


class ClumsySink(Recorder):
    """Raises in the callback that is named."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def frame_arrived(self, *args: object) -> None:
        super().frame_arrived(*args)  # type: ignore[arg-type]
        self._stumble("frame")

    def payload_arrived(self, *args: object) -> None:
        super().payload_arrived(*args)  # type: ignore[arg-type]
        self._stumble("payload")

    def carrier_finished(self, carrier: Carrier) -> None:
        super().carrier_finished(carrier)
        self._stumble("finished")

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        super().carrier_lost(carrier, error)
        self._stumble("lost")

    def _stumble(self, here: str) -> None:
        if here == self.where:
            raise Clumsy(here)


PROVOKE: dict[str, Callable[[Side], object]] = {
    "frame": lambda left: left.send(b"a frame"),
    "payload": lambda left: left.carrier.send_payload(1, memoryview(b"abc")),
    "finished": lambda left: left.carrier.finish(),
}


@pytest.mark.parametrize("where", list(PROVOKE))
def test_a_sink_that_raises_loses_its_carrier_and_no_other(make_node: MakeNode, where: str) -> None:
    left, right = make_node(LEFT), make_node(RIGHT)
    clumsy, fine = _pair(left, right, ClumsySink(where)), _pair(left, right, Recorder())
    clumsy.right.carrier.expect_payload(1, memoryview(bytearray(3)))
    PROVOKE[where](clumsy.left)
    PROVOKE["frame"](fine.left)
    _until_it_stumbles([left, right], where)
    pump([left, right], lambda: clumsy.right.received.lost and clumsy.left.received.lost, "the loss on both sides")
    (lost,) = clumsy.right.received.lost
    assert lost.kind == "fault"
    assert "Clumsy" in lost.reason
    for verb in (clumsy.right.carrier.finish, lambda: clumsy.right.carrier.queued_bytes(Lane.DATA)):
        with pytest.raises(CarrierLost) as refused:
            verb()
        assert (refused.value.kind, refused.value.reason) == (lost.kind, lost.reason)
    fine.check_usable()
    assert clumsy.right.received.received[-1] == ("lost", lost)
    assert clumsy.right.received.faults + fine.right.received.faults == []


def test_nothing_is_delivered_to_a_sink_that_raised_but_its_loss(make_node: MakeNode) -> None:
    left, right = make_node(LEFT), make_node(RIGHT)
    pair = _pair(left, right, ClumsySink("frame"))
    for tag in range(50):
        pair.left.send(b"a frame", tag=tag)
    _until_it_stumbles([left, right], "frame")
    pump([left, right], lambda: pair.right.received.lost, "the loss")
    pair.quieten()
    assert [what for what, _ in pair.right.received.received] == ["frame", "lost"]


def test_a_sink_that_raises_at_the_loss_is_not_notified_twice(make_node: MakeNode) -> None:
    left, right = make_node(LEFT), make_node(RIGHT)
    clumsy, fine = _pair(left, right, ClumsySink("lost")), _pair(left, right, Recorder())
    clumsy.left.carrier.abort("had enough")
    _until_it_stumbles([left, right], "lost")
    clumsy.quieten()
    assert [error.kind for error in clumsy.right.received.lost] == ["peer"]
    fine.check_usable()


def test_an_acceptor_that_raises_loses_the_new_carrier_and_no_other(make_node: MakeNode) -> None:
    left, right = make_node(LEFT), make_node(RIGHT)
    fine = _pair(left, right, Recorder())
    accepted: list[Carrier] = []

    def stumble(carrier: Carrier) -> None:
        accepted.append(carrier)
        raise Clumsy("accepting")

    right.carrier_accepted = stumble  # type: ignore[method-assign]
    address = right.transport.address_for(LEFT)
    assert address is not None
    thread, outcome = in_thread(
        lambda: left.transport.connect(address, Expected(RIGHT), time.monotonic() + EVENT_TIMEOUT)
    )
    _until_it_stumbles([left, right], "accepting")
    pump([left, right], lambda: outcome, "the dial")
    thread.join()
    _check_refused_or_lost([left, right], outcome[0])
    with pytest.raises(CarrierLost) as refused:
        accepted[0].queued_bytes(Lane.DATA)
    assert refused.value.kind == "fault"
    fine.check_usable()
    del right.carrier_accepted  # type: ignore[method-assign]
    _pair(left, right, Recorder()).check_usable()


def _check_refused_or_lost(nodes: list[Node], outcome: object) -> None:
    """The dial may have succeeded before the acceptor was asked, or not."""
    if isinstance(outcome, ConnectRefused):
        return
    assert isinstance(outcome, Carrier), outcome
    received = Recorder()
    outcome.attach(received)
    pump(nodes, lambda: received.lost, "the loss at the dialer")


def _pair(left: Node, right: Node, sink: Recorder) -> Pair:
    near, far = dial(left, right)
    pair = Pair(Side(left, near), Side(right, far, sink))
    near.attach(pair.left.received)
    far.attach(sink)
    return pair


def _until_it_stumbles(nodes: list[Node], where: str) -> None:
    with pytest.raises(Clumsy, match=where):
        pump(nodes, lambda: False, f"an exception from {where}")
