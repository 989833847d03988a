import math
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from nexar.arrays.compression.base import Terms
from nexar.arrays.compression.sparse import _BLOCK, RandomK, TopK, checked_ratio, draw_indices, elements_kept, largest
from nexar.collectives.compressed import seed_of
from nexar.errors import UsageError

DRAWS = 10_000


def random_k_terms(count: int, seed: int = 1, dtype: Any = np.float64, *, feedback: bool = False) -> Terms:
    return Terms(count, np.dtype(dtype), seed, feedback)


@given(st.integers(0, 2**64 - 1), st.integers(1, 200), st.floats(0, 1))
def test_as_many_as_wanted_are_drawn_each_once_and_ascending(seed: int, count: int, part: float) -> None:
    wanted = round(part * count)
    found = draw_indices(seed, count, wanted).tolist()
    assert found == sorted(set(found))
    assert len(found) == wanted
    assert all(0 <= index < count for index in found)
    assert draw_indices(seed, count, wanted).tolist() == found


def test_what_a_seed_draws_never_changes() -> None:
    """Ranks may have different versions of NumPy, and must draw the same."""
    assert draw_indices(7, 1000, 5).tolist() == [43, 314, 325, 786, 901]
    assert draw_indices(7, 10, 8).tolist() == [0, 1, 2, 4, 6, 7, 8, 9]


def test_every_set_is_as_likely_as_any_other() -> None:
    """Ten sets of 2 of 5: chi² with 9 degrees of freedom is above 33.7 once in 10,000 times; the seeds are fixed."""
    counts: dict[tuple[int, ...], int] = {}
    for sequence in range(DRAWS):
        found = tuple(draw_indices(seed_of(0, 0, sequence), 5, 2).tolist())
        counts[found] = counts.get(found, 0) + 1
    expected = DRAWS / math.comb(5, 2)
    assert len(counts) == 10
    assert sum((seen - expected) ** 2 / expected for seen in counts.values()) < 33.7


@pytest.mark.parametrize("ratio", [0.1, 0.34, 0.8])
def test_without_a_residual_the_mean_over_ten_thousand_draws_is_the_array(ratio: float) -> None:
    """Each element within 4.5 standard errors of its mean: of 20 elements one is out by chance once in 7,000 times; the
    seeds are fixed.
    """
    array = np.random.default_rng(3).normal(size=20)
    compressor, total = RandomK(ratio), np.zeros(20)
    for sequence in range(DRAWS):
        about = random_k_terms(20, seed_of(4, 2, sequence))
        total += compressor.decompress(compressor.compress(array, about), about)
    kept = math.ceil(20 * ratio) / 20
    error = np.abs(array) * math.sqrt((1 / kept - 1) / DRAWS)  # of a number that is array/kept, or else nought
    assert (np.abs(total / DRAWS - array) <= 4.5 * error).all()


def test_with_a_residual_values_are_sent_as_they_are() -> None:
    array = np.arange(1.0, 11)
    about = random_k_terms(10, feedback=True)
    back = RandomK(0.3).decompress(RandomK(0.3).compress(array, about), about)
    assert np.count_nonzero(back) == 3
    assert (back[back != 0] == array[back != 0]).all()


def test_half_types_are_rescaled_after_they_have_travelled() -> None:
    array = np.full(1000, 60_000, np.float32)
    about = random_k_terms(1000, dtype=np.float16)
    back = RandomK(0.001).decompress(RandomK(0.001).compress(array, about), about)
    assert back.dtype == np.float32
    assert back.max() == 60_000 * 1000


def test_only_values_travel() -> None:
    assert RandomK(0.01).size_bytes(1000, np.dtype(np.float32)) == 10 * 4
    assert len(RandomK(0.01).compress(np.ones(1000), random_k_terms(1000))) == 80
    assert len(RandomK(1).compress(np.ones(0), random_k_terms(0))) == 0
    assert RandomK(1).decompress(np.empty(0, np.uint8), random_k_terms(0)).shape == (0,)


def test_it_draws_once_in_a_call() -> None:
    about = random_k_terms(100)
    piece = RandomK(0.1).compress(np.ones(100), about)
    kept = dict(about.kept)
    RandomK(0.1).decompress(piece, about)
    assert all(about.kept[key] is value for key, value in kept.items())
    assert kept


def test_random_k_has_a_repr_and_refuses_wrong_arguments() -> None:
    assert RandomK(0.25).name == "RandomK(0.25)"
    assert RandomK.linear
    with pytest.raises(UsageError, match="RandomK"):
        RandomK(2)


@pytest.mark.parametrize("ratio", [0, -0.1, 1.1, math.nan, math.inf, "0.1", None, True, 1j])
def test_what_is_no_ratio_is_refused_by_name(ratio: object) -> None:
    with pytest.raises(UsageError, match=r"TopK\(.*is not a ratio; give a number above 0 and at most 1"):
        checked_ratio("TopK", ratio)


@pytest.mark.parametrize("ratio", [1, 1.0, 0.01, 1e-30, np.float32(0.5)])
def test_a_ratio_comes_back_as_a_float(ratio: float) -> None:
    assert type(checked_ratio("TopK", ratio)) is float


@given(st.integers(1, 10**9), st.floats(1e-12, 1, exclude_min=False))
def test_at_least_one_element_travels_and_never_more_than_there_are(count: int, ratio: float) -> None:
    assert 1 <= elements_kept(count, ratio) <= count
    assert elements_kept(count, ratio) >= count * ratio * (1 - 1e-15)


def test_of_nothing_nothing_travels() -> None:
    assert elements_kept(0, 0.5) == 0
    assert [elements_kept(count, 0.01) for count in (1, 100, 101, 1000)] == [1, 1, 2, 10]
    assert elements_kept(12345, 1.0) == 12345


def top_k_terms(array: NDArray[Any], dtype: Any = None) -> Terms:
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
def test_a_piece_has_the_announced_size_and_means_what_was_chosen(dtype: type) -> None:
    array = np.array([0.5, -4, 1, 3, -2], np.float64 if dtype is np.float64 else np.float32)
    compressor, about = TopK(0.5), top_k_terms(array, dtype)
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
    piece = TopK(0.3).compress(array, top_k_terms(array))
    memory = np.zeros(len(piece) + 1, np.uint8)
    memory[1:] = piece
    assert TopK(0.3).decompress(memory[1:], top_k_terms(array)).tolist() == [0] * 6 + [6, 7, 8]


def test_arrays_beyond_thirty_two_bits_have_wide_indices() -> None:
    assert TopK(2.0**-31).size_bytes(1 << 32, np.dtype(np.float32)) == 2 * 8
    assert TopK(2.0**-31).size_bytes((1 << 32) + 1, np.dtype(np.float32)) == 3 * 12


@pytest.mark.parametrize("wrong", [[0, 0, 1], [2, 1, 3], [1, 2, 5]])
def test_indices_that_nobody_would_have_sent_are_refused(wrong: list[int]) -> None:
    array = np.ones(5, np.float32)
    piece = TopK(0.6).compress(array, top_k_terms(array))
    piece[12:] = np.array(wrong, np.uint32).view(np.uint8)
    for read in (TopK(0.6).decompress, lambda *given: TopK(0.6).add(given[0], array.copy(), given[1])):
        with pytest.raises(ValueError, match="indices are not ascending and below 5"):
            read(piece, top_k_terms(array))


def test_nothing_is_a_piece_of_nothing() -> None:
    array = np.empty(0, np.float32)
    piece = TopK(1).compress(array, top_k_terms(array))
    assert len(piece) == TopK(1).size_bytes(0, array.dtype) == 0
    assert TopK(1).decompress(piece, top_k_terms(array)).shape == (0,)


def test_top_k_has_a_repr_and_refuses_wrong_arguments() -> None:
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
