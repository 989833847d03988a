import numpy as np
import pytest

from nexar.collectives.arena_memory import create_memory
from nexar.collectives.arena_slots import Slots


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.complex128])
def test_no_two_rows_share_a_byte(dtype: type) -> None:
    memory = create_memory(3, 4096)
    slots = Slots(memory, 1)
    views = slots.of(np.dtype(dtype))
    assert views is slots.of(np.dtype(dtype))
    assert views.capacity == 4096 // np.dtype(dtype).itemsize
    rows = [row for both in (views.given, views.worked) for parity in both for row in parity]
    assert len(rows) == 12
    for number, row in enumerate(rows):
        row[:] = number
    assert all((row == number).all() for number, row in enumerate(rows))
    assert all(len(row) >= -(-views.capacity // 3) for parity in views.worked for row in parity)
    del views, rows, row
    slots.release()
    memory.close()
