import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.arrays.compression.ratio import checked, chosen
from nexar.errors import UsageError


@pytest.mark.parametrize("ratio", [0, -0.1, 1.1, math.nan, math.inf, "0.1", None, True, 1j])
def test_what_is_no_ratio_is_refused_by_name(ratio: object) -> None:
    with pytest.raises(UsageError, match=r"TopK\(.*above 0, at most 1"):
        checked("TopK", ratio)


@pytest.mark.parametrize("ratio", [1, 1.0, 0.01, 1e-30, np.float32(0.5)])
def test_a_ratio_comes_back_as_a_float(ratio: float) -> None:
    assert type(checked("TopK", ratio)) is float


@given(st.integers(1, 10**9), st.floats(1e-12, 1, exclude_min=False))
def test_at_least_one_element_travels_and_never_more_than_there_are(count: int, ratio: float) -> None:
    assert 1 <= chosen(count, ratio) <= count
    assert chosen(count, ratio) >= count * ratio * (1 - 1e-15)


def test_of_nothing_nothing_travels() -> None:
    assert chosen(0, 0.5) == 0
    assert [chosen(count, 0.01) for count in (1, 100, 101, 1000)] == [1, 1, 2, 10]
    assert chosen(12345, 1.0) == 12345
