import pytest

from nexar.transport.stranger import STRANGER_BYTES, decode_from_stranger
from nexar.wire.codec import encode_finish
from nexar.wire.frame import Frame, FrameError, Kind, Lane, encode

SMALL = Frame(kind=Kind.CONTROL, lane=Lane.CONTROL, body=STRANGER_BYTES)
ALLOWED = (Kind.CONTROL, Kind.FINISH)


def test_a_small_control_message_passes():
    assert decode_from_stranger(encode(SMALL)) == SMALL
    assert decode_from_stranger(b"..." + encode(SMALL), 3) == SMALL


def test_the_end_passes():
    assert decode_from_stranger(encode_finish(7)).count == 7


@pytest.mark.parametrize(
    ("field", "frame"),
    [
        ("body", Frame(kind=Kind.CONTROL, body=STRANGER_BYTES + 1)),
        ("lane", Frame(kind=Kind.CONTROL, lane=Lane.DATA)),
        *(("kind", Frame(kind=kind)) for kind in Kind if kind not in ALLOWED),
    ],
)
def test_anything_else_is_refused_with_the_field_that_is_wrong(field, frame):
    with pytest.raises(FrameError, match="has not proven who it is") as refused:
        decode_from_stranger(encode(frame))
    assert refused.value.field == field


def test_what_is_no_frame_at_all_is_refused_as_ever():
    with pytest.raises(FrameError) as refused:
        decode_from_stranger(encode(Frame(version=9, kind=Kind.CONTROL)))
    assert refused.value.field == "version"
