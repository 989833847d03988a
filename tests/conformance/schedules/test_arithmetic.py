"""Every dtype and operation on every schedule that reduces: what NumPy says, and the same bits on every rank.

Whole numbers, bits, logic, min and max are exact. A sum or product of n floats may be off by n half-steps of its dtype
(`n · eps / 2`, relative to the sum or product of absolute values): each way rounds n-1 times at most.
"""

from functools import reduce
from itertools import product

import ml_dtypes
import numpy as np
import pytest

from nexar.arrays.dtypes import DTYPES, kind_of
from nexar.arrays.operators import ReduceCode, check, reduction_of
from nexar.arrays.reduce import combine, finish, fold
from nexar.collectives.operations import COLLECTIVES, Layout
from nexar.collectives.operations import OperationCode as Op
from nexar.errors import UsageError
from tests.conformance.schedules.cases import ALGORITHMS, ALL, REDUCING, Case, run_case, wanted

NAMES = [code.name.lower() for code in ReduceCode if code is not ReduceCode.USER]
COUNT = 67
WAYS = [(operation, name) for operation, name in ALL if operation in REDUCING]
FOLDING = [(operation, name) for operation, name in WAYS if ALGORITHMS[operation][name].single_fold]
EXACT = {
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "land": np.logical_and,
    "lor": np.logical_or,
    "lxor": np.logical_xor,
    "sum": np.add,
    "prod": np.multiply,
}


class Reduced:
    """As the executor does it."""

    def __init__(self, reduction):
        self._reduction = reduction

    def combine(self, out, left, right):
        combine(self._reduction, out, left, right)

    def fold(self, out, inputs):
        fold(self._reduction, out, inputs)


def contribution(dtype, rank, count=COUNT):
    """Numbers for which nothing overflows in floats, and everything wraps in integers."""
    random = np.random.default_rng(rank)
    kind = kind_of(dtype)
    if kind == "bool":
        return random.integers(0, 2, count).astype(bool)
    if kind == "integer":
        limits = np.iinfo(dtype)
        return random.integers(limits.min, limits.max, count, dtype=dtype, endpoint=True)
    sign = random.choice([-1.0, 1.0], count)
    numbers = sign * random.uniform(0.5, 1.5, count)
    if kind == "complex":
        return (numbers + 1j * random.uniform(0.5, 1.0, count)).astype(dtype)
    return numbers.astype(dtype)


def defined(dtype):
    for name in NAMES:
        reduction = reduction_of(name)
        try:
            check(reduction, dtype)
        except UsageError:
            continue
        yield reduction


def is_exact(reduction, dtype):
    return kind_of(dtype) in {"bool", "integer"} or reduction.code not in {
        ReduceCode.SUM,
        ReduceCode.PROD,
        ReduceCode.AVG,
    }


def assert_right(got, brought, reduction, dtype):
    if is_exact(reduction, dtype):
        expected = reduce(EXACT[reduction.name], brought).astype(dtype)
        assert np.array_equal(got, expected)
        return
    wide = [each.astype(np.complex128 if kind_of(dtype) == "complex" else np.float64) for each in brought]
    operation = np.multiply if reduction.code is ReduceCode.PROD else np.add
    share = len(brought) if reduction.code is ReduceCode.AVG else 1
    error = np.abs(got.astype(wide[0].dtype) - reduce(operation, wide) / share)
    scale = reduce(operation, [np.abs(each) for each in wide]) / share
    rounded = len(brought) + 2 * (reduction.code is ReduceCode.AVG) + 2 * (kind_of(dtype) == "complex")
    assert (error <= rounded * half_step(dtype) * scale * 1.01).all()


def assert_rounded_once(got, brought, reduction, dtype):
    """Half a step of the dtype away from the exact result, and no more than float32 adds to that."""
    wide = [each.astype(np.float64) for each in brought]
    operation = np.multiply if reduction.code is ReduceCode.PROD else np.add
    share = len(brought) if reduction.code is ReduceCode.AVG else 1
    exact = reduce(operation, wide) / share
    scale = reduce(operation, [np.abs(each) for each in wide]) / share
    smallest = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    bound = half_step(dtype) * np.abs(exact) + len(brought) * 2.0**-23 * scale + smallest
    assert (np.abs(got.astype(np.float64) - exact) <= bound).all(), "rounded more than once"


def half_step(dtype):
    return float(ml_dtypes.finfo(dtype).eps) / 2


def results(case, brought, reduction):
    """Each rank's, finished; None where nothing is promised."""
    found = run_case(case, brought, Reduced(reduction))
    for each in found:
        if each is not None:
            finish(reduction, each, case.size)
    return found


@pytest.mark.parametrize(("operation", "name"), WAYS)
def test_every_operation_is_right_in_every_dtype(operation, name):
    for dtype in DTYPES:
        assert_every_operation(operation, name, dtype)


def assert_every_operation(operation, name, dtype):
    for size in (3, 4) if operation is Op.ALL_REDUCE else (3,):
        brought = [contribution(dtype, rank) for rank in range(size)]
        for reduction in defined(dtype):
            scans = COLLECTIVES[operation].is_scan
            if scans and reduction.code is ReduceCode.AVG:
                continue  # of how many, would be another number on every rank
            case = Case(operation, name, size, COUNT, root=1, segment=7)
            inputs = wanted(case, list(range(size)), list) if scans else [list(range(size))] * size
            for rank, got in enumerate(results(case, brought, reduction)):
                if got is None:
                    continue
                span = case.blocks[rank] if case.layout is Layout.SHARE else slice(0, COUNT)
                pieces = [brought[other][span.start : span.stop] for other in inputs[rank]]
                assert_right(got, pieces, reduction, dtype)


@pytest.mark.parametrize("name", [name for operation, name in WAYS if operation is Op.ALL_REDUCE])
def test_every_rank_has_the_same_bits(name):
    for size, dtype in product((2, 5, 6), DTYPES):
        brought = [contribution(dtype, rank) for rank in range(size)]
        for reduction in defined(dtype):
            found = results(Case(Op.ALL_REDUCE, name, size, COUNT, segment=4), brought, reduction)
            assert len({each.tobytes() for each in found}) == 1, (size, dtype, reduction)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_way_that_folds_gives_the_same_bits(dtype):
    """So do all others that fold in rank order: this is what deterministic=True promises between algorithms."""
    for reduction in defined(dtype):
        for segment in (7, 3):  # of shares of 10 and 9: the last segment is one element alone
            assert_same_bits(reduction, dtype, segment)


def assert_same_bits(reduction, dtype, segment):
    size = 7
    brought = [contribution(dtype, rank) for rank in range(size)]
    expected = np.empty(COUNT, dtype)
    fold(reduction, expected, brought)
    finish(reduction, expected, size)
    for operation, name in FOLDING:
        case = Case(operation, name, size, COUNT, root=2, segment=segment)
        found = [each for each in results(case, brought, reduction) if each is not None]
        whole = [np.concatenate(found)] if case.layout is Layout.SHARE else found
        assert {each.tobytes() for each in whole} == {expected.tobytes()}


@pytest.mark.parametrize("name", [name for operation, name in WAYS if operation is Op.ALL_REDUCE])
def test_nan_of_one_rank_reaches_all(name):
    size = 5
    floats = [dtype for dtype in DTYPES if kind_of(dtype) == "float"]
    for dtype, reduction in [(each, reduction) for each in floats for reduction in defined(each)]:
        if reduction.code in {ReduceCode.LAND, ReduceCode.LOR, ReduceCode.LXOR}:
            continue  # NaN is true
        brought = [contribution(dtype, rank) for rank in range(size)]
        brought[3][10] = np.nan
        for each in results(Case(Op.ALL_REDUCE, name, size, COUNT), brought, reduction):
            assert np.flatnonzero(np.isnan(each.astype(np.float64))).tolist() == [10]


@pytest.mark.parametrize(("operation", "name"), [(o, n) for o, n in WAYS if not COLLECTIVES[o].has_identity])
def test_a_function_of_the_user_reduces_too(operation, name):
    larger = reduction_of(lambda a, b: np.where(a > b, a, b))
    brought = [contribution(np.dtype(np.float32), rank) for rank in range(4)]
    case = Case(operation, name, 4, COUNT, segment=7)
    expected = wanted(case, brought, lambda arrays: np.max(arrays, axis=0))
    for rank, got in enumerate(run_case(case, brought, Reduced(larger))):
        assert got is None or np.array_equal(got, expected[rank])
