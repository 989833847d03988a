from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.arrays.compression.blocks import LONGEST, Blocks, checked_block
from nexar.arrays.compression.fp8 import FP8
from nexar.arrays.compression.int8 import Int8
from nexar.arrays.compression.terms import Terms
from nexar.errors import UsageError

BOTH = [Int8(4), FP8("e4m3", 4), FP8("e5m2", 4)]


def there_and_back(compressor: Blocks, numbers: list[float], dtype: Any = np.float32) -> np.ndarray:
    about = Terms(len(numbers), np.dtype(dtype), 0, feedback=False)
    piece = compressor.compress(np.array(numbers, about.work), about)
    assert piece.dtype == np.uint8
    assert len(piece) == compressor.size_bytes(len(numbers), about.dtype)
    return compressor.decompress(piece, about)


@pytest.mark.parametrize("compressor", BOTH)
@given(numbers=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=30))
def test_each_block_keeps_its_largest_element_and_no_other_becomes_larger(
    compressor: Blocks, numbers: list[float]
) -> None:
    back = there_and_back(compressor, numbers)
    assert back.shape == (len(numbers),)
    for start in range(0, len(numbers), 4):
        block, found = np.array(numbers[start : start + 4]), back[start : start + 4].astype(float)
        furthest = np.abs(block).max()
        coarse = 1e-40  # what the rounding of a subnormal scale comes to, at most
        assert np.abs(found).max() <= furthest * 1.000001 + coarse
        assert np.abs(np.abs(found).max() - furthest) <= furthest * 1e-6 + coarse
        assert np.abs(found - block).max() <= furthest / 8 + coarse
        assert (np.sign(found) * np.sign(block) >= 0).all()


@pytest.mark.parametrize("compressor", BOTH)
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_a_block_with_what_is_no_number_comes_out_as_such_and_no_other(compressor: Blocks, odd: float) -> None:
    back = there_and_back(compressor, [1, 2, odd, 4, 1, 1, 1, 1, 2])
    assert np.isnan(back[:4]).all()
    assert back[4:].tolist() == [1, 1, 1, 1, 2]


@pytest.mark.parametrize("compressor", BOTH)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_zeros_stay_zeros_and_powers_of_two_what_they_are(compressor: Blocks, dtype: type) -> None:
    back = there_and_back(compressor, [0, 0, 0, 0, 1, 0, -1, 0, 0.5], dtype)
    assert back.dtype == (np.float64 if dtype is np.float64 else np.float32)
    assert back.tolist() == pytest.approx([0, 0, 0, 0, 1, 0, -1, 0, 0.5])


def test_float64_beyond_the_range_of_float32_has_scales_that_reach_as_far() -> None:
    assert there_and_back(Int8(2), [1e300, -1e300, 1e-300, 0], np.float64) == pytest.approx([1e300, -1e300, 1e-300, 0])


def test_a_block_costs_its_scale() -> None:
    assert Int8(256).size_bytes(1000, np.dtype(np.float32)) == 1000 + 4 * 4
    assert Int8(256).size_bytes(1000, np.dtype(np.float64)) == 1000 + 4 * 8
    assert Int8(256).size_bytes(0, np.dtype(np.float64)) == 0
    assert there_and_back(Int8(256), []).shape == (0,)


@pytest.mark.parametrize("block", [0, -1, 1.5, "a", None, LONGEST + 1])
def test_what_is_no_length_of_a_block_is_refused_by_name(block: object) -> None:
    with pytest.raises(UsageError, match=r"Int8\(block=.*whole number"):
        checked_block("Int8", block)
