import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.communicator.buffers import Scatter, Stretch, cut, gathered
from nexar.errors import UsageError

LARGE = 100_000


def test_large_buffers_are_pieces_of_their_own_and_small_ones_go_together() -> None:
    large = np.arange(LARGE, dtype=np.uint8)
    pieces = gathered([b"a", b"", array.array("B", b"bc"), large, bytearray(b"d"), large])
    assert [len(piece) for piece in pieces] == [3, LARGE, 1, LARGE]
    large[0] = 77
    assert pieces[1][0] == pieces[3][0] == 77
    assert bytes(pieces[0]) == b"abc"


def test_many_small_buffers_are_a_few_pieces() -> None:
    pieces = gathered([bytes(1000)] * 1000)
    assert sum(len(piece) for piece in pieces) == 1_000_000
    assert len(pieces) < 10


def test_nothing_is_no_piece() -> None:
    assert gathered([]) == []
    assert [len(piece) for piece in gathered([b"", b""])] == [0]


@given(st.lists(st.integers(0, 9), max_size=8), st.randoms())
def test_cuts_tile_the_buffers_in_order(sizes: list[int], random: object) -> None:
    total = sum(sizes)
    edges = sorted(random.randint(0, total) for _ in range(4))  # type: ignore[attr-defined]
    lengths = [stop - start for start, stop in zip([0, *edges], [*edges, total], strict=True)]
    cuts = cut(sizes, lengths)
    assert [sum(s.stop - s.start for s in stretches) for stretches in cuts] == sizes
    flat = [(s.buffer, at) for stretches in cuts for s in stretches for at in range(s.start, s.stop)]
    assert flat == [(buffer, at) for buffer, length in enumerate(lengths) for at in range(length)]


def test_a_piece_within_one_buffer_goes_straight_into_it() -> None:
    assert cut([3, 4], [5, 0, 2]) == [[Stretch(0, 0, 3)], [Stretch(0, 3, 5), Stretch(2, 0, 2)]]
    buffers = [bytearray(5), bytearray(2)]
    scatter = Scatter(buffers)
    room = scatter.room((3, 4))
    room[0][:] = b"abc"
    assert buffers[0][:3] == b"abc"
    room[1][:] = b"defg"
    assert buffers[1] == bytes(2)
    scatter.settle(room)
    assert [bytes(buffer) for buffer in buffers] == [b"abcde", b"fg"]


def test_what_came_elsewhere_is_brought_in() -> None:
    buffers = [np.zeros(2, np.uint8), bytearray(0), bytearray(3)]
    scatter = Scatter(buffers)
    assert (scatter.total, len(scatter)) == (5, 3)
    scatter.settle([memoryview(b"abcde")])
    assert [bytes(buffer) for buffer in buffers] == [b"ab", b"", b"cde"]


def test_what_cannot_be_filled_or_read_is_refused() -> None:
    with pytest.raises(UsageError, match="read-only"):
        Scatter([b"abc"])
    with pytest.raises(UsageError, match="contiguous"):
        Scatter([np.zeros((4, 4))[:, 0]])
    with pytest.raises(UsageError, match="contiguous"):
        gathered([np.zeros((4, 4))[:, 0]])
    with pytest.raises(UsageError, match="contiguous"):
        gathered([5])
