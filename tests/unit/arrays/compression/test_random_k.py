import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.arrays.compression.random_k import RandomK, drawn
from nexar.arrays.compression.terms import Terms
from nexar.collectives.compressed import seed_of
from nexar.errors import UsageError

DRAWS = 10_000


def terms(count: int, seed: int = 1, dtype: Any = np.float64, *, feedback: bool = False) -> Terms:
    return Terms(count, np.dtype(dtype), seed, feedback)


@given(st.integers(0, 2**64 - 1), st.integers(1, 200), st.floats(0, 1))
def test_as_many_as_wanted_are_drawn_each_once_and_ascending(seed: int, count: int, part: float) -> None:
    wanted = round(part * count)
    found = drawn(seed, count, wanted).tolist()
    assert found == sorted(set(found))
    assert len(found) == wanted
    assert all(0 <= index < count for index in found)
    assert drawn(seed, count, wanted).tolist() == found


def test_what_a_seed_draws_never_changes() -> None:
    """Ranks may have different versions of NumPy, and must draw the same."""
    assert drawn(7, 1000, 5).tolist() == [43, 314, 325, 786, 901]
    assert drawn(7, 10, 8).tolist() == [0, 1, 2, 4, 6, 7, 8, 9]


def test_every_set_is_as_likely_as_any_other() -> None:
    """Ten sets of 2 of 5: chi² with 9 degrees of freedom is above 33.7 once in 10,000 times; the seeds are fixed."""
    counts: dict[tuple[int, ...], int] = {}
    for sequence in range(DRAWS):
        found = tuple(drawn(seed_of(0, 0, sequence), 5, 2).tolist())
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
        about = terms(20, seed_of(4, 2, sequence))
        total += compressor.decompress(compressor.compress(array, about), about)
    kept = math.ceil(20 * ratio) / 20
    error = np.abs(array) * math.sqrt((1 / kept - 1) / DRAWS)  # of a number that is array/kept, or else nought
    assert (np.abs(total / DRAWS - array) <= 4.5 * error).all()


def test_with_a_residual_values_are_sent_as_they_are() -> None:
    array = np.arange(1.0, 11)
    about = terms(10, feedback=True)
    back = RandomK(0.3).decompress(RandomK(0.3).compress(array, about), about)
    assert np.count_nonzero(back) == 3
    assert (back[back != 0] == array[back != 0]).all()


def test_half_types_are_rescaled_after_they_have_travelled() -> None:
    array = np.full(1000, 60_000, np.float32)
    about = terms(1000, dtype=np.float16)
    back = RandomK(0.001).decompress(RandomK(0.001).compress(array, about), about)
    assert back.dtype == np.float32
    assert back.max() == 60_000 * 1000


def test_only_values_travel() -> None:
    assert RandomK(0.01).size_bytes(1000, np.dtype(np.float32)) == 10 * 4
    assert len(RandomK(0.01).compress(np.ones(1000), terms(1000))) == 80
    assert len(RandomK(1).compress(np.ones(0), terms(0))) == 0
    assert RandomK(1).decompress(np.empty(0, np.uint8), terms(0)).shape == (0,)


def test_it_draws_once_in_a_call() -> None:
    about = terms(100)
    piece = RandomK(0.1).compress(np.ones(100), about)
    kept = dict(about.kept)
    RandomK(0.1).decompress(piece, about)
    assert all(about.kept[key] is value for key, value in kept.items())
    assert kept


def test_it_says_what_it_is_and_refuses_what_it_cannot_be() -> None:
    assert RandomK(0.25).name == "RandomK(0.25)"
    assert RandomK.linear
    with pytest.raises(UsageError, match="RandomK"):
        RandomK(2)
