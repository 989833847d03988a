"""Allocations of a call: what cannot be had is replaced by a placeholder, and the failure is kept."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nexar.arrays.allocations import Allocations
from nexar.arrays.operand import adapt

HUGE = 1 << 56  # elements: more than a process can address


def refused() -> NDArray[Any]:
    raise MemoryError("on purpose")


def test_what_can_be_had_is_what_was_asked_for() -> None:
    memory = Allocations()
    array = np.arange(6.0).reshape(2, 3)
    assert memory.copy(array).tolist() == array.tolist()
    assert memory.empty(4, np.dtype(np.int8)).shape == (4,)
    assert memory.adapt(array.T).array.tolist() == array.T.tolist()
    room = memory.room(adapt(array), (5, 3))
    assert (room.array.shape, room.array.dtype) == ((5, 3), array.dtype)
    assert memory.error is None


def test_a_failed_allocation_becomes_a_placeholder_and_the_first_error_stands() -> None:
    memory = Allocations()
    found = memory.take(refused, (2, 3), np.dtype(np.float32))
    assert (found.shape, found.dtype, found.nbytes) == ((2, 3), np.float32, 24)
    first = memory.error
    room = memory.room(adapt(np.zeros(1)), (HUGE,))
    assert room.array.size == HUGE
    assert room.array.reshape(-1)[3:5].shape == (2,)
    assert first is not None
    assert memory.error is first


def test_an_array_that_cannot_be_copied_keeps_its_shape() -> None:
    memory = Allocations()
    columns = np.broadcast_to(np.float16(1), (HUGE, 3))  # not contiguous, so it would be copied
    given = memory.adapt(columns)
    assert (given.array.shape, given.array.dtype) == ((HUGE, 3), np.float16)
    assert not given.shares
    assert isinstance(memory.error, MemoryError)


def test_a_placeholder_cannot_be_written() -> None:
    found = Allocations().take(refused, (2,), np.dtype(np.int8))
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1
