import numpy as np
import pytest

from nexar.arrays.operations import reduction_of
from nexar.collectives.arena_memory import create_memory
from nexar.collectives.arena_quick import Plans
from nexar.collectives.arena_slots import Slots

SUM = reduction_of("sum")


def test_a_plan_is_made_once_and_the_oldest_is_forgotten() -> None:
    memory = create_memory(2)
    slots = Slots(memory, 0)
    plans = Plans(slots)
    first = plans.of(np.ones(3), SUM)
    assert plans.of(np.zeros(3), SUM) is first
    assert plans.of(np.zeros(3, np.int64), SUM) is not first
    assert plans.of(np.zeros(3), reduction_of("max")) is not first
    for count in range(100, 200):
        plans.of(np.ones(count), SUM)
    assert plans.of(np.ones(3), SUM) is not first
    del first
    plans.release()
    slots.release()
    memory.close()


@pytest.mark.parametrize(("name", "expected"), [("sum", 5.0), ("avg", 2.5)])
@pytest.mark.parametrize("parity", [0, 1])
def test_what_was_given_in_is_folded_now_or_later(name: str, expected: float, parity: int) -> None:
    memory = create_memory(2)
    ours, theirs = Slots(memory, 0), Slots(memory, 1)
    reduction = reduction_of(name)
    plans = [Plans(slots) for slots in (ours, theirs)]
    for made, value in zip(plans, (2.0, 3.0), strict=True):
        made.of(np.empty(4), reduction).give(parity, np.full(4, value))
    out, late = np.empty(4), np.empty(4)
    plans[0].of(out, reduction).fold(parity, out)
    assert list(plans[1].of(out, reduction).rest(parity, late)) == []
    assert (out == expected).all()
    assert (late == expected).all()
    for made in (*plans, ours, theirs):
        made.release()
    memory.close()
