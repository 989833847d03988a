"""Against conversion by NumPy and ml_dtypes: every bit, every path."""

import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from nexar.arrays import reduce
from nexar.arrays import reduce as module
from nexar.arrays.operators import reduction_of
from nexar.arrays.reduce import (
    BLOCK,
    NARROW_FLOATS,
    combine,
    combiner,
    finish,
    fold,
    fold_narrow,
    fold_wide,
    folder,
    quiet,
    quiet_ufunc,
    round_narrow,
)
from nexar.errors import UsageError
from nexar.native import native_installed

Array = NDArray[Any]
TYPES = sorted(NARROW_FLOATS, key=str)
NARROW_UFUNCS = [np.add, np.multiply, np.minimum, np.maximum, np.logical_and, np.logical_or, np.logical_xor]
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


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("draw", [finite, every_bit_pattern])
def test_two_arrays_give_what_f32_gives_rounded_once(dtype: np.dtype[Any], draw: Any) -> None:
    for count, ufunc in product([0, 1, 200, 1000, 2 * BLOCK + 77], NARROW_UFUNCS):
        inputs = [draw(dtype, count, seed) for seed in range(2)]
        out = np.empty_like(inputs[0])
        fold_narrow(ufunc, out, inputs)
        assert same(out, reference(ufunc, inputs)), (ufunc, count)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [3, 4, 9])
@pytest.mark.parametrize("draw", [finite, every_bit_pattern])
def test_many_arrays_are_rounded_once(dtype: np.dtype[Any], size: int, draw: Any) -> None:
    inputs = [draw(dtype, BLOCK + 5, seed) for seed in range(size)]
    for ufunc in (np.add, np.maximum):
        out = np.empty_like(inputs[0])
        fold_narrow(ufunc, out, inputs)
        assert same(out, reference(ufunc, inputs))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_quotient_is_that_of_f32(dtype: np.dtype[Any]) -> None:
    for count, divisor in product([10, 5 * BLOCK], [2, 3, 7, 1000, 8191, 8192, 10_007]):
        array = finite(dtype, count, 1)
        expected = reference(np.add, [array], divisor)
        fold_narrow(np.add, array, [array], divisor)
        assert same(array, expected), (count, divisor)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("draw", [finite, every_bit_pattern])
def test_a_wide_fold_is_that_of_f32(dtype: np.dtype[Any], draw: Any) -> None:
    for count in (0, 1, 1000, BLOCK + 5):
        inputs = [draw(dtype, count, seed) for seed in range(3)]
        wide = [each.astype(np.float32) for each in inputs]
        out = np.empty(count, np.float32)
        fold_wide(np.add, out, inputs)
        assert same(out, (wide[0] + wide[1]) + wide[2]), count


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("draw", [finite, every_bit_pattern])
def test_a_wide_total_is_rounded_as_f32_is(dtype: np.dtype[Any], draw: Any) -> None:
    for count in (10, 5 * BLOCK):
        inputs = [draw(dtype, count, seed) for seed in range(3)]
        for divisor, ufunc in product([1, 2, 3, 7, 4095, 4096, 10_007], [np.add, np.multiply]):
            total, out = np.empty(count, np.float32), np.empty(count, dtype)
            fold_wide(ufunc, total, inputs)
            round_narrow(ufunc, out, total, divisor)
            assert same(out, reference(ufunc, inputs, divisor)), (count, divisor, ufunc)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_number_plus_nothing_is_itself(dtype: np.dtype[Any]) -> None:
    count = 1 << 16
    array = np.arange(count).astype(f"u{dtype.itemsize}").view(dtype)
    out = np.empty_like(array)
    fold_narrow(np.maximum, out, [array, array])
    assert same(out, array)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_tie_goes_to_the_even_neighbour(dtype: np.dtype[Any]) -> None:
    step = float(ml_dtypes.finfo(dtype).eps)
    left = np.tile(np.array([1, 1 + step], dtype), 3000)
    right = np.full_like(left, step / 2)
    out = np.empty_like(left)
    fold_narrow(np.add, out, [left, right])
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
    fold_narrow(np.add, out, [left, right])
    assert np.array_equal(out[:6].astype(np.float32), [np.inf, -np.inf, np.nan, np.nan, np.inf, 2], equal_nan=True)


def test_what_has_no_infinity_overflows_to_nan() -> None:
    array = np.full(5000, 448, ml_dtypes.float8_e4m3fn)
    for inputs in ([array, array], [array, array, array]):
        out = np.empty_like(array)
        fold_narrow(np.add, out, inputs)
        assert np.isnan(out.astype(np.float32)).all()


def test_a_total_may_pass_the_largest_number_on_the_way() -> None:
    array = np.full(5000, 60_000, np.float16)
    out = np.empty_like(array)
    fold_narrow(np.add, out, [array, array, -array])
    assert (out == 60_000).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_result_of_narrow_floats_may_replace_any_input(dtype: np.dtype[Any], which: int) -> None:
    inputs = [finite(dtype, BLOCK + 9, seed) for seed in range(3)]
    expected = reference(np.add, inputs)
    fold_narrow(np.add, inputs[which], inputs)
    assert same(inputs[which], expected)


def test_integers_do_it_where_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise AssertionError("converted element by element")

    monkeypatch.setattr(reduce, "_fold_by_conversion", refuse)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        fold_narrow(np.add, np.empty(5000, dtype), [np.ones(5000, dtype), np.full(5000, -0.25, dtype)])


LARGEST = np.full(3, np.finfo(np.float32).max)


@pytest.fixture(params=["context", "errstate"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "errstate":
        monkeypatch.setattr(module, "_CONTEXT", None)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize(
    "add", [lambda: quiet_ufunc(np.add), lambda: quiet(lambda out, left, right: np.add(left, right, out))]
)
def test_an_overflow_is_infinite_and_raises_no_warning(add: Callable[[], Callable[..., None]]) -> None:
    out = np.zeros_like(LARGEST)
    with np.errstate(all="raise"), warnings.catch_warnings(action="error"):
        add()(out, LARGEST, LARGEST)
    assert np.isposinf(out).all()


@pytest.mark.usefixtures("_way")
def test_the_callers_settings_stay_as_they_were() -> None:
    with np.errstate(over="raise", invalid="call"):
        before = np.geterr()
        quiet_ufunc(np.add)(np.zeros_like(LARGEST), LARGEST, LARGEST)
        assert np.geterr() == before


@pytest.mark.usefixtures("_way")
def test_a_quiet_call_may_be_made_within_another() -> None:
    out = np.zeros_like(LARGEST)
    quiet(quiet_ufunc(np.add))(out, LARGEST, LARGEST)
    assert np.isposinf(out).all()


@pytest.mark.usefixtures("_way")
def test_errors_that_are_no_arithmetic_come_out() -> None:
    with pytest.raises(ValueError, match="could not be broadcast"):
        quiet_ufunc(np.add)(np.zeros(3), np.zeros(2), np.zeros(3))


INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
FLOATS = [np.float32, np.float64]
COMPLEX = [np.complex64, np.complex128]
NARROW = [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


@pytest.fixture(params=["native", "numpy"] if native_installed() else ["numpy"])
def _paths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs with the native package, if it is installed, and without it."""
    if request.param == "numpy":
        monkeypatch.setattr(module, "_native_fold", lambda: None)


both_paths = pytest.mark.usefixtures("_paths")

UFUNCS = {
    "sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum, "avg": np.add,
    "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
    "land": np.logical_and, "lor": np.logical_or, "lxor": np.logical_xor,
}  # fmt: skip
BITS = {"band", "bor", "bxor"}
WHOLE = sorted(set(UFUNCS) - {"avg"})
REAL = sorted(set(UFUNCS) - BITS)
COUNTS = [0, 1, 700, 100_003]


def numbers(dtype: Any, count: int, seed: int) -> Array:
    generator = np.random.default_rng(seed)
    array = generator.integers(-5, 6, count)
    return (array + 1j * array[::-1]).astype(dtype) if np.dtype(dtype).kind == "c" else array.astype(dtype)


def names_of(dtype: Any) -> list[str]:
    """The operations that are defined for a dtype."""
    if dtype in FLOATS:
        return REAL
    return [name for name in REAL if name not in ("min", "max")] if dtype in COMPLEX else WHOLE


@both_paths
@pytest.mark.parametrize("dtype", [np.bool_, *INTEGERS, *FLOATS, *COMPLEX])
def test_two_arrays_are_combined_as_numpy_does_in_the_same_dtype(dtype: Any) -> None:
    for count in COUNTS:
        left, right = numbers(dtype, count, 1), numbers(dtype, count, 2)
        for name in names_of(dtype):
            out = np.empty_like(left)
            combine(reduction_of(name), out, left, right)
            assert np.array_equal(out, UFUNCS[name](left, right).astype(dtype)), (name, count)


@both_paths
@pytest.mark.parametrize("dtype", [np.bool_, *INTEGERS, *FLOATS, *COMPLEX])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_many_arrays_are_folded_from_the_left(dtype: Any, size: int) -> None:
    for count in COUNTS:
        inputs = [numbers(dtype, count, seed) for seed in range(size)]
        for name in names_of(dtype):
            expected = inputs[0]
            if size == 1 and name in ("land", "lor", "lxor"):
                expected = (inputs[0] != 0).astype(dtype)
            for one in inputs[1:]:
                expected = UFUNCS[name](expected, one).astype(dtype)
            out = np.empty_like(inputs[0])
            fold(reduction_of(name), out, inputs)
            assert np.array_equal(out, expected), (name, count)


@both_paths
@pytest.mark.parametrize("dtype", [np.float64, np.int8])
@pytest.mark.parametrize("size", [3, 4])
def test_arrays_beyond_the_cache_are_folded_in_blocks(dtype: Any, size: int) -> None:
    count = (9 << 20) // np.dtype(dtype).itemsize + 3
    inputs = [np.full(count, rank, dtype) for rank in range(size)]
    inputs[1][:] = np.arange(count) % 100
    out = np.empty_like(inputs[0])
    fold(reduction_of("sum"), out, inputs)
    assert np.array_equal(out, inputs[1] + dtype(sum(range(size)) - 1))


@both_paths
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX, np.int32])
@pytest.mark.parametrize("which", range(4))
def test_the_result_may_replace_any_input(dtype: Any, which: int) -> None:
    inputs = [numbers(dtype, 70_000, seed) for seed in range(4)]
    expected = inputs[0] + inputs[1] + inputs[2] + inputs[3]
    fold(reduction_of("sum"), inputs[which], inputs)
    assert np.array_equal(inputs[which], expected)


@both_paths
@pytest.mark.parametrize("which", [0, 1])
def test_the_result_may_replace_either_of_two(which: int) -> None:
    pair = [numbers(np.float32, 9, 1), numbers(np.float32, 9, 2)]
    expected = pair[0] * pair[1]
    combine(reduction_of("prod"), pair[which], *pair)
    assert np.array_equal(pair[which], expected)


@given(st.lists(st.binary(min_size=8, max_size=8), min_size=2, max_size=6), st.sampled_from(INTEGERS))
def test_integers_wrap(words: list[bytes], dtype: Any) -> None:
    inputs = [np.frombuffer(word, dtype) for word in words]
    bits = 8 * np.dtype(dtype).itemsize
    out = np.empty_like(inputs[0])
    fold(reduction_of("sum"), out, inputs)
    exact = [sum(int(one[i]) for one in inputs) % (1 << bits) for i in range(len(out))]
    assert [int(value) % (1 << bits) for value in out] == exact


@both_paths
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", ["land", "lor", "lxor"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_logic_of_half_types_gives_zeros_and_ones(dtype: Any, name: str, size: int) -> None:
    for count in (3, 1000, 5000):
        inputs = [numbers(dtype, count, seed) for seed in range(size)]
        expected = inputs[0].astype(np.float32) != 0
        for one in inputs[1:]:
            expected = UFUNCS[name](expected, one.astype(np.float32))
        out = np.empty_like(inputs[0])
        fold(reduction_of(name), out, inputs)
        assert np.array_equal(out.astype(np.float32), expected)


@both_paths
def test_booleans_add_as_numpy_adds_them() -> None:
    left, right = np.array([False, False, True, True]), np.array([False, True, False, True])
    out = np.empty_like(left)
    combine(reduction_of("sum"), out, left, right)
    assert out.tolist() == [False, True, True, True]
    combine(reduction_of("prod"), out, left, right)
    assert out.tolist() == [False, False, False, True]


@both_paths
@pytest.mark.parametrize("dtype", [*FLOATS, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("name", ["min", "max"])
@pytest.mark.parametrize("count", [1, 5000])
def test_a_nan_wins_minimum_and_maximum_from_either_side(dtype: Any, name: str, count: int) -> None:
    nan, one = np.full(2 * count, np.nan).astype(dtype), np.ones(2 * count).astype(dtype)
    left, right = np.concatenate([nan[:count], one[:count]]), np.concatenate([one[:count], nan[:count]])
    out = np.empty_like(left)
    combine(reduction_of(name), out, left, right)
    assert np.isnan(out.astype(np.float32)).all()


@both_paths
@pytest.mark.parametrize("dtype", [*FLOATS, *NARROW, *COMPLEX])
def test_nothing_is_warned_of_and_nothing_raised(dtype: Any) -> None:
    huge = np.full(5000, ml_dtypes.finfo(dtype).max if np.dtype(dtype).kind != "c" else np.finfo(dtype).max).astype(
        dtype
    )
    out = np.empty_like(huge)
    with np.errstate(all="raise"), warnings.catch_warnings(action="error"):
        for count in (10, 1000, 5000):
            for name in ("sum", "prod", "avg"):
                combiner(reduction_of(name), huge.dtype)(out[:count], huge[:count], huge[:count])
                folder(reduction_of(name), huge.dtype)(out[:count], [huge[:count]] * 3)
                finish(reduction_of(name), out[:count], 3)
    assert not np.isfinite(out.astype(np.complex128)).any()


@both_paths
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
@pytest.mark.parametrize("size", [1, 2, 3, 10_000])
def test_an_average_is_divided_at_the_end(dtype: Any, size: int) -> None:
    array = numbers(dtype, 70_000, 1)
    expected = array / np.dtype(dtype).type(size)
    finish(reduction_of("avg"), array, size)
    assert np.array_equal(array, expected)


@both_paths
@pytest.mark.parametrize("dtype", NARROW)
def test_an_average_of_half_types_is_divided_in_f32(dtype: Any) -> None:
    array = numbers(dtype, 70_000, 1)
    expected = (array.astype(np.float32) / np.float32(3)).astype(dtype)
    finish(reduction_of("avg"), array, 3)
    assert np.array_equal(array.view(np.uint8), expected.view(np.uint8))


@both_paths
def test_the_others_are_done_before_the_end() -> None:
    array = np.arange(5)
    finish(reduction_of("sum"), array, 3)
    assert array.tolist() == [0, 1, 2, 3, 4]


@both_paths
@pytest.mark.parametrize("make", [combiner, folder])
def test_what_is_not_defined_is_refused_before_anything_happens(make: Callable[..., object]) -> None:
    with pytest.raises(UsageError, match="avg of int32 is not defined"):
        make(reduction_of("avg"), np.dtype(np.int32))


def append(left: Array, right: Array) -> Array:
    return left * 10 + right


def test_a_function_of_the_user_combines() -> None:
    out = np.zeros(2, np.int64)
    combine(reduction_of(append), out, np.array([1, 2]), np.array([3, 4]))
    assert out.tolist() == [13, 24]


@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_a_function_of_the_user_folds_in_order_whatever_is_replaced(which: int) -> None:
    inputs = [np.array([digit, digit + 1]) for digit in range(1, 5)]
    fold(reduction_of(append, commutative=False), inputs[which], inputs)
    assert inputs[which].tolist() == [1234, 2345]


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda left, _right: left.astype(np.float64), r"float64\[3\]"),
        (lambda left, _right: left[:2], r"float32\[2\]"),
        (lambda left, _right: left.sum(), "float32, not an array"),
        (lambda _left, _right: None, "NoneType, not an array"),
    ],
)
def test_a_function_that_returns_something_else_is_named(function: Callable[[Array, Array], Any], found: str) -> None:
    function.__name__ = "longest"
    out = np.full(3, 7, np.float32)
    with pytest.raises(
        UsageError, match=rf"the reduction function longest returned {found} for two arrays of float32\[3\]"
    ):
        combine(reduction_of(function), out, out, out)
    assert (out == 7).all()


def test_an_error_of_the_users_function_comes_out_as_it_is() -> None:
    def broken(left: Array, right: Array) -> Array:
        raise ZeroDivisionError("theirs")

    out = np.full(3, 7, np.float32)
    with pytest.raises(ZeroDivisionError, match="theirs"):
        fold(reduction_of(broken), out, [out, out])
    assert (out == 7).all()
