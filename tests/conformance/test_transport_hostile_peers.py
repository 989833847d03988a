"""A peer that violates the protocol, authenticated or not, loses its carrier. Nobody else loses anything."""

import random
from collections.abc import Callable

import pytest

from nexar.wire.frame import HEADER_BYTES, MAX_BODY_BYTES, Frame, FrameKind, Lane, encode, encode_chunk
from tests.conformance.conftest import MakeNode
from tests.conformance.harness import Pair, Side, anonymous_bytes, dial, pattern, pump
from tests.conformance.transports import LEFT, RIGHT, Case

MIB = 1 << 20


def _expect_misbehaviour(pair: Pair) -> None:
    pair.until(lambda: pair.right.received.lost, "the loss of a carrier whose peer misbehaved")
    assert pair.right.received.lost[0].misbehaved, pair.right.received.lost[0]
    pair.until(lambda: pair.left.received.lost, "the loss at the side that misbehaved")


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(random.Random(1).randbytes(HEADER_BYTES), id="random bytes"),
        pytest.param(bytes(HEADER_BYTES), id="zeros"),
        pytest.param(b"\xff" * HEADER_BYTES, id="ones"),
        pytest.param(encode(Frame(version=2, kind=FrameKind.CONTROL)), id="another version"),
        pytest.param(encode(Frame(kind=FrameKind.CONTROL, body=MAX_BODY_BYTES + 1)), id="a body above the limit"),
        pytest.param(encode(Frame(kind=FrameKind.CONTROL, body=2**32 - 1)), id="a body of 4 GiB"),
        pytest.param(encode(Frame(kind=FrameKind.EAGER, length=2**60)), id="a message of 2**60 bytes"),
        pytest.param(encode(Frame(kind=FrameKind.EAGER, dimensions=9)), id="a shape that is not there"),
        pytest.param(encode(Frame(kind=FrameKind.HELLO)), id="a second hello"),
    ],
)
def test_bytes_that_are_not_a_frame_end_the_carrier(pair: Pair, header: bytes) -> None:
    before = anonymous_bytes()
    pair.left.carrier.send_frame(Lane.DATA, 0, header)
    _expect_misbehaviour(pair)
    assert pair.right.received.frames == []
    assert anonymous_bytes() - before < 16 * MIB


def test_frames_before_the_garbage_are_delivered(pair: Pair) -> None:
    for tag in range(5):
        pair.left.send(b"fine", tag=tag)
    pair.left.carrier.send_frame(Lane.DATA, 0, b"\xff" * HEADER_BYTES)
    pair.left.send(b"after the garbage", tag=99)
    _expect_misbehaviour(pair)
    assert pair.right.received.tags == list(range(5))


def test_a_payload_that_nobody_expects_ends_the_carrier(pair: Pair) -> None:
    pair.left.carrier.send_payload(404, memoryview(pattern(1000)))
    _expect_misbehaviour(pair)


def test_a_chunk_of_an_unknown_transfer_ends_the_carrier(pair: Pair) -> None:
    pair.left.carrier.send_frame(Lane.DATA, 0, encode_chunk(404, 0, 5), b"bytes")
    _expect_misbehaviour(pair)


def test_a_payload_larger_than_expected_ends_the_carrier_and_touches_nothing_else(pair: Pair) -> None:
    memory = bytearray(3000)
    pair.right.carrier.expect_payload(1, memoryview(memory)[1000:2000])
    pair.left.carrier.send_payload(1, memoryview(pattern(1001)))
    _expect_misbehaviour(pair)
    assert pair.right.received.payloads == []
    assert not any(memory[:1000])
    assert not any(memory[2000:])


@pytest.mark.parametrize("size", [0, 999])
def test_a_payload_smaller_than_expected_never_counts_as_arrived(pair: Pair, size: int) -> None:
    pair.right.carrier.expect_payload(1, memoryview(bytearray(1000)))
    pair.left.carrier.send_payload(1, memoryview(pattern(size)))
    pair.left.carrier.finish()
    pair.until(
        lambda: pair.right.received.lost or pair.right.received.finished, "the end of a carrier with a wrong payload"
    )
    assert pair.right.received.payloads == []


def test_other_carriers_of_the_node_survive_a_peer_that_misbehaves(make_node: MakeNode) -> None:
    left, right = make_node(LEFT), make_node(RIGHT)
    pairs = []
    for _ in range(2):
        near, far = dial(left, right)
        pairs.append(Pair(Side(left, near), Side(right, far)))
        near.attach(pairs[-1].left.received)
        far.attach(pairs[-1].right.received)
    pairs[0].left.carrier.send_frame(Lane.DATA, 0, b"\xff" * HEADER_BYTES)
    _expect_misbehaviour(pairs[0])
    pairs[1].check_usable()


def _flood(size: int) -> Callable[[random.Random], bytes]:
    return lambda chance: chance.randbytes(size)


@pytest.mark.parametrize(
    "say",
    [
        pytest.param(lambda _: b"", id="nothing"),
        pytest.param(_flood(1), id="one byte"),
        pytest.param(_flood(100), id="100 random bytes"),
        pytest.param(_flood(2 * MIB), id="2 MiB of random bytes"),
        pytest.param(
            lambda _: encode(Frame(kind=FrameKind.HELLO, body=MAX_BODY_BYTES)), id="a hello that claims 1 MiB"
        ),
        pytest.param(lambda _: b"GET / HTTP/1.1\r\n\r\n", id="http"),
    ],
)
def test_an_unauthenticated_peer_talking_garbage_disturbs_nobody(
    case: Case, make_node: MakeNode, say: Callable[[random.Random], bytes]
) -> None:
    if case.raw_socket is None:
        pytest.skip(f"{case.name} has no listener that a stranger could reach")
    left, right = make_node(LEFT), make_node(RIGHT)
    address = right.transport.address_for(LEFT)
    assert address is not None
    before = anonymous_bytes()
    with case.raw_socket(address) as unauthenticated:
        unauthenticated.setblocking(False)
        rest = memoryview(say(random.Random(5)))
        for _ in range(100):
            rest = rest[_send_some(unauthenticated, rest) :]
            right.poll()
        near, far = dial(left, right)
        pair = Pair(Side(left, near), Side(right, far))
        near.attach(pair.left.received)
        far.attach(pair.right.received)
        pair.check_usable()
    pump([left, right], lambda: not left.poll() and not right.poll(), "quiet")
    assert len(right.accepted) == 1
    assert anonymous_bytes() - before < 32 * MIB


def _send_some(unauthenticated: object, rest: memoryview) -> int:
    try:
        return int(unauthenticated.send(rest)) if rest else 0  # type: ignore[attr-defined]
    except BlockingIOError:
        return 0
    except ConnectionError:  # it was thrown out
        return len(rest)
