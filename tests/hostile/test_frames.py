"""A million frames that somebody tampered with: each is a frame, is incomplete, or is refused; nothing else happens."""

import resource
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.wire.frame import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    MAX_BUFFER_BYTES,
    Frame,
    FrameError,
    FrameKind,
    FrameReader,
    encode,
    next_frame,
)
from tests.unit.wire.frames import frames

FRAMES = 1_000_000
BATCH = 50_000
MIB = 1 << 20
_TELLING = [
    1,
    6,
    HEADER_BYTES - 8,
    HEADER_BYTES - 7,
    HEADER_BYTES - 6,
]  # kind, dimensions, three bytes of the body's size


def _mutated(seed: int) -> np.ndarray:
    """BATCH headers that were in order until up to four bytes of each were changed, often where it matters most."""
    chance = np.random.default_rng(seed)
    kinds = [Frame(kind=kind, dimensions=1, length=8, body=16 if kind == FrameKind.EAGER else 8) for kind in FrameKind]
    valid = np.frombuffer(b"".join(encode(frame) for frame in kinds), np.uint8).reshape(len(kinds), HEADER_BYTES)
    headers = valid[chance.integers(0, len(kinds), BATCH)].copy()
    for _ in range(4):
        hit = chance.random(BATCH) < 0.6
        anywhere = chance.integers(0, HEADER_BYTES, BATCH)
        places = np.where(chance.random(BATCH) < 0.5, anywhere, chance.choice(_TELLING, BATCH))
        headers[hit, places[hit]] = chance.integers(0, 256, int(hit.sum()), dtype=np.uint8)
    return headers


def _outcomes(data: bytes) -> Iterator[str]:
    for start in range(0, len(data), HEADER_BYTES):
        end = min(len(data), start + 4 * HEADER_BYTES)
        try:
            answer = next_frame(data, start, end)
        except FrameError:
            yield "refused"
            continue
        if isinstance(answer, int):
            assert 0 < answer <= MAX_BODY_BYTES
            yield "incomplete"
        else:
            assert type(answer[0]) is Frame
            assert start + HEADER_BYTES == answer[1] <= answer[2] <= end
            yield "frame"


def test_a_million_mutated_frames_yield_frames_refusals_or_waiting_and_take_no_memory() -> None:
    seen = {"frame": 0, "incomplete": 0, "refused": 0}
    data = _mutated(0).tobytes()
    list(_outcomes(data))  # whatever is allocated once, is now
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(FRAMES // BATCH):
        for outcome in _outcomes(_mutated(seed).tobytes()):
            seen[outcome] += 1
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert sum(seen.values()) == FRAMES
    assert min(seen.values()) > 1000, seen
    assert grown < 16 * MIB


def test_mutated_streams_end_in_order_and_in_bounded_memory() -> None:
    for seed in range(20):
        headers = _mutated(seed)
        for first in range(0, BATCH, 500):
            reader = FrameReader()
            _read_to_the_end(reader, headers[first : first + 500].tobytes())
            assert reader.buffer_bytes <= MAX_BUFFER_BYTES


def _read_to_the_end(reader: FrameReader, data: bytes) -> None:
    """Feed it all, unless it is refused; the rest of a chunk is dropped, as for a transfer nobody wants."""
    position = 0
    while position < len(data):
        room = reader.room()
        count = min(len(room), len(data) - position, 1500)
        room[:count] = data[position : position + count]
        reader.filled(count)
        position += count
        try:
            while (item := reader.next()) is not None:
                position += item[0].body - len(item[1])
        except FrameError:
            return


@given(st.binary(max_size=4 * HEADER_BYTES))
def test_any_bytes_at_all(data: bytes) -> None:
    list(_outcomes(data + bytes(-len(data) % HEADER_BYTES)))
    _read_to_the_end(FrameReader(), data)


@given(frames(300), st.data())
def test_a_frame_cut_at_any_byte_is_incomplete(frame: Frame, data: st.DataObject) -> None:
    whole = encode(frame) + bytes(frame.body)
    cut = data.draw(st.integers(0, len(whole) - 1))
    missing = next_frame(whole, 0, cut)
    assert isinstance(missing, int)
    assert missing > 0


def test_a_frame_cut_at_every_byte_is_incomplete() -> None:
    whole = encode(Frame(kind=FrameKind.EAGER, dimensions=1, length=100, body=108)) + bytes(108)
    for cut in range(len(whole)):
        missing = next_frame(whole, 0, cut)
        assert missing == (HEADER_BYTES - cut if cut < HEADER_BYTES else len(whole) - cut)
        reader = FrameReader()
        reader.room()[:cut] = whole[:cut]
        reader.filled(cut)
        assert reader.next() is None
        assert reader.buffered_bytes == cut


@pytest.mark.parametrize("kind", [FrameKind.EAGER, FrameKind.ENVELOPE, FrameKind.CREDIT, FrameKind.CHUNK])
def test_a_frame_that_claims_a_message_of_2_to_the_60_bytes_costs_nothing(kind: FrameKind) -> None:
    header = encode(Frame(kind=kind, length=2**60, count=2**60))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.monotonic()
    reader = FrameReader()
    _read_to_the_end(reader, header)
    assert time.monotonic() - begin < 1
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MIB
    if kind == FrameKind.EAGER:
        with pytest.raises(FrameError):
            next_frame(header, 0, len(header))


@pytest.mark.parametrize("body", [MAX_BODY_BYTES + 1, 2**31, 2**32 - 1])
def test_a_frame_that_claims_too_large_a_body_is_refused_from_its_header_alone(body: int) -> None:
    with pytest.raises(FrameError) as refused:
        next_frame(encode(Frame(kind=FrameKind.CONTROL, body=body)), 0, HEADER_BYTES)
    assert refused.value.field == "body"
