import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from nexar.arrays.operations import reduction_of
from nexar.arrays.reduce import combine, combiner, finish, fold, folder
from nexar.errors import UsageError

Array = NDArray[Any]
INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
FLOATS = [np.float32, np.float64]
COMPLEX = [np.complex64, np.complex128]
HALF = [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
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


CASES = [
    *((name, dtype) for name in WHOLE for dtype in [np.bool_, *INTEGERS]),
    *((name, dtype) for name in REAL for dtype in FLOATS),
    *((name, dtype) for name in REAL if name not in ("min", "max") for dtype in COMPLEX),
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize("count", COUNTS)
def test_two_arrays_are_combined_as_numpy_does_in_the_same_dtype(name: str, dtype: Any, count: int) -> None:
    left, right = numbers(dtype, count, 1), numbers(dtype, count, 2)
    out = np.empty_like(left)
    combine(reduction_of(name), out, left, right)
    assert np.array_equal(out, UFUNCS[name](left, right).astype(dtype))


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_many_arrays_are_folded_from_the_left(name: str, dtype: Any, size: int) -> None:
    for count in COUNTS:
        inputs = [numbers(dtype, count, seed) for seed in range(size)]
        expected = inputs[0]
        if size == 1 and name in ("land", "lor", "lxor"):
            expected = (inputs[0] != 0).astype(dtype)
        for one in inputs[1:]:
            expected = UFUNCS[name](expected, one).astype(dtype)
        out = np.empty_like(inputs[0])
        fold(reduction_of(name), out, inputs)
        assert np.array_equal(out, expected)


@pytest.mark.parametrize("dtype", [np.float64, np.int8])
@pytest.mark.parametrize("size", [3, 4])
def test_arrays_beyond_the_cache_are_folded_in_blocks(dtype: Any, size: int) -> None:
    count = (9 << 20) // np.dtype(dtype).itemsize + 3
    inputs = [np.full(count, rank, dtype) for rank in range(size)]
    inputs[1][:] = np.arange(count) % 100
    out = np.empty_like(inputs[0])
    fold(reduction_of("sum"), out, inputs)
    assert np.array_equal(out, inputs[1] + dtype(sum(range(size)) - 1))


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX, np.int32])
@pytest.mark.parametrize("which", range(4))
def test_the_result_may_replace_any_input(dtype: Any, which: int) -> None:
    inputs = [numbers(dtype, 70_000, seed) for seed in range(4)]
    expected = inputs[0] + inputs[1] + inputs[2] + inputs[3]
    fold(reduction_of("sum"), inputs[which], inputs)
    assert np.array_equal(inputs[which], expected)


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


@pytest.mark.parametrize("dtype", HALF)
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


def test_booleans_add_as_numpy_adds_them() -> None:
    left, right = np.array([False, False, True, True]), np.array([False, True, False, True])
    out = np.empty_like(left)
    combine(reduction_of("sum"), out, left, right)
    assert out.tolist() == [False, True, True, True]
    combine(reduction_of("prod"), out, left, right)
    assert out.tolist() == [False, False, False, True]


@pytest.mark.parametrize("dtype", [*FLOATS, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("name", ["min", "max"])
@pytest.mark.parametrize("count", [1, 5000])
def test_a_nan_wins_minimum_and_maximum_from_either_side(dtype: Any, name: str, count: int) -> None:
    nan, one = np.full(2 * count, np.nan).astype(dtype), np.ones(2 * count).astype(dtype)
    left, right = np.concatenate([nan[:count], one[:count]]), np.concatenate([one[:count], nan[:count]])
    out = np.empty_like(left)
    combine(reduction_of(name), out, left, right)
    assert np.isnan(out.astype(np.float32)).all()


@pytest.mark.parametrize("dtype", [*FLOATS, *HALF, *COMPLEX])
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


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
@pytest.mark.parametrize("size", [1, 2, 3, 10_000])
def test_an_average_is_divided_at_the_end(dtype: Any, size: int) -> None:
    array = numbers(dtype, 70_000, 1)
    expected = array / np.dtype(dtype).type(size)
    finish(reduction_of("avg"), array, size)
    assert np.array_equal(array, expected)


@pytest.mark.parametrize("dtype", HALF)
def test_an_average_of_half_types_is_divided_in_f32(dtype: Any) -> None:
    array = numbers(dtype, 70_000, 1)
    expected = (array.astype(np.float32) / np.float32(3)).astype(dtype)
    finish(reduction_of("avg"), array, 3)
    assert np.array_equal(array.view(np.uint8), expected.view(np.uint8))


def test_the_others_are_done_before_the_end() -> None:
    array = np.arange(5)
    finish(reduction_of("sum"), array, 3)
    assert array.tolist() == [0, 1, 2, 3, 4]


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
        (lambda left, _right: left.sum(), "float32, which is no array"),
        (lambda _left, _right: None, "NoneType, which is no array"),
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
