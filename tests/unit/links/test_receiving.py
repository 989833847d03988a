"""What ends while payloads arrive: who has a message, and what its sender learns."""

from __future__ import annotations

import threading

import pytest

from nexar.errors import Cancelled, LinkClosed, Revoked
from nexar.links.messages import Receive
from nexar.links.operation import Operation
from nexar.links.sending import MessageHeader
from nexar.transport.base import Carrier
from nexar.wire.control import CallAborted
from nexar.wire.frame import Space
from tests.unit.cluster.memory_mesh import eventually
from tests.unit.links.conftest import MakePair, Pair

TAG = MessageHeader(space=Space.TAGGED, tag=7)
DATA = bytes(range(250)) * 1200


class Unnotified:
    """The receiving link does not know yet that a payload has arrived, though its carrier knows."""

    def __init__(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        self.landed = threading.Event()
        self._link = pair.to_left
        self._tell = pair.to_left.payload_arrived
        self._said: list[tuple[Carrier, int]] = []
        monkeypatch.setattr(pair.to_left, "payload_arrived", self._keep)

    def _keep(self, carrier: Carrier, transfer: int) -> None:
        self._said.append((carrier, transfer))
        self.landed.set()

    def notify(self) -> None:
        for carrier, transfer in self._said:
            self._tell(carrier, transfer)


@pytest.fixture
def unnotified(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Unnotified:
    return Unnotified(pair, monkeypatch)


def receive(pair: Pair) -> Receive:
    return pair.right.matching.post(None, source=1, space=Space.TAGGED, tag=7)


def received_unnotified(pair: Pair, unnotified: Unnotified) -> Operation:
    """A message that landed early is received; the driving thread is yet to say that it landed."""
    send = pair.to_right.post_send(0, memoryview(DATA), about=TAG)
    assert unnotified.landed.wait(10)
    late = receive(pair)
    assert late.done
    assert bytes(late.into or b"") == DATA
    assert not send.done
    return send


def test_what_was_received_is_delivered_although_the_communicator_is_closed_at_once(
    pair: Pair, unnotified: Unnotified
) -> None:
    send = received_unnotified(pair, unnotified)
    pair.right.router.close(pair.right.matching, LinkClosed(owner="the communicator"))
    pair.left.wait(send)
    unnotified.notify()  # late, and of no consequence
    assert pair.to_left.stats()["payloads_received"] == 1


def test_what_was_received_is_delivered_although_the_link_is_closed_at_once(pair: Pair, unnotified: Unnotified) -> None:
    send = received_unnotified(pair, unnotified)
    pair.to_left.close()
    pair.left.wait(send)


def test_what_is_whole_and_waits_for_a_receive_outlives_the_link(pair: Pair, unnotified: Unnotified) -> None:
    first = receive(pair)
    send = pair.to_right.post_send(0, memoryview(DATA), about=TAG)
    assert unnotified.landed.wait(10)
    first.cancel()  # puts it into the queue, whole
    pair.to_left.close()
    pair.left.wait(send)
    assert bytes(receive(pair).into or b"") == DATA


def test_what_nobody_received_is_refused_when_the_communicator_closes(make_pair: MakePair) -> None:
    pair = make_pair(early_bytes=1)
    send = pair.to_right.post_send(0, memoryview(DATA), about=TAG)
    eventually(lambda: pair.right.matching.probe(source=1, space=Space.TAGGED, tag=7), "the envelope")
    pair.right.router.close(pair.right.matching, LinkClosed(owner="the communicator"))
    with pytest.raises(Cancelled, match="the communicator"):
        pair.left.wait(send)


def test_a_send_waits_for_the_change_that_its_receiver_heard_of_first(make_pair: MakePair) -> None:
    pair = make_pair(early_bytes=1)
    send = pair.to_right.post_send(0, memoryview(DATA), about=TAG)
    eventually(lambda: pair.right.matching.probe(source=1, space=Space.TAGGED, tag=7), "the envelope")
    change = Revoked(communicator="0", reason="its members change")
    pair.right.router.close(pair.right.matching, change)
    pair.to_left.send_control(CallAborted(0, 0, 0, 0, "sent after everything that the end of the generation sends"))
    eventually(lambda: pair.control, "the control message")
    assert not send.done, send.error
    pair.left.router.close(pair.left.matching, change)
    with pytest.raises(Revoked, match="its members change"):
        pair.left.wait(send)
