"""A member of the cluster that sends what it likes: it loses its link, and nobody else loses anything."""

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from nexar.errors import LinkClosed, NexarError, OperationTimeout, PeerLost, PeerMisbehaved
from nexar.wire.control import Ping
from nexar.wire.control import encode as encode_message
from nexar.wire.frame import HEADER_BYTES, MAX_BODY_BYTES, Frame, FrameKind, Lane, encode, encode_shape
from tests.hostile.link_scene import Scene, resident_bytes, send, send_bytes
from tests.processes.scale import MIB, measured, schemes, sized

ATTACKS = sized(150, 3000)
FRAMES = 30
DEADLINE = 2.0
EMPTY = (
    FrameKind.GRANT,
    FrameKind.DELIVERED,
    FrameKind.WITHDRAW,
    FrameKind.CREDIT,
    FrameKind.TERMS,
    FrameKind.FALLBACK,
)  # kinds without a body
TELLING = [0, 1, 2, 7, 8, 63, 64, 255, 2**16, 2**20, 2**30, 2**32 - 1, 2**40, 2**60, 2**63, 2**64 - 1]
LIMITS = {"generation": 2**32, "step": 2**32, "root": 2**32, "body": 2**32} | dict.fromkeys(
    ("version", "kind", "lane", "carrier", "space", "dtype", "dimensions", "operation", "reduce_op", "way"), 256
)


@pytest.fixture
def scene(scheme: str) -> Iterator[Scene]:
    with Scene(scheme) as scene:
        scene.check_friend()
        yield scene


# -- mutated frames --------------------------------------------------------------------------------------------------


def proper_frames(scene: Scene) -> list[tuple[Frame, bytes]]:
    """One of each kind, as a good peer would send them."""
    ping = encode_message(Ping(1))
    shape = encode_shape((2, 4))
    return [
        (scene.frame(FrameKind.EAGER, length=8, body=8), bytes(8)),
        (scene.frame(FrameKind.EAGER, length=8, dimensions=2, body=24), shape + bytes(8)),
        (scene.frame(FrameKind.ENVELOPE, length=100_000, transfer=1, dimensions=2, body=16), shape),
        (scene.frame(FrameKind.CONTROL, lane=Lane.CONTROL, length=len(ping), body=len(ping)), ping),
        (scene.frame(FrameKind.CHUNK, transfer=1, body=100), bytes(100)),
        *((scene.frame(kind, transfer=1), b"") for kind in EMPTY),
        (scene.frame(FrameKind.REFUSE, transfer=1, body=5), b"\xff\xfe no"),
        (scene.frame(FrameKind.FINISH), b""),
    ]


def mutated(frame: Frame, chance: random.Random) -> bytes:
    """Up to three fields have other values; now and then any byte."""
    for field in chance.sample(Frame.__struct_fields__, chance.randrange(4)):
        frame = replace(frame, **{field: chance.choice(TELLING) % LIMITS.get(field, 2**64)})
    header = bytearray(encode(frame))
    if chance.random() < 0.2:
        header[chance.randrange(HEADER_BYTES)] = chance.randrange(256)
    return bytes(header)


def attack(scene: Scene, chance: random.Random) -> int:
    """One link of mutated frames; how many could be sent before it was ended."""
    with scene.attack() as (carrier, _):
        waiting = [scene.listen_for(), scene.listen_for(memoryview(bytearray(8)))]
        sent = 0
        for number in range(FRAMES):
            frame, body = chance.choice(proper_frames(scene))
            header = mutated(replace(frame, message=number) if chance.random() < 0.5 else frame, chance)
            if not send_bytes(carrier, Lane(chance.choice([0, 2])), header, body):
                break
            sent += 1
    for operation in waiting:
        assert operation.done
        assert operation.error is None or isinstance(operation.error, NexarError | MemoryError)  # for a huge claim
    return sent


@schemes("shm", "quic", "tls")
def test_mutated_frames_end_their_link_and_disturb_nobody(scene: Scene, scheme: str, record_property: Any) -> None:
    chance = random.Random(scheme)
    for _ in range(60):  # until closed connections come and go at one rate
        attack(scene, chance)
    before = resident_bytes()
    frames, slowest = 0, 0.0
    for number in range(ATTACKS):
        frames += attack(scene, chance)
        if number % 10 == 0:
            slowest = max(slowest, scene.check_friend())
    growth = resident_bytes() - before
    kinds = {type(error).__name__ for _, _, error in scene.victim.losses}
    measured(
        record_property, scheme=scheme, frames=frames, growth_kib=growth // 1024, friend_ms=round(slowest * 1e3, 1)
    )
    assert PeerMisbehaved.__name__ in kinds
    assert kinds <= {PeerLost.__name__, PeerMisbehaved.__name__}
    assert growth < 16 * MIB


# -- claims ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        pytest.param(FrameKind.EAGER, PeerMisbehaved, id="message"),
        pytest.param(FrameKind.ENVELOPE, MemoryError, id="envelope"),
        pytest.param(FrameKind.CREDIT, PeerMisbehaved, id="credit"),
        pytest.param(FrameKind.CHUNK, PeerMisbehaved, id="chunk"),
    ],
)
@schemes("shm", "quic", "tls")
def test_a_claim_of_2_to_the_60_bytes_costs_nothing(scene: Scene, kind: FrameKind, error: type[Exception]) -> None:
    before = resident_bytes()
    with scene.attack() as (carrier, _):
        waiting = scene.listen_for()
        send(carrier, scene.frame(FrameKind.EAGER, length=0, message=0, tag=99))  # opens the flow
        send(carrier, scene.frame(kind, length=2**60, count=2**60, transfer=9, message=1))
        begin = time.monotonic()
        with pytest.raises(error):
            scene.victim.wait(waiting, timeout=DEADLINE)
        assert time.monotonic() - begin < DEADLINE
        scene.check_friend()
    assert resident_bytes() - before < 16 * MIB


@schemes("shm", "quic", "tls")
def test_envelopes_of_2_to_the_60_bytes_that_nobody_asked_for_only_wait(scene: Scene) -> None:
    before = resident_bytes()
    with scene.attack() as (carrier, _):
        for number in range(100):
            assert send(carrier, scene.frame(FrameKind.ENVELOPE, length=2**60, transfer=number, message=number))
        scene.check_friend()
        for _ in range(3):
            with pytest.raises(MemoryError, match="does not fit into memory"):
                scene.victim.wait(scene.listen_for(), timeout=DEADLINE)
    assert resident_bytes() - before < 16 * MIB


# -- silence ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("claimed", [100, 60_000, MAX_BODY_BYTES])
@schemes("shm", "quic", "tls")
def test_a_peer_that_stops_in_mid_frame_makes_its_receiver_wait_no_longer_than_agreed(
    scene: Scene, claimed: int
) -> None:
    before = resident_bytes()
    with scene.attack() as (carrier, _):
        waiting = scene.listen_for()
        send(carrier, scene.frame(FrameKind.EAGER, length=claimed, body=claimed), bytes(10))
        begin = time.monotonic()
        with pytest.raises((OperationTimeout, PeerMisbehaved)):
            scene.victim.wait(waiting, timeout=0.2)
        assert time.monotonic() - begin < DEADLINE
        scene.check_friend()
    assert resident_bytes() - before < 16 * MIB


@schemes("shm", "quic", "tls")
def test_a_peer_that_promises_a_payload_and_sends_none_can_be_given_up(scene: Scene) -> None:
    into = bytearray(4 * MIB)
    with scene.attack() as (carrier, ears):
        waiting = scene.listen_for(memoryview(into))
        send(carrier, scene.frame(FrameKind.ENVELOPE, length=len(into), transfer=3))
        scene.hostile.drive(lambda: any(frame.kind == FrameKind.GRANT for frame in ears.frames), 5)
        with pytest.raises(OperationTimeout, match="a send with tag 7"):
            scene.victim.wait(waiting, timeout=0.2)
        scene.check_friend()
        later = scene.listen_for(memoryview(into))
    with pytest.raises((PeerLost, LinkClosed)):
        scene.victim.wait(later, timeout=DEADLINE)
