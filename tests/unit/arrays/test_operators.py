import ml_dtypes
import numpy as np
import pytest

from nexar.arrays.dtypes import DTYPES, kind_of
from nexar.arrays.operators import ReduceCode, Reduction, check, identity, reduction_of
from nexar.errors import UsageError

NAMES = ["sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "land", "lor", "lxor"]
FLOATS, INTEGERS, COMPLEX = (
    [dtype for dtype in DTYPES if kind_of(dtype) == kind] for kind in ("float", "integer", "complex")
)


def longest(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return np.where(np.abs(left) > np.abs(right), left, right)


def test_numbers_on_the_wire_never_change() -> None:
    assert [code.value for code in ReduceCode] == list(range(1, 13))
    assert [reduction_of(name).code.name.lower() for name in NAMES] == NAMES


def test_a_function_is_a_reduction_that_has_its_name() -> None:
    assert reduction_of(longest, commutative=False) == Reduction("longest", ReduceCode.USER, False, longest)


def test_a_named_reduction_can_be_kept_in_rank_order() -> None:
    assert reduction_of("sum").commutative
    assert not reduction_of("sum", commutative=False).commutative


@pytest.mark.parametrize("op", ["mean", "SUM", "", None, 3])
def test_what_is_no_reduction_is_refused_with_the_list_of_those_that_are(op: object) -> None:
    with pytest.raises(UsageError, match=r"is not a reduction; allowed: sum, prod, .*, lxor, or a function"):
        reduction_of(op)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [np.dtype(np.bool_), *INTEGERS], ids=str)
def test_whole_numbers_have_everything_but_an_average(dtype: np.dtype) -> None:
    for name in set(NAMES) - {"avg"}:
        check(reduction_of(name), dtype)
    with pytest.raises(UsageError, match=f"avg of {dtype} is not defined: .*convert to a float type"):
        check(reduction_of("avg"), dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_have_everything_but_bits(dtype: np.dtype) -> None:
    for name in ("sum", "prod", "min", "max", "avg", "land", "lor", "lxor"):
        check(reduction_of(name), dtype)
    for name in ("band", "bor", "bxor"):
        with pytest.raises(UsageError, match=f"{name} of {dtype} is not defined: .*for integers and bool"):
            check(reduction_of(name), dtype)


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_complex_numbers_have_no_order(dtype: np.dtype) -> None:
    for name in ("sum", "prod", "avg", "land", "lor", "lxor"):
        check(reduction_of(name), dtype)
    for name in ("min", "max"):
        with pytest.raises(UsageError, match="complex numbers have no order"):
            check(reduction_of(name), dtype)


@pytest.mark.parametrize("dtype", ["O", ">f4", "U3", "M8[s]", np.longdouble])
def test_a_dtype_that_cannot_travel_is_refused_with_the_list_of_those_that_can(dtype: object) -> None:
    with pytest.raises(UsageError, match=r"cannot be sent or reduced; allowed: bool, int8, .*float8_e5m2"):
        check(reduction_of("sum"), np.dtype(dtype))  # type: ignore[call-overload]


UFUNCS = {
    "sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum, "band": np.bitwise_and,
    "bor": np.bitwise_or, "bxor": np.bitwise_xor,
}  # fmt: skip


def defined(name: str, dtype: np.dtype) -> bool:
    try:
        check(reduction_of(name), dtype)
    except UsageError:
        return False
    return True


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_identity_changes_nothing(dtype: np.dtype) -> None:
    values = np.array([0, 1, 1, 0, 100], dtype)
    for name, ufunc in UFUNCS.items():
        if defined(name, dtype):
            neutral = identity(reduction_of(name), dtype)
            assert np.dtype(type(neutral)) == dtype
            assert np.array_equal(ufunc(np.full_like(values, neutral), values), values)


def test_identities_of_logic_are_true_for_and_and_false_for_the_others() -> None:
    assert [identity(reduction_of(name), np.dtype(np.int32)) for name in ("land", "lor", "lxor")] == [1, 0, 0]


def test_identities_of_minimum_and_maximum_are_infinite_where_there_is_an_infinity() -> None:
    assert identity(reduction_of("min"), np.dtype(np.float32)) == np.inf
    assert identity(reduction_of("max"), np.dtype(ml_dtypes.bfloat16)) == -np.inf
    assert identity(reduction_of("min"), np.dtype(ml_dtypes.float8_e4m3fn)) == 448
    assert identity(reduction_of("max"), np.dtype(np.int8)) == -128


@pytest.mark.parametrize("op", ["avg", longest])
def test_what_has_no_identity_says_so(op: str) -> None:
    with pytest.raises(UsageError, match=r"(avg|longest) has no identity element"):
        identity(reduction_of(op), np.dtype(np.float32))
