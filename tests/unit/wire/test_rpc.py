import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.wire.rpc import MAX_BODY_BYTES, MAX_TEXT_BYTES, Body, BodyKind, call, decode, encode

PIECES = st.lists(st.binary(max_size=300), max_size=4)


@st.composite
def bodies(draw: st.DrawFn) -> Body:
    text = draw(st.text(max_size=50)).encode(errors="replace").decode()
    pieces = [memoryview(each) for each in draw(PIECES)]
    numbers = draw(st.integers(0, 65535)), draw(st.floats(0, 1e9))
    return Body(draw(st.sampled_from(BodyKind)), text, *numbers, draw(st.booleans()), pieces)


@given(bodies())
def test_a_body_comes_back_as_it_was(body: Body) -> None:
    found = decode(memoryview(encode(body)))
    assert found._replace(pieces=()) == body._replace(pieces=())
    assert [bytes(piece) for piece in found.pieces] == [bytes(piece) for piece in body.pieces]


@given(st.binary(max_size=200))
def test_any_other_bytes_are_refused_or_read_but_never_worse(data: bytes) -> None:
    try:
        decode(memoryview(data))
    except ValueError:
        return


@given(PIECES, st.data())
def test_a_body_that_was_cut_or_grew_is_refused(pieces: list[bytes], data: st.DataObject) -> None:
    row = bytes(encode(Body(BodyKind.RETURNED, "name", pieces=[memoryview(piece) for piece in pieces])))
    cut = data.draw(st.integers(0, len(row) - 1))
    for other in (row[:cut], row + b"x"):
        with pytest.raises(ValueError, match="body of"):
            decode(memoryview(other))


def test_a_function_is_named_by_text_or_by_number() -> None:
    assert decode(call("evaluate", 5.0)).function == "evaluate"
    assert decode(call(7, 5.0)).function == 7
    assert decode(call(7, 5.0)).is_call
    assert not Body(BodyKind.RETURNED).is_call


def test_several_pieces_lie_aligned_so_that_arrays_can_be_used_where_they_are() -> None:
    row = encode(Body(BodyKind.RETURNED, "odd", pieces=[memoryview(b"abc"), memoryview(bytes(100)), memoryview(b"z")]))
    start = bytes(row).index(b"abc")
    assert start % 64 == 0
    assert bytes(row).index(b"z") % 64 == 0


def test_what_lay_in_the_memory_before_is_not_sent() -> None:
    used = [bytearray(b"secret" * 50) for _ in range(50)]
    pieces = [memoryview(b"abc"), memoryview(b"d"), memoryview(b"e")]
    rows = []
    while used:
        used.pop()
        rows.append(bytes(encode(Body(BodyKind.RETURNED, "odd", pieces=pieces))))
    assert len(set(rows)) == 1
    between = rows[0][rows[0].index(b"abc") + 3 : rows[0].index(b"d", rows[0].index(b"abc"))]
    assert between == bytes(len(between))


def test_a_body_above_the_limit_is_refused() -> None:
    half = memoryview(bytearray(MAX_BODY_BYTES // 2))
    with pytest.raises(ValueError, match="256 MiB"):
        encode(Body(BodyKind.CALL, "f", pieces=[half, half]))


def test_a_long_text_is_cut_short() -> None:
    assert len(decode(encode(Body(BodyKind.RAISED, "x" * 10 * MAX_TEXT_BYTES))).text) == MAX_TEXT_BYTES


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds"):
        decode(call("f", seconds))
