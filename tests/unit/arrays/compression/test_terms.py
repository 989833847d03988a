import ml_dtypes
import numpy as np
import pytest

from nexar.arrays.compression.terms import Terms, work_dtype


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float32])
def test_narrow_types_are_worked_on_in_float32(dtype: type) -> None:
    assert work_dtype(np.dtype(dtype)) == np.float32
    assert Terms(1, np.dtype(dtype), 0, feedback=False).work == np.float32


def test_float64_stays_what_it_is() -> None:
    assert work_dtype(np.dtype(float)) == np.float64


def test_what_is_kept_is_kept_for_one_call() -> None:
    first, second = (Terms(1, np.dtype(float), 0, feedback=False) for _ in range(2))
    first.kept["x"] = 1
    assert not second.kept
