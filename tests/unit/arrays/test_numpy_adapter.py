import ctypes
from typing import Any

import numpy as np
import pytest

from nexar.arrays.numpy_adapter import array_of, number_of
from nexar.arrays.operand import adapt
from nexar.errors import UsageError


def test_a_masked_array_is_refused_because_its_mask_would_be_lost() -> None:
    with pytest.raises(UsageError, match="masked elements have no meaning"):
        array_of(np.ma.masked_array([1, 2], [True, False]), writable=False)


def test_a_buffer_of_something_else_is_refused() -> None:
    with pytest.raises(UsageError, match=r"cannot be sent or reduced|holds no numbers"):
        adapt(memoryview(b"abc").cast("c"))
    with pytest.raises(UsageError, match=r"a buffer of format .* holds no numbers"):
        adapt(memoryview((ctypes.c_void_p * 2)()))


class Odd:
    """On a device that NumPy cannot read."""

    def __dlpack__(self, **_: object) -> Any:
        raise BufferError("on another device")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def test_what_dlpack_cannot_give_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match=r"a Odd cannot be taken by DLPack \(.*\); copy it to the CPU"):
        array_of(Odd(), writable=False)


@pytest.mark.parametrize("value", [None, "3", [3], np.zeros(1), np.zeros(())])
def test_what_is_no_number_is_none(value: object) -> None:
    assert number_of(value) is None


@pytest.mark.parametrize("value", [np.longdouble(1), np.datetime64("2020-01-01"), np.str_("a")])
def test_numbers_that_cannot_travel_are_refused(value: object) -> None:
    with pytest.raises(UsageError, match="cannot be sent or reduced"):
        number_of(value)
