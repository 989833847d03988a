"""The native kernels and NumPy compute the same bits, so ranks need not agree on who has the native package."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nexar import native
from nexar.arrays import reduce
from nexar.arrays.dtypes import DTYPES, RAW, code_of
from nexar.arrays.operators import ReduceCode, check, reduction_of
from nexar.arrays.reduce import combiner, folder, numpy_combiner, numpy_folder
from nexar.errors import UsageError

pytestmark = pytest.mark.skipif(not native.native_installed(), reason="nexar_native is not installed")
CODES = [code for code in ReduceCode if code is not ReduceCode.USER]
COUNTS = [0, 1, 3, 16, 65, 300, 1600, 2049, 70_001]  # NumPy's narrow floats change their method at 256 and 1536


def is_defined(code: ReduceCode, dtype: np.dtype[Any]) -> bool:
    try:
        check(reduction_of(code.name.lower()), dtype)
    except UsageError:
        return False
    return True


CASES = [pytest.param(code, dtype, id=f"{code.name}-{dtype}") for code, dtype in product(CODES, DTYPES)
         if is_defined(code, dtype)]  # fmt: skip


def elements(dtype: np.dtype[Any], count: int, seed: int) -> NDArray[Any]:
    """Half of them small numbers and zeros of both signs, half random bits."""
    generator = np.random.default_rng(seed)
    drawn = generator.integers(0, 2 if dtype.kind == "b" else 256, count * dtype.itemsize, np.uint8).view(dtype)
    few = generator.integers(-3, 4, count).astype(np.int8).astype(dtype)
    return np.where(generator.random(count) < 0.5, drawn, few if dtype.kind not in "fcV" else few * dtype.type(-1))


def same(found: NDArray[Any], wanted: NDArray[Any]) -> bool:
    """Equal bits; a NaN equals every NaN."""
    part = np.dtype(f"f{found.itemsize // 2}") if found.dtype.kind == "c" else found.dtype
    found, wanted = found.view(part), wanted.view(part)
    bits = np.dtype(f"u{part.itemsize}")
    equal = found.view(bits) == wanted.view(bits)
    if part.kind in "fV":
        equal |= np.isnan(found.astype(np.float64)) & np.isnan(wanted.astype(np.float64))
    return bool(equal.all())


def test_both_have_the_same_operations_and_dtypes() -> None:
    supported = {(op, dtype) for op, dtype in product(range(40), range(40)) if native.reduce.supported(op, dtype)}
    assert supported == {
        (int(code), code_of(dtype)) for code, dtype in product(CODES, DTYPES) if is_defined(code, dtype)
    }
    assert not any(native.reduce.supported(code, RAW) for code in CODES)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from drawing the numbers
@pytest.mark.parametrize(("code", "dtype"), CASES)
def test_both_compute_the_same_bits(code: ReduceCode, dtype: np.dtype[Any]) -> None:
    reduction = reduction_of(code.name.lower())
    for count, size in product(COUNTS, (1, 2, 3, 5)):
        divisor = size if code is ReduceCode.AVG else 1
        inputs = [elements(dtype, count, seed) for seed in range(size)]
        found, wanted = np.empty_like(inputs[0]), np.empty_like(inputs[0])
        folder(reduction, dtype, size)(found, inputs)
        numpy_folder(code, dtype, divisor)(wanted, inputs)
        assert same(found, wanted), (count, size)
        if size == 2:
            combiner(reduction, dtype, size)(found, *inputs)
            numpy_combiner(code, dtype, divisor)(wanted, *inputs)
            assert same(found, wanted), count


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_a_complex_product_does_not_depend_on_its_place(dtype: Any) -> None:
    """np.multiply computes some elements with FMA and others without."""
    generator = np.random.default_rng(1)
    left, right = (generator.standard_normal(2000).view(complex).astype(dtype) for _ in range(2))
    whole = np.empty_like(left)
    for combine in (combiner(reduction_of("prod"), left.dtype), numpy_combiner(ReduceCode.PROD, left.dtype)):
        combine(whole, left, right)
        for start in (1, 7, 998):
            part = np.empty_like(left[start:])
            combine(part, left[start:], right[start:])
            assert same(part, whole[start:])


def test_the_native_package_is_used_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("computed by NumPy")

    monkeypatch.setattr(reduce, "numpy_combiner", refuse)
    monkeypatch.setattr(reduce, "numpy_folder", refuse)
    for code, dtype in product(CODES, DTYPES):
        if is_defined(code, dtype):
            combiner(reduction_of(code.name.lower()), dtype, 2)
            folder(reduction_of(code.name.lower()), dtype, 3)


def test_another_release_of_the_native_package_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduce, "native_problem", lambda: "another release")
    reduce._native_fold.cache_clear()
    try:
        assert reduce._native_fold() is None
        array = np.ones(3, np.float32)
        reduce.fold(reduction_of("sum"), array, [array, array])
        assert array.tolist() == [2, 2, 2]
    finally:
        reduce._native_fold.cache_clear()
