import numpy as np
import pytest

from nexar.collectives.arena_memory import create_memory
from nexar.collectives.arena_slots import Slots
from nexar.errors import UsageError


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.complex128])
def test_no_two_rows_share_a_byte(dtype: type) -> None:
    memory = create_memory(3, 4096)
    slots = Slots(memory, 1)
    rows = slots.of(np.dtype(dtype))
    assert rows is slots.of(np.dtype(dtype))
    assert slots.capacity(np.dtype(dtype)) == 4096 // np.dtype(dtype).itemsize
    flat = [row for parity in rows for row in parity]
    assert len(flat) == 6
    for number, row in enumerate(flat):
        row[:] = number
    assert all((row == number).all() for number, row in enumerate(flat))
    del rows, flat, row
    slots.release()
    with pytest.raises(UsageError, match="closed"):
        slots.of(np.dtype(dtype))
    memory.close()
