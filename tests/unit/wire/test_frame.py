"""The header: every field arrives, and nothing that no reader could use is let through."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.wire.frame import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    MAX_DIMENSIONS,
    Frame,
    FrameError,
    Kind,
    Lane,
    control_header,
    decode,
    decode_shape,
    encode,
    encode_shape,
)
from tests.unit.wire.frames import frames, quad


@given(frames())
def test_decoding_undoes_encoding(frame: Frame) -> None:
    assert len(encode(frame)) == HEADER_BYTES
    assert decode(encode(frame)) == frame


@given(frames(), st.integers(0, 200))
def test_a_header_is_found_at_any_offset(frame: Frame, offset: int) -> None:
    assert decode(bytearray(bytes(offset) + encode(frame) + b"rest"), offset) == frame


def test_a_control_message_that_names_no_nodes_has_a_header_too() -> None:
    assert decode(control_header(7)) == Frame(kind=Kind.CONTROL, lane=Lane.CONTROL, length=7, body=7)


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
        ("body", Frame(kind=Kind.EAGER, length=5, body=4)),
        ("body", Frame(kind=Kind.EAGER, length=2**60, body=8)),
        ("body", Frame(kind=Kind.EAGER, dimensions=1, length=1, body=8)),
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
    frame = decode(encode(Frame(kind=Kind.ENVELOPE, dimensions=len(shape), body=len(body))))
    assert decode_shape(frame, body + b"data") == tuple(shape)


def test_a_shape_of_too_many_dimensions_is_refused() -> None:
    frame = Frame(kind=Kind.ENVELOPE, dimensions=MAX_DIMENSIONS + 1, body=8 * (MAX_DIMENSIONS + 1))
    with pytest.raises(FrameError):
        decode_shape(decode(encode(frame)), bytes(frame.body))
