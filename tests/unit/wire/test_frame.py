"""Frames are found however the stream was cut, without a copy, and in bounded memory.

The header: every field arrives, and nothing that no reader could use is let through.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nexar.wire.frame import (
    FIRST_BUFFER_BYTES,
    HEADER_BYTES,
    MAX_BODY_BYTES,
    MAX_BUFFER_BYTES,
    MAX_DIMENSIONS,
    MAX_FRAME_BYTES,
    Frame,
    FrameError,
    FrameKind,
    FrameReader,
    Lane,
    control_header,
    decode,
    decode_shape,
    encode,
    encode_chunk,
    encode_finish,
    encode_shape,
    next_frame,
)
from tests.unit.wire.frames import frames, quad

Whole = tuple[Frame, bytes]


def _body(frame: Frame) -> bytes:
    return bytes((frame.tag + index) % 256 for index in range(min(frame.body, 64))) + bytes(max(0, frame.body - 64))


def _feed(reader: FrameReader, data: bytes) -> list[Whole]:
    """Read `data` as a carrier would, the rest of a chunk past the reader."""
    found: list[Whole] = []
    position = 0
    while position < len(data):
        room = reader.room()
        assert len(room) > 0
        piece = data[position : position + len(room)]
        room[: len(piece)] = piece
        reader.filled(len(piece))
        position += len(piece)
        while (item := reader.next()) is not None:
            frame, body = item
            missing = frame.body - len(body)
            found.append((frame, bytes(body) + data[position : position + missing]))
            position += missing
    return found


@given(st.lists(frames(3000), max_size=8), st.data())
def test_frames_come_out_whole_and_in_order_however_the_stream_is_cut(sent: list[Frame], data: st.DataObject) -> None:
    sent = [replace(frame, kind=FrameKind.CONTROL) if frame.kind == FrameKind.CHUNK else frame for frame in sent]
    stream = b"".join(encode(frame) + _body(frame) for frame in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    reader = FrameReader()
    found: list[Whole] = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += _feed(reader, stream[start:stop])
    assert found == [(frame, _body(frame)) for frame in sent]
    assert reader.buffered_bytes == 0


@given(frames(500), st.data())
def test_next_frame_counts_the_missing_bytes_exactly(frame: Frame, data: st.DataObject) -> None:
    stream = b"before" + encode(frame) + _body(frame)
    end = data.draw(st.integers(6, len(stream)))
    answer = next_frame(stream, 6, end)
    if end == len(stream):
        assert answer == (frame, 6 + HEADER_BYTES, len(stream))
    elif end < 6 + HEADER_BYTES:
        assert answer == 6 + HEADER_BYTES - end
    else:
        assert answer == len(stream) - end


def test_a_body_is_a_view_of_the_readers_own_memory() -> None:
    reader = FrameReader()
    room = reader.room()
    data = encode(Frame(kind=FrameKind.CONTROL, body=4)) + b"body"
    room[: len(data)] = data
    reader.filled(len(data))
    item = reader.next()
    assert item is not None
    room[HEADER_BYTES] = ord("B")
    assert bytes(item[1]) == b"Body"


def test_a_chunk_is_handed_over_before_its_body_has_come() -> None:
    reader = FrameReader()
    header = encode_chunk(7, 1 << 40, 1 << 20)
    reader.room()[: HEADER_BYTES + 3] = header + b"abc"
    reader.filled(HEADER_BYTES + 3)
    item = reader.next()
    assert item is not None
    frame, arrived = item
    assert (frame.kind, frame.lane, frame.transfer, frame.count, frame.body) == (
        FrameKind.CHUNK,
        Lane.BULK,
        7,
        1 << 40,
        1 << 20,
    )
    assert bytes(arrived) == b"abc"
    assert reader.next() is None
    assert reader.buffered_bytes == 0  # the other bytes never pass through here


def test_what_follows_a_chunk_that_came_whole_is_found() -> None:
    reader = FrameReader()
    data = encode_chunk(7, 0, 5) + b"chunk" + encode(Frame(kind=FrameKind.CONTROL, body=4)) + b"next"
    assert [body for _, body in _feed(reader, data)] == [b"chunk", b"next"]


def test_a_finish_says_what_its_carrier_needs() -> None:
    frame = decode(encode_finish(12345))
    assert (frame.kind, frame.count, frame.body) == (FrameKind.FINISH, 12345, 0)


def test_the_largest_frame_passes_and_the_memory_for_it_is_given_back() -> None:
    reader = FrameReader()
    body = bytes(range(256)) * (MAX_BODY_BYTES // 256)
    assert _feed(reader, encode(Frame(kind=FrameKind.CONTROL, body=len(body))) + body)[0][1] == body
    assert reader.buffer_bytes <= MAX_BUFFER_BYTES
    reader.room()
    assert reader.buffer_bytes == FIRST_BUFFER_BYTES


def test_the_buffer_grows_with_bytes_that_came_not_with_claims() -> None:
    reader = FrameReader()
    _feed(reader, encode(Frame(kind=FrameKind.CONTROL, body=MAX_BODY_BYTES)))
    assert len(reader.room()) > 0
    assert reader.buffer_bytes == FIRST_BUFFER_BYTES
    arrived = HEADER_BYTES
    while arrived < MAX_FRAME_BYTES - 20_000:
        arrived += len(_step(reader, 10_000))
        assert reader.buffer_bytes <= max(FIRST_BUFFER_BYTES, 2 * (arrived + 16_384))


def _step(reader: FrameReader, size: int) -> bytes:
    data = bytes(min(size, len(reader.room())))
    _feed(reader, data)
    return data


def test_small_frames_never_grow_the_buffer() -> None:
    reader = FrameReader()
    stream = (encode(Frame(kind=FrameKind.CONTROL, body=100)) + bytes(100)) * 5000
    found = 0
    for start in range(0, len(stream), 7777):
        found += len(_feed(reader, stream[start : start + 7777]))
        assert reader.buffer_bytes == FIRST_BUFFER_BYTES
    assert found == 5000


def test_a_reader_that_met_garbage_stays_there() -> None:
    reader = FrameReader()
    good = encode(Frame(kind=FrameKind.CONTROL))
    reader.room()[: 3 * HEADER_BYTES] = good + b"\xff" * HEADER_BYTES + good
    reader.filled(3 * HEADER_BYTES)
    assert reader.next() is not None
    for _ in range(3):
        with pytest.raises(FrameError):
            reader.next()


@given(frames())
def test_decoding_undoes_encoding(frame: Frame) -> None:
    assert len(encode(frame)) == HEADER_BYTES
    assert decode(encode(frame)) == frame


@given(frames(), st.integers(0, 200))
def test_a_header_is_found_at_any_offset(frame: Frame, offset: int) -> None:
    assert decode(bytearray(bytes(offset) + encode(frame) + b"rest"), offset) == frame


def test_a_control_message_that_names_no_nodes_has_a_header_too() -> None:
    assert decode(control_header(7)) == Frame(kind=FrameKind.CONTROL, lane=Lane.CONTROL, length=7, body=7)


def test_the_layout_is_the_one_that_is_documented() -> None:
    """Golden bytes: a change here is a change of the protocol, and needs another VERSION."""
    frame = Frame(
        kind=2, lane=3, carrier=4, space=5, dtype=6, dimensions=1, operation=8, reduce_op=9, way=23, generation=10,
        step=11, root=12, communicator=13, source=14, destination=15, tag=16, sequence=17, message=18, transfer=19,
        length=20, count=21, body=22,
    )  # fmt: skip
    numbers = b"".join(n.to_bytes(4, "little") for n in (10, 11, 12))
    quads = b"".join(n.to_bytes(8, "little") for n in range(13, 22))
    assert encode(frame) == bytes([1, 2, 3, 4, 5, 6, 1, 8, 9, 23, 0, 0]) + numbers + quads + bytes(
        [22, 0, 0, 0]
    ) + bytes(4)


@pytest.mark.parametrize(
    ("field", "frame"),
    [
        ("version", Frame(version=2)),
        ("version", Frame(version=0)),
        ("body", Frame(body=MAX_BODY_BYTES + 1)),
        ("body", Frame(body=2**32 - 1)),
        ("dimensions", Frame(dimensions=3, body=23)),
        ("body", Frame(kind=FrameKind.EAGER, length=5, body=4)),
        ("body", Frame(kind=FrameKind.EAGER, length=2**60, body=8)),
        ("body", Frame(kind=FrameKind.EAGER, dimensions=1, length=1, body=8)),
    ],
)
def test_a_frame_that_cannot_be_is_refused_by_the_field_that_is_wrong(field: str, frame: Frame) -> None:
    with pytest.raises(FrameError) as refused:
        decode(encode(frame))
    assert refused.value.field == field


def test_unknown_kinds_and_lanes_pass() -> None:
    frame = Frame(kind=250, lane=99, body=4)
    assert decode(encode(frame)) == frame


def test_control_leaves_first_and_relayed_traffic_last() -> None:
    assert sorted(Lane) == [Lane.CONTROL, Lane.RPC, Lane.DATA, Lane.BULK, Lane.RELAY]


@given(st.lists(quad, max_size=MAX_DIMENSIONS))
def test_a_shape_comes_back(shape: list[int]) -> None:
    body = encode_shape(tuple(shape))
    frame = decode(encode(Frame(kind=FrameKind.ENVELOPE, dimensions=len(shape), body=len(body))))
    assert decode_shape(frame, body + b"data") == tuple(shape)


def test_a_shape_of_too_many_dimensions_is_refused() -> None:
    frame = Frame(kind=FrameKind.ENVELOPE, dimensions=MAX_DIMENSIONS + 1, body=8 * (MAX_DIMENSIONS + 1))
    with pytest.raises(FrameError):
        decode_shape(decode(encode(frame)), bytes(frame.body))
