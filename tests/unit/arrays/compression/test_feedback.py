import ml_dtypes
import numpy as np
import pytest

from nexar.arrays.compression.feedback import corrected, left_over
from nexar.arrays.compression.terms import Terms


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float32, np.float64])
def test_what_is_left_is_added_in_the_work_dtype(dtype: type) -> None:
    about = Terms(2, np.dtype(dtype), 0, feedback=True)
    array = np.array([1, 2], dtype)
    for kind in (dtype, about.work):
        found = corrected(array, np.array([0.5, -1], kind), about)
        assert found.dtype == about.work
        assert found.tolist() == [1.5, 1]
    assert corrected(array, None, about).tolist() == [1, 2]
    assert array.tolist() == [1, 2]


def test_without_a_residual_and_in_the_work_dtype_nothing_is_copied() -> None:
    array = np.ones(3, np.float32)
    assert corrected(array, None, Terms(3, array.dtype, 0, feedback=False)) is array


def test_what_was_not_sent_is_left() -> None:
    assert left_over(np.array([3.0, 4, 5]), np.array([3.0, 0, 4])).tolist() == [0, 4, 1]


def test_where_what_is_no_number_was_sent_nothing_is_left() -> None:
    wanted = np.array([np.nan, np.inf, 1, np.nan])
    assert left_over(wanted, np.array([np.nan, np.inf, np.nan, 0])).tolist()[:3] == [0, 0, 0]
    assert np.isnan(wanted[3]), "it was not sent: somebody has to see it yet"
