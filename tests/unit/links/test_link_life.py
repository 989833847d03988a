"""How links begin, are replaced, and end."""

from __future__ import annotations

import time

import numpy as np
import pytest

from nexar.errors import BufferMismatch, LinkClosed, PeerLost, PeerMisbehaved, UsageError
from nexar.links.link import Link
from nexar.links.sending import About
from nexar.testing.faults import Faults, Stall
from nexar.testing.linked_node import LinkedNode
from nexar.transport.base import Carrier, CarrierLost, Expected, Redirected
from nexar.wire.frame import Lane, Space
from tests.unit.cluster.memory_mesh import eventually
from tests.unit.links.conftest import MakePair, Pair

TAG = About(space=Space.TAGGED, tag=7)


def receive(node: LinkedNode, source: int, tag: int = 7) -> bytes:
    operation = node.matching.post(None, source=source, space=Space.TAGGED, tag=tag)
    node.wait(operation)
    return bytes(operation.into or b"")


def dial(pair: Pair) -> Carrier:
    transport = pair.left.transports["memory"]
    return transport.connect(pair.right.addresses_for(1)["memory"], Expected(2), time.monotonic() + 5)


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_link_that_was_ended_takes_no_carrier_any_more(pair: Pair, end: str) -> None:
    if end == "close":
        pair.to_right.close()
    else:
        pair.to_right.abort("enough")
    late = dial(pair)
    pair.to_right.adopt(late)
    with pytest.raises(CarrierLost):
        late.queued_bytes(0)  # type: ignore[arg-type]
    with pytest.raises(LinkClosed):
        pair.to_right.post_send(0, memoryview(b"x"), about=TAG)


def test_a_lost_link_that_is_closed_stays_closed(pair: Pair) -> None:
    pair.to_left.abort("gone")
    with pytest.raises(PeerLost):
        receive(pair.left, 2)
    pair.to_right.close()
    pair.to_right.adopt(dial(pair))
    assert pair.to_right.failure is not None


def test_a_closed_link_is_forgotten_by_its_node(pair: Pair) -> None:
    before = len(pair.left.router._links)
    pair.to_right.close()
    assert len(pair.left.router._links) == before - 1


def test_closing_twice_and_from_both_ends_is_fine(pair: Pair) -> None:
    pair.to_right.close()
    pair.to_right.close()
    pair.to_left.close()
    pair.to_left.abort("late")


def test_closing_while_a_large_send_waits_ends_it_and_is_polite(make_pair: MakePair) -> None:
    pair = make_pair(early_bytes=1)
    send = pair.to_right.post_send(0, memoryview(bytes(300_000)), about=TAG)
    pair.to_right.close()
    with pytest.raises(LinkClosed):
        send.result()
    with pytest.raises(PeerLost, match="it closed the link"):
        receive(pair.right, 1)


def test_a_carrier_that_comes_while_a_link_closes_is_closed_politely_with_the_first(make_pair: MakePair) -> None:
    pair = make_pair()
    faults = Faults(pair.right.transports["memory"].network, Stall(source=2))  # type: ignore[attr-defined]
    pair.to_left.post_send(0, memoryview(b"the last word"), about=TAG)
    closing = pair.to_left.begin_close()
    assert closing is not None
    second = as_another_scheme(pair)
    pair.to_right.adopt(second)  # the peer has it already, and has read nothing yet
    faults.clear()
    assert receive(pair.left, 2) == b"the last word"
    with pytest.raises(PeerLost, match="it closed the link"):
        receive(pair.left, 2)
    pair.right.wait(closing)
    with pytest.raises(CarrierLost, match="both sides have finished"):
        second.queued_bytes(Lane.DATA)


def test_a_carrier_of_the_dialer_that_comes_while_its_link_closes_is_closed_politely(make_pair: MakePair) -> None:
    pair = make_pair()
    faults = Faults(pair.left.transports["memory"].network, Stall(source=1))  # type: ignore[attr-defined]
    second = as_another_scheme(pair)
    pair.to_right.post_send(0, memoryview(b"the last word"), about=TAG)
    closing = pair.to_right.begin_close()
    assert closing is not None
    pair.to_right.adopt(second)
    faults.clear()
    assert receive(pair.right, 1) == b"the last word"
    with pytest.raises(PeerLost, match="it closed the link"):
        receive(pair.right, 1)
    pair.left.wait(closing)


def as_another_scheme(pair: Pair) -> Carrier:
    """One more carrier from left to right, which right has adopted; left has not."""
    accepted: list[Carrier] = []
    take = pair.right.carrier_accepted

    def accept(carrier: Carrier) -> None:
        carrier.scheme = "shm"
        accepted.append(carrier)
        take(carrier)

    pair.right.carrier_accepted = accept  # type: ignore[method-assign]
    carrier = dial(pair)
    carrier.scheme = "shm"
    eventually(lambda: accepted, "the carrier")
    return carrier


def test_nodes_with_different_credit_and_limits_understand_each_other(make_pair: MakePair) -> None:
    pair = make_pair(left={"credit_bytes": 8 << 20, "eager_limit_bytes": 1 << 20}, right={"credit_bytes": 262_144})
    messages = [bytes([n]) * 100_000 for n in range(30)]
    sends = [pair.to_right.post_send(0, memoryview(m), about=TAG) for m in messages]
    sends += [pair.to_left.post_send(0, memoryview(m), about=TAG) for m in messages]
    assert [receive(pair.right, 1) for _ in messages] == messages
    assert [receive(pair.left, 2) for _ in messages] == messages
    pair.left.wait(*sends[:30])
    pair.right.wait(*sends[30:])


def test_a_message_of_the_largest_eager_size_travels_whole(make_pair: MakePair) -> None:
    pair = make_pair(credit_bytes=8 << 20, eager_limit_bytes=1 << 20)
    pair.to_left.post_send(0, memoryview(b"hello"), about=TAG)
    assert receive(pair.left, 2) == b"hello"  # its terms have come before it
    data = bytes(range(256)) * 4096
    assert pair.to_right.post_send(0, memoryview(data), about=TAG).done
    assert receive(pair.right, 1) == data


@pytest.mark.parametrize("tag", [-1, 1 << 64])
def test_a_tag_that_does_not_fit_is_refused_and_leaves_no_gap(pair: Pair, tag: int) -> None:
    with pytest.raises(UsageError, match="tags are 0 to"):
        pair.to_right.post_send(0, memoryview(b"x"), about=About(Space.TAGGED, tag))
    pair.to_right.post_send(0, memoryview(b"next"), about=TAG)
    assert receive(pair.right, 1) == b"next"


def test_who_is_no_member_can_neither_be_sent_to_nor_speak(pair: Pair) -> None:
    pair.left.router.open(5, members=frozenset({1, 3}))
    with pytest.raises(UsageError, match="no member of communicator 5"):
        pair.to_right.post_send(5, memoryview(b"x"), about=TAG)
    pair.right.router.open(6)
    pair.left.router.open(6, members=frozenset({1, 3}))
    waiting = pair.left.matching.post(None, source=2, space=Space.TAGGED, tag=7)
    pair.to_left.post_send(6, memoryview(b"psst"), about=TAG)
    with pytest.raises(PeerMisbehaved, match="no member"):
        pair.left.wait(waiting)


class StubCarrier(Carrier):
    """A connection of which only its origin and its end matter."""

    scheme = "stub"

    def __init__(self, *, dialed: bool, frames_received: int = 0) -> None:
        self.dialed = dialed
        self._frames_received = frames_received
        self.aborted = False

    def attach(self, sink: object) -> None: ...
    def send_frame(self, *_: object) -> None: ...
    def send_payload(self, *_: object) -> None: ...
    def withdraw_payload(self, *_: object) -> None: ...
    def expect_payload(self, *_: object) -> None: ...
    def finish(self) -> None: ...

    def queued_bytes(self, _: object) -> int:
        return 0

    def redirect_payload(self, *_: object) -> Redirected:
        return Redirected.UNKNOWN

    def abort(self, reason: str) -> None:
        self.aborted = True

    def stats(self) -> dict[str, float]:
        return {"frames_received": self._frames_received}


def adopt_both(node: LinkedNode, peer: int, first: StubCarrier, second: StubCarrier) -> None:
    link = Link(node.router, peer)
    link.adopt(first)
    link.adopt(second)


@pytest.mark.parametrize("own_first", [True, False])
def test_of_two_dials_that_crossed_the_lower_nodes_stays_on_both_ends(pair: Pair, own_first: bool) -> None:
    for node, peer in ((pair.left, 2), (pair.right, 1)):
        first, second = StubCarrier(dialed=own_first), StubCarrier(dialed=not own_first)
        adopt_both(node, peer, first, second)
        by_lower, by_higher = (first, second) if first.dialed == (node.node < peer) else (second, first)
        assert by_higher.aborted
        assert not by_lower.aborted


def test_a_dial_after_a_loss_that_only_the_peer_noticed_replaces_the_old_connection(pair: Pair) -> None:
    old, new = StubCarrier(dialed=True, frames_received=5), StubCarrier(dialed=False)
    adopt_both(pair.left, 2, old, new)
    assert old.aborted
    assert not new.aborted


# -- careless calls ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [[1, 2], "text", np.zeros((4, 4))[:, 1], 7], ids=["list", "str", "column", "number"])
def test_what_holds_no_contiguous_bytes_is_refused_and_leaves_no_trace(pair: Pair, data: object) -> None:
    with pytest.raises(UsageError, match="a send needs contiguous bytes"):
        pair.to_right.post_send(0, data, about=TAG)  # type: ignore[arg-type]
    pair.to_right.post_send(0, memoryview(b"next"), about=TAG)
    assert receive(pair.right, 1) == b"next"


@pytest.mark.parametrize("size", [3, 100_000])
def test_arrays_and_bytes_are_sent_as_the_bytes_they_hold(pair: Pair, size: int) -> None:
    for data in (np.arange(float(size)), bytes(size), bytearray(size), memoryview(np.arange(size))):
        send = pair.to_right.post_send(0, data, about=TAG)  # type: ignore[arg-type]
        assert receive(pair.right, 1) == bytes(memoryview(data).cast("B"))
        pair.left.wait(send)


@pytest.mark.parametrize(
    ("into", "why"),
    [(memoryview(bytes(4)), "read-only"), (np.zeros((4, 4))[:, 1], "contiguous memory"), ([0], "contiguous memory")],
    ids=["read-only", "column", "list"],
)
def test_a_receive_into_what_cannot_be_written_is_refused_at_once(pair: Pair, into: object, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        pair.right.matching.post(into, source=1, space=Space.TAGGED, tag=7)  # type: ignore[arg-type]


@pytest.mark.parametrize("tag", [-2, 1 << 64])
def test_a_receive_with_a_tag_that_cannot_be_sent_is_refused(pair: Pair, tag: int) -> None:
    with pytest.raises(UsageError, match="tags are 0 to"):
        pair.right.matching.post(None, source=1, space=Space.TAGGED, tag=tag)


def test_a_buffer_of_another_size_names_the_sender_and_says_that_the_message_is_kept(pair: Pair) -> None:
    operation = pair.right.matching.post(memoryview(bytearray(2)), source=1, space=Space.TAGGED, tag=7)
    pair.to_right.post_send(0, memoryview(b"abc"), about=TAG)
    with pytest.raises(BufferMismatch, match=r"node 0000000000000001 with tag 7 is 3 bytes; it is kept"):
        pair.right.wait(operation)


def test_connecting_again_gives_the_link_there_is(pair: Pair) -> None:
    assert pair.left.connect(2, pair.right.addresses_for(1)) is pair.to_right
    assert "open" in repr(pair.to_right)


def test_a_node_without_a_transport_in_common_and_a_closed_one_say_so(pair: Pair) -> None:
    with pytest.raises(UsageError, match="no transport in common"):
        pair.left.connect(9, {"pigeon": "post"})
    pair.left.close()
    with pytest.raises(UsageError, match="this node is closed"):
        pair.left.connect(2, pair.right.addresses_for(1))
