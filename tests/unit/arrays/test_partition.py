import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.arrays.partition import Span, segments, split

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
    with pytest.raises(ValueError, match=f"{count} elements cannot be cut into {parts} parts"):
        split(count, parts)


def test_segments_that_never_end_are_refused() -> None:
    with pytest.raises(ValueError, match="never reach the end"):
        segments(Span(0, 4), 0)
