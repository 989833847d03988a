"""Against conversion by NumPy and ml_dtypes: every bit, every path."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from nexar.arrays import half
from nexar.arrays.half import BLOCK, HALF_TYPES, fold_half, fold_wide, round_half

Array = NDArray[Any]
TYPES = sorted(HALF_TYPES, key=str)
UFUNCS = [np.add, np.multiply, np.minimum, np.maximum, np.logical_and, np.logical_or, np.logical_xor]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # reduce.py is what makes it quiet


def bits(array: Array) -> Array:
    return array.view(np.dtype(f"u{array.itemsize}"))


def same(found: Array, expected: Array) -> bool:
    """Bit for bit; a NaN is a NaN, whatever it carries."""
    nan = np.isnan(expected.astype(np.float32))
    return bool(
        np.array_equal(bits(found)[~nan], bits(expected)[~nan]) and np.isnan(found[nan].astype(np.float32)).all()
    )


def reference(ufunc: np.ufunc, inputs: list[Array], divisor: int = 1) -> Array:
    total = inputs[0].astype(np.float32)
    for one in inputs[1:]:
        total = ufunc(total, one.astype(np.float32)).astype(np.float32)
    if divisor != 1:
        total = total / np.float32(divisor)
    return total.astype(inputs[0].dtype)


def every_bit_pattern(dtype: np.dtype[Any], count: int, seed: int) -> Array:
    generator = np.random.default_rng(seed)
    return generator.integers(0, 1 << (8 * dtype.itemsize), count).astype(f"u{dtype.itemsize}").view(dtype)


def finite(dtype: np.dtype[Any], count: int, seed: int) -> Array:
    """All finite numbers, subnormal ones and zeros of both signs among them, small enough not to overflow."""
    array = every_bit_pattern(dtype, count, seed)
    limit = np.float32(ml_dtypes.finfo(dtype).max) / 64
    bits(array)[~(np.abs(array.astype(np.float32)) < limit)] &= bits(np.array(-0.0, dtype))
    return array


@pytest.mark.parametrize("ufunc", UFUNCS, ids=lambda ufunc: ufunc.__name__)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 200, 1000, 2 * BLOCK + 77])
@pytest.mark.parametrize("draw", [finite, every_bit_pattern])
def test_two_arrays_give_what_f32_gives_rounded_once(
    ufunc: np.ufunc, dtype: np.dtype[Any], count: int, draw: Any
) -> None:
    inputs = [draw(dtype, count, seed) for seed in range(2)]
    out = np.empty_like(inputs[0])
    fold_half(ufunc, out, inputs)
    assert same(out, reference(ufunc, inputs))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [3, 4, 9])
@pytest.mark.parametrize("draw", [finite, every_bit_pattern])
def test_many_arrays_are_rounded_once(dtype: np.dtype[Any], size: int, draw: Any) -> None:
    inputs = [draw(dtype, BLOCK + 5, seed) for seed in range(size)]
    for ufunc in (np.add, np.maximum):
        out = np.empty_like(inputs[0])
        fold_half(ufunc, out, inputs)
        assert same(out, reference(ufunc, inputs))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("divisor", [2, 3, 7, 1000, 8191, 8192, 10_007])
@pytest.mark.parametrize("count", [10, 5 * BLOCK])
def test_a_quotient_is_that_of_f32(dtype: np.dtype[Any], divisor: int, count: int) -> None:
    array = finite(dtype, count, 1)
    expected = reference(np.add, [array], divisor)
    fold_half(np.add, array, [array], divisor)
    assert same(array, expected)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 1000, BLOCK + 5])
@pytest.mark.parametrize("draw", [finite, every_bit_pattern])
def test_a_wide_fold_is_that_of_f32(dtype: np.dtype[Any], count: int, draw: Any) -> None:
    inputs = [draw(dtype, count, seed) for seed in range(3)]
    wide = [each.astype(np.float32) for each in inputs]
    out = np.empty(count, np.float32)
    fold_wide(np.add, out, inputs)
    assert same(out, (wide[0] + wide[1]) + wide[2])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 4095, 4096, 10_007])
@pytest.mark.parametrize("count", [10, 5 * BLOCK])
@pytest.mark.parametrize("draw", [finite, every_bit_pattern])
def test_a_wide_total_is_rounded_as_f32_is(dtype: np.dtype[Any], divisor: int, count: int, draw: Any) -> None:
    inputs = [draw(dtype, count, seed) for seed in range(3)]
    for ufunc in (np.add, np.multiply):
        total, out = np.empty(count, np.float32), np.empty(count, dtype)
        fold_wide(ufunc, total, inputs)
        round_half(ufunc, out, total, divisor)
        assert same(out, reference(ufunc, inputs, divisor))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_number_plus_nothing_is_itself(dtype: np.dtype[Any]) -> None:
    count = 1 << 16
    array = np.arange(count).astype(f"u{dtype.itemsize}").view(dtype)
    out = np.empty_like(array)
    fold_half(np.maximum, out, [array, array])
    assert same(out, array)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_tie_goes_to_the_even_neighbour(dtype: np.dtype[Any]) -> None:
    step = float(ml_dtypes.finfo(dtype).eps)
    left = np.tile(np.array([1, 1 + step], dtype), 3000)
    right = np.full_like(left, step / 2)
    out = np.empty_like(left)
    fold_half(np.add, out, [left, right])
    assert out[:2].astype(np.float32).tolist() == [1, 1 + 2 * step]


@pytest.mark.parametrize(
    "dtype", [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e5m2)], ids=str
)
@pytest.mark.parametrize("count", [100, 1000, 5000])
def test_infinities_and_nan_are_kept(dtype: np.dtype[Any], count: int) -> None:
    largest = float(ml_dtypes.finfo(dtype).max)
    left, right = np.ones(count, dtype), np.ones(count, dtype)
    left[:5] = np.array([np.inf, -np.inf, np.inf, np.nan, largest], dtype)
    right[:5] = np.array([1, 1, -np.inf, 1, largest], dtype)
    out = np.empty_like(left)
    fold_half(np.add, out, [left, right])
    assert np.array_equal(out[:6].astype(np.float32), [np.inf, -np.inf, np.nan, np.nan, np.inf, 2], equal_nan=True)


def test_what_has_no_infinity_overflows_to_nan() -> None:
    array = np.full(5000, 448, ml_dtypes.float8_e4m3fn)
    for inputs in ([array, array], [array, array, array]):
        out = np.empty_like(array)
        fold_half(np.add, out, inputs)
        assert np.isnan(out.astype(np.float32)).all()


def test_a_total_may_pass_the_largest_number_on_the_way() -> None:
    array = np.full(5000, 60_000, np.float16)
    out = np.empty_like(array)
    fold_half(np.add, out, [array, array, -array])
    assert (out == 60_000).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_result_may_replace_any_input(dtype: np.dtype[Any], which: int) -> None:
    inputs = [finite(dtype, BLOCK + 9, seed) for seed in range(3)]
    expected = reference(np.add, inputs)
    fold_half(np.add, inputs[which], inputs)
    assert same(inputs[which], expected)


def test_integers_do_it_where_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise AssertionError("converted element by element")

    monkeypatch.setattr(half, "_fold_by_conversion", refuse)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        fold_half(np.add, np.empty(5000, dtype), [np.ones(5000, dtype), np.full(5000, -0.25, dtype)])
