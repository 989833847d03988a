import numpy as np
import pytest

from nexar.arrays.compression.int8 import Int8
from nexar.arrays.compression.terms import Terms
from nexar.errors import UsageError


def test_an_element_is_off_by_at_most_half_a_step_of_its_block() -> None:
    array = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    about = Terms(1000, array.dtype, 0, feedback=False)
    back = Int8(100).decompress(Int8(100).compress(array, about), about)
    steps = np.abs(array).reshape(10, 100).max(axis=1) / 127
    assert (np.abs(back - array).reshape(10, 100) <= steps[:, None] * 0.50001).all()


def test_it_says_what_it_is_and_refuses_what_it_cannot_be() -> None:
    assert Int8().name == "Int8(block=256)"
    assert not Int8.linear
    with pytest.raises(UsageError, match="Int8"):
        Int8(0)
