"""Frames as hypothesis draws them."""

from hypothesis import strategies as st

from nexar.wire.frame import MAX_BODY_BYTES, MAX_DIMENSIONS, VERSION, Frame, FrameKind

byte = st.integers(0, 2**8 - 1)
word = st.integers(0, 2**32 - 1)
quad = st.integers(0, 2**64 - 1)


@st.composite
def frames(draw: st.DrawFn, largest_body: int = MAX_BODY_BYTES) -> Frame:
    """Any frame that a reader accepts."""
    kind = draw(st.one_of(st.sampled_from(FrameKind), byte))
    dimensions = draw(st.integers(0, min(MAX_DIMENSIONS, largest_body // 8)))
    body = draw(st.integers(dimensions * 8, largest_body))
    return Frame(
        version=VERSION,
        kind=int(kind),
        lane=draw(byte),
        carrier=draw(byte),
        space=draw(byte),
        dtype=draw(byte),
        dimensions=dimensions,
        operation=draw(byte),
        reduce_op=draw(byte),
        way=draw(byte),
        generation=draw(word),
        step=draw(word),
        root=draw(word),
        communicator=draw(quad),
        source=draw(quad),
        destination=draw(quad),
        tag=draw(quad),
        sequence=draw(quad),
        message=draw(quad),
        transfer=draw(quad),
        length=body - dimensions * 8 if kind == FrameKind.EAGER else draw(quad),
        count=draw(quad),
        body=body,
    )
