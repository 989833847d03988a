import ml_dtypes
import numpy as np
import pytest

from nexar.arrays.compression.fp8 import FORMATS, FP8
from nexar.arrays.compression.terms import Terms
from nexar.errors import UsageError


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


def test_it_says_what_it_is_and_refuses_what_it_cannot_be() -> None:
    assert FP8().name == "FP8(e4m3, block=256)"
    assert FP8("e5m2", 32).name == "FP8(e5m2, block=32)"
    with pytest.raises(UsageError, match="e4m3, e5m2"):
        FP8("e3m4")
    with pytest.raises(UsageError, match="FP8"):
        FP8(block=-3)
