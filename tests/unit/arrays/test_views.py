import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.arrays.views import Span, allocate, as_bytes, as_row, code_and_shape, copy, from_bytes, segments, split

COUNTS = st.integers(min_value=0, max_value=2000)


def tiles(spans: tuple[Span, ...], whole: Span) -> bool:
    edges = [whole.start, *(span.stop for span in spans)]
    return [span.start for span in spans] == edges[:-1] and edges[-1] == whole.stop


@given(COUNTS, st.integers(min_value=1, max_value=70))
def test_shares_are_those_of_array_split(count: int, parts: int) -> None:
    shares = np.array_split(np.arange(count), parts)
    assert [span.count for span in split(count, parts)] == [len(share) for share in shares]
    assert tiles(split(count, parts), Span(0, count))


@given(COUNTS, COUNTS, st.integers(min_value=1, max_value=700))
def test_segments_tile_a_span_exactly(start: int, count: int, limit: int) -> None:
    span = Span(start, start + count)
    cut = segments(span, limit)
    assert tiles(cut, span)
    assert all(segment.count == limit for segment in cut[:-1])
    assert all(0 < segment.count <= limit for segment in cut)


def test_counts_beyond_32_bits_are_split_exactly() -> None:
    assert split((1 << 40) + 1, 2) == (Span(0, (1 << 39) + 1), Span((1 << 39) + 1, (1 << 40) + 1))


@pytest.mark.parametrize(("count", "parts"), [(-1, 2), (4, 0), (4, -1)])
def test_what_cannot_be_cut_is_refused(count: int, parts: int) -> None:
    with pytest.raises(ValueError, match=f"cannot split {count} elements into {parts} parts"):
        split(count, parts)


def test_segments_that_never_end_are_refused() -> None:
    with pytest.raises(ValueError, match="the segment limit must be at least 1"):
        segments(Span(0, 4), 0)


@pytest.mark.parametrize("dtype", [np.bool_, np.int32, np.float64, ml_dtypes.bfloat16, np.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_an_array_is_its_bytes_and_comes_back_from_them(dtype: type, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, dtype)
    code, found = code_and_shape(array)
    back = from_bytes(as_bytes(array), code, found)
    assert back.dtype == array.dtype
    assert back.shape == shape
    assert np.array_equal(back, array)


def test_bytes_share_the_arrays_memory() -> None:
    array = np.zeros(2, np.uint16)
    as_bytes(array)[0] = 7
    assert array.tolist() == [7, 0]


def test_a_strided_array_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="ascontiguousarray"):
        as_bytes(np.zeros(4)[::2])


def test_raw_bytes_are_uint8_and_unknown_types_are_refused() -> None:
    assert from_bytes(memoryview(b"ab"), 0, ()).tolist() == [97, 98]
    with pytest.raises(ValueError, match="unknown dtype number 99"):
        from_bytes(memoryview(b"ab"), 99, (2,))


@pytest.mark.parametrize("data", [b"abcd", bytearray(b"abcd"), np.frombuffer(b"abcd", np.uint16)])
def test_whatever_is_contiguous_is_a_row_of_bytes(data: object) -> None:
    assert bytes(as_row(data)) == b"abcd"


def test_an_empty_buffer_is_an_empty_row() -> None:
    assert len(as_row(b"")) == len(as_row(np.zeros((0, 3)))) == len(allocate(0)) == 0


@pytest.mark.parametrize("size", [0, 10, 100_000])
def test_memory_is_copied_whole(size: int) -> None:
    source = memoryview(bytes(range(256)) * 400)[:size]
    into = allocate(size)
    copy(source, into)
    assert into == source
