"""Peers that have not proven who they are: how they come in, what they may say, and what it costs us."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from nexar.transport.base import Carrier, Expected
from nexar.transport.unverified import UNVERIFIED_BYTES
from nexar.types import UNKNOWN_NODE
from nexar.wire.frame import Frame, FrameKind, Lane, encode, encode_chunk
from tests.conformance.harness import EVENT_TIMEOUT, Node, Pair, Side, anonymous_bytes, in_thread, pattern, pump
from tests.conformance.transports import LEFT, RIGHT, Case, World

MIB = 1 << 20


@pytest.fixture
def unauthenticated_pair(case: Case, world: World) -> Iterator[Pair]:
    """`left`, who has credentials, dialed `right` without showing them."""
    if not case.accepts_unverified_peers:
        pytest.skip(f"{case.name} lets no strangers in")
    open_world = replace(world, trust=replace(world.trust, allow_anonymous=True))
    with ExitStack() as stack:
        left, right = (Node(number, *case.make(number, open_world)) for number in (LEFT, RIGHT))
        stack.callback(left.close)
        stack.callback(right.close)
        address = right.transport.listen(case.listen(world), right)
        near, far = join(left, right, address)
        pair = Pair(Side(left, near), Side(right, far))
        near.attach(pair.left.received)
        far.attach(pair.right.received)
        yield pair
        assert pair.left.received.faults + pair.right.received.faults == []


def join(left: Node, right: Node, address: str) -> tuple[Carrier, Carrier]:
    whom = Expected(right.number, anonymous=True)
    thread, outcome = in_thread(lambda: left.transport.connect(address, whom, time.monotonic() + EVENT_TIMEOUT))
    pump([left, right], lambda: outcome and (isinstance(outcome[0], Exception) or right.accepted), "an anonymous dial")
    thread.join()
    assert isinstance(outcome[0], Carrier), outcome[0]
    return outcome[0], right.accepted[0]


def test_a_dial_that_shows_nothing_arrives_as_nobody(unauthenticated_pair: Pair) -> None:
    peer = unauthenticated_pair.right.carrier.peer
    assert (peer.node, peer.certificate, peer.verified) == (UNKNOWN_NODE, None, False)
    assert unauthenticated_pair.left.carrier.peer.node == RIGHT
    assert unauthenticated_pair.left.carrier.peer.verified


def test_an_unauthenticated_peer_may_say_small_control_messages(unauthenticated_pair: Pair) -> None:
    for tag, size in enumerate((0, 1, UNVERIFIED_BYTES)):
        unauthenticated_pair.left.send(pattern(size), tag=tag, lane=Lane.CONTROL)
    unauthenticated_pair.until(lambda: len(unauthenticated_pair.right.received.frames) == 3, "three small messages")
    assert [len(body) for _, body in unauthenticated_pair.right.received.frames] == [0, 1, UNVERIFIED_BYTES]


def test_an_unauthenticated_peer_may_leave_politely(unauthenticated_pair: Pair) -> None:
    unauthenticated_pair.left.send(b"goodbye", lane=Lane.CONTROL)
    unauthenticated_pair.left.carrier.finish()
    unauthenticated_pair.right.carrier.finish()
    unauthenticated_pair.until(
        lambda: unauthenticated_pair.right.received.finished and unauthenticated_pair.left.received.finished,
        "the polite end",
    )
    assert unauthenticated_pair.right.received.lost == []


def _send(kind: int, lane: Lane, size: int) -> Callable[[Side], None]:
    return lambda side: side.send(pattern(size), kind=kind, lane=lane)


@pytest.mark.parametrize(
    "say",
    [
        pytest.param(_send(FrameKind.CONTROL, Lane.CONTROL, UNVERIFIED_BYTES + 1), id="a large control message"),
        pytest.param(_send(FrameKind.CONTROL, Lane.CONTROL, MIB), id="the largest control message"),
        pytest.param(_send(FrameKind.CONTROL, Lane.RPC, 10), id="a call"),
        pytest.param(_send(FrameKind.CONTROL, Lane.DATA, 10), id="data"),
        pytest.param(_send(FrameKind.TERMS, Lane.CONTROL, 0), id="the terms of a link"),
        pytest.param(_send(FrameKind.EAGER, Lane.CONTROL, 0), id="a message"),
        pytest.param(lambda side: side.carrier.send_payload(1, memoryview(pattern(1000))), id="a payload"),
        pytest.param(lambda side: side.carrier.send_frame(Lane.DATA, 0, encode_chunk(1, 0, 5), b"bytes"), id="a chunk"),
    ],
)
def test_an_unauthenticated_peer_that_says_anything_else_is_thrown_out(
    unauthenticated_pair: Pair, say: Callable[[Side], None]
) -> None:
    unauthenticated_pair.right.carrier.expect_payload(1, memoryview(bytearray(1000)))
    say(unauthenticated_pair.left)
    unauthenticated_pair.until(
        lambda: unauthenticated_pair.right.received.lost, "the loss of a stranger that says too much"
    )
    assert unauthenticated_pair.right.received.lost[0].misbehaved, unauthenticated_pair.right.received.lost[0]
    assert unauthenticated_pair.right.received.frames == []
    assert unauthenticated_pair.right.received.payloads == []


def test_an_unauthenticated_peer_gets_no_memory_for_what_it_only_announces(
    unauthenticated_pair: Pair, case: Case
) -> None:
    if case.name == "memory":
        pytest.skip("a frame of the memory network arrives whole or not at all")
    before = anonymous_bytes()
    unauthenticated_pair.left.carrier.send_frame(Lane.CONTROL, 0, encode(Frame(kind=FrameKind.CONTROL, body=MIB)))
    unauthenticated_pair.until(lambda: unauthenticated_pair.right.received.lost, "the loss, at the header")
    assert unauthenticated_pair.right.received.lost[0].misbehaved
    assert str(UNVERIFIED_BYTES) in unauthenticated_pair.right.received.lost[0].reason
    assert anonymous_bytes() - before < 4 * MIB


def test_a_peer_that_was_admitted_has_the_usual_limits_from_the_next_frame_on(unauthenticated_pair: Pair) -> None:
    unauthenticated_pair.right.received.on_frame = lambda carrier, _: carrier.admit()
    unauthenticated_pair.left.send(b"my proof", tag=1, lane=Lane.CONTROL)
    unauthenticated_pair.left.send(pattern(MIB), tag=2, lane=Lane.CONTROL)
    unauthenticated_pair.until(
        lambda: len(unauthenticated_pair.right.received.frames) == 2, "a large message of a peer that was admitted"
    )
    assert unauthenticated_pair.right.received.frames[1][1] == pattern(MIB)
    unauthenticated_pair.check_usable()


def test_what_is_sent_to_an_unauthenticated_peer_is_not_limited(unauthenticated_pair: Pair) -> None:
    unauthenticated_pair.right.send(pattern(MIB), lane=Lane.CONTROL)
    unauthenticated_pair.until(
        lambda: unauthenticated_pair.left.received.frames, "a large message to a stranger that knows us"
    )
