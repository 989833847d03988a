from collections.abc import Iterator

import numpy as np
import pytest

from nexar.arrays.operations import reduction_of
from nexar.collectives.arena_memory import ArenaMemory, create_memory
from nexar.collectives.arena_plans import SMALL_BYTES, OneRound, Plans, TwoRounds
from nexar.collectives.arena_slots import Slots

SUM = reduction_of("sum")


@pytest.fixture
def memory() -> Iterator[ArenaMemory]:
    made = create_memory(2)
    yield made
    made.close()


@pytest.fixture
def both(memory: ArenaMemory) -> Iterator[list[Slots]]:
    made = [Slots(memory, rank) for rank in range(2)]
    yield made
    for slots in made:
        slots.release()


def test_a_plan_is_made_once_and_the_oldest_is_forgotten(both: list[Slots]) -> None:
    plans = Plans(both[0])
    first = plans.of(np.ones(3), SUM)
    assert plans.of(np.zeros(3), SUM) is first
    assert plans.of(np.zeros(3, np.int64), SUM) is not first
    assert plans.of(np.zeros(3), reduction_of("max")) is not first
    for count in range(100, 200):
        plans.of(np.ones(count), SUM)
    assert plans.of(np.ones(3), SUM) is not first
    plans.release()


def test_few_bytes_take_one_round_more_take_two_and_too_many_fit_into_no_slot(both: list[Slots]) -> None:
    plans = Plans(both[0])
    small = SMALL_BYTES // 2
    assert isinstance(plans.of(np.ones(small, np.uint8), SUM), OneRound)
    assert isinstance(plans.of(np.ones(small + 1, np.uint8), SUM), TwoRounds)
    assert isinstance(plans.of(np.ones(both[0].slot_bytes, np.uint8), SUM), TwoRounds)
    assert plans.of(np.ones(both[0].slot_bytes + 1, np.uint8), SUM) is None
    plans.release()


@pytest.mark.parametrize(("name", "expected"), [("sum", 5.0), ("avg", 2.5), ("max", 3.0)])
@pytest.mark.parametrize("parity", [0, 1])
@pytest.mark.parametrize("count", [1, 4, 100_001])
def test_run_side_by_side_all_have_the_result(
    both: list[Slots], name: str, expected: float, parity: int, count: int
) -> None:
    reduction, arrays = reduction_of(name), [np.full(count, value, np.float32) for value in (2.0, 3.0)]
    made = [Plans(slots) for slots in both]
    for slots in both:
        slots.parity = parity
    plans = [each.of(array, reduction) for each, array in zip(made, arrays, strict=True)]
    runs = [plan.run(array, array, None) for plan, array in zip(plans, arrays, strict=True) if plan is not None]
    rounds = 0
    while [next(run, "end") for run in runs] == [None, None]:
        rounds += 1
    assert plans[0] is not None
    assert rounds == plans[0].rounds
    assert all((array == expected).all() for array in arrays)
    for each in made:
        each.release()
