from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.arrays.compression.base import Terms
from nexar.arrays.compression.quantized import (
    FORMATS,
    FP8,
    LONGEST_BLOCK,
    BlockQuantizer,
    Int8,
    NoCompression,
    checked_block,
)
from nexar.errors import UsageError

BOTH = [Int8(4), FP8("e4m3", 4), FP8("e5m2", 4)]


def there_and_back(compressor: BlockQuantizer, numbers: list[float], dtype: Any = np.float32) -> np.ndarray:
    about = Terms(len(numbers), np.dtype(dtype), 0, feedback=False)
    piece = compressor.compress(np.array(numbers, about.work), about)
    assert piece.dtype == np.uint8
    assert len(piece) == compressor.size_bytes(len(numbers), about.dtype)
    return compressor.decompress(piece, about)


@pytest.mark.parametrize("compressor", BOTH)
@given(numbers=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=30))
def test_each_block_keeps_its_largest_element_and_no_other_becomes_larger(
    compressor: BlockQuantizer, numbers: list[float]
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
def test_a_block_with_what_is_no_number_comes_out_as_such_and_no_other(compressor: BlockQuantizer, odd: float) -> None:
    back = there_and_back(compressor, [1, 2, odd, 4, 1, 1, 1, 1, 2])
    assert np.isnan(back[:4]).all()
    assert back[4:].tolist() == [1, 1, 1, 1, 2]


@pytest.mark.parametrize("compressor", BOTH)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_zeros_stay_zeros_and_powers_of_two_what_they_are(compressor: BlockQuantizer, dtype: type) -> None:
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


@pytest.mark.parametrize("block", [0, -1, 1.5, "a", None, LONGEST_BLOCK + 1])
def test_what_is_no_length_of_a_block_is_refused_by_name(block: object) -> None:
    with pytest.raises(UsageError, match=r"Int8\(block=.*whole number"):
        checked_block("Int8", block)


@pytest.mark.parametrize(("name", "part", "range_"), [("e4m3", 16, 28_672), ("e5m2", 8, 939_524_096)])
def test_an_element_is_off_by_a_part_of_itself(name: str, part: int, range_: int) -> None:
    array = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    about = Terms(1000, array.dtype, 0, feedback=False)
    back = FP8(name, 100).decompress(FP8(name, 100).compress(array, about), about)
    furthest = np.repeat(np.abs(array).reshape(10, 100).max(axis=1), 100)
    off = np.abs(back - array)
    assert (off <= np.maximum(np.abs(array), furthest / range_) / part * 1.0001).all()


@pytest.mark.parametrize("name", FORMATS)
def test_the_largest_number_of_a_format_is_its_own(name: str) -> None:
    assert FP8(name).largest == float(ml_dtypes.finfo(FORMATS[name]).max)


def test_fp8_has_a_repr_and_refuses_wrong_arguments() -> None:
    assert FP8().name == "FP8(e4m3, block=256)"
    assert FP8("e5m2", 32).name == "FP8(e5m2, block=32)"
    with pytest.raises(UsageError, match="e4m3, e5m2"):
        FP8("e3m4")
    with pytest.raises(UsageError, match="FP8"):
        FP8(block=-3)


def test_an_element_is_off_by_at_most_half_a_step_of_its_block() -> None:
    array = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    about = Terms(1000, array.dtype, 0, feedback=False)
    back = Int8(100).decompress(Int8(100).compress(array, about), about)
    steps = np.abs(array).reshape(10, 100).max(axis=1) / 127
    assert (np.abs(back - array).reshape(10, 100) <= steps[:, None] * 0.50001).all()


def test_int8_has_a_repr_and_refuses_wrong_arguments() -> None:
    assert Int8().name == "Int8(block=256)"
    assert not Int8.linear
    with pytest.raises(UsageError, match="Int8"):
        Int8(0)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_everything_travels_as_it_is(dtype: type) -> None:
    about = Terms(4, np.dtype(dtype), 0, feedback=False)
    array = np.array([1, -2, 0, 0.5], about.work)
    piece = NoCompression().compress(array, about)
    assert len(piece) == NoCompression().size_bytes(4, about.dtype) == 4 * about.dtype.itemsize
    back = NoCompression().decompress(piece, about)
    assert back.dtype == about.work
    assert back.tolist() == array.tolist()
    assert not any(np.may_share_memory(*pair) for pair in ((array, piece), (piece, back)))


def test_it_says_what_it_is() -> None:
    assert NoCompression().name == "NoCompression()"
    assert NoCompression.linear
