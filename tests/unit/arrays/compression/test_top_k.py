import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from nexar.arrays.compression.terms import Terms
from nexar.arrays.compression.top_k import _BLOCK, TopK, largest
from nexar.errors import UsageError


def terms(array: NDArray[Any], dtype: Any = None) -> Terms:
    return Terms(len(array), np.dtype(dtype or array.dtype), 0, feedback=False)


def by_sorting(array: NDArray[Any], count: int) -> list[int]:
    """Largest magnitude first, then lower index; NaN above all."""
    keys = [(-np.inf if np.isnan(x) else -abs(float(x)), not np.isnan(x), i) for i, x in enumerate(array)]
    return sorted(index for _, _, index in sorted(keys)[:count])


@given(
    st.lists(st.one_of(st.integers(-3, 3).map(float), st.floats(width=32, allow_nan=False)), max_size=60),
    st.floats(0, 1),
    st.sampled_from([np.float32, np.float64]),
)
def test_the_largest_are_chosen_and_of_equal_ones_those_of_lower_index(
    numbers: list[float], part: float, dtype: type
) -> None:
    array = np.array(numbers, dtype)
    count = min(len(array), 1 + int(part * len(array)))
    assert largest(array, count).tolist() == by_sorting(array, count)


def test_not_a_number_and_infinity_are_larger_than_all_others() -> None:
    array = np.array([5, np.inf, 1, np.nan, -np.inf, 9], np.float32)
    assert largest(array, 1).tolist() == [3]
    assert largest(array, 3).tolist() == [1, 3, 4]
    assert largest(array, 4).tolist() == [1, 3, 4, 5]


def test_many_equal_ones_in_several_blocks_are_taken_from_the_front() -> None:
    array = np.zeros(2 * _BLOCK + 5, np.float32)
    array[[3, 2 * _BLOCK + 1]] = 1
    found = largest(array, _BLOCK + 10)
    assert found.tolist() == [*range(_BLOCK + 9), 2 * _BLOCK + 1]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, np.float32, np.float64])
def test_a_piece_has_the_size_that_was_told_and_means_what_was_chosen(dtype: type) -> None:
    array = np.array([0.5, -4, 1, 3, -2], np.float64 if dtype is np.float64 else np.float32)
    compressor, about = TopK(0.5), terms(array, dtype)
    piece = compressor.compress(array, about)
    assert piece.dtype == np.uint8
    assert len(piece) == compressor.size_bytes(5, np.dtype(dtype)) == 3 * (np.dtype(dtype).itemsize + 4)
    back = compressor.decompress(piece, about)
    assert back.dtype == about.work
    assert back.tolist() == [0, -4, 0, 3, -2]
    total = np.ones(5, about.work)
    compressor.add(piece, total, about)
    assert total.tolist() == [1, -3, 1, 4, -1]


def test_a_piece_is_read_wherever_it_lies() -> None:
    array = np.arange(9.0)
    piece = TopK(0.3).compress(array, terms(array))
    memory = np.zeros(len(piece) + 1, np.uint8)
    memory[1:] = piece
    assert TopK(0.3).decompress(memory[1:], terms(array)).tolist() == [0] * 6 + [6, 7, 8]


def test_arrays_beyond_thirty_two_bits_have_wide_indices() -> None:
    assert TopK(2.0**-31).size_bytes(1 << 32, np.dtype(np.float32)) == 2 * 8
    assert TopK(2.0**-31).size_bytes((1 << 32) + 1, np.dtype(np.float32)) == 3 * 12


@pytest.mark.parametrize("wrong", [[0, 0, 1], [2, 1, 3], [1, 2, 5]])
def test_indices_that_nobody_would_have_sent_are_refused(wrong: list[int]) -> None:
    array = np.ones(5, np.float32)
    piece = TopK(0.6).compress(array, terms(array))
    piece[12:] = np.array(wrong, np.uint32).view(np.uint8)
    for read in (TopK(0.6).decompress, lambda *given: TopK(0.6).add(given[0], array.copy(), given[1])):
        with pytest.raises(ValueError, match="ascend below 5"):
            read(piece, terms(array))


def test_nothing_is_a_piece_of_nothing() -> None:
    array = np.empty(0, np.float32)
    piece = TopK(1).compress(array, terms(array))
    assert len(piece) == TopK(1).size_bytes(0, array.dtype) == 0
    assert TopK(1).decompress(piece, terms(array)).shape == (0,)


def test_it_says_what_it_is_and_refuses_what_it_cannot_be() -> None:
    assert TopK(0.01).name == "TopK(0.01)"
    assert TopK(0.01) == TopK(0.01) != TopK(0.02)
    with pytest.raises(UsageError, match="TopK"):
        TopK(0)


def test_choosing_takes_about_as_long_as_partitioning_once() -> None:
    """A bound far above what is seen: benchmarks/compression.py measures."""
    array = np.random.default_rng(1).standard_normal(1 << 20, np.float32)
    count = len(array) // 100

    def quickest(task: Any) -> float:
        times = []
        for _ in range(5):
            begin = time.thread_time()
            task()
            times.append(time.thread_time() - begin)
        return min(times)

    reference = quickest(lambda: np.partition(array, len(array) - count))
    assert quickest(lambda: largest(array, count)) <= 10 * reference + 0.01
