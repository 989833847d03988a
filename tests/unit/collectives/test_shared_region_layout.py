import os
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from nexar.arrays.operators import reduction_of
from nexar.collectives import shared_region_layout
from nexar.collectives.fingerprint import Fingerprint, rooted
from nexar.collectives.operations import OperationCode
from nexar.collectives.shared_region_layout import (
    RECORD_BYTES,
    SLOT_BYTES,
    SMALL_BYTES,
    TOTAL_BYTES,
    OneRound,
    RegionGeometry,
    RegionMemory,
    RegionPlans,
    RegionRecords,
    RegionSlots,
    TwoRounds,
    create_memory,
    open_memory,
)
from nexar.errors import UsageError


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16, 64, 200])
def test_the_whole_is_bounded_whatever_the_number_of_ranks(size: int) -> None:
    geometry = RegionGeometry.of(size)
    assert 0 < geometry.slot_bytes <= SLOT_BYTES
    assert geometry.total_bytes <= TOTAL_BYTES * 1.05


def test_what_one_writes_another_reads_and_no_name_is_left() -> None:
    before = set(os.listdir("/dev/shm"))
    made = create_memory(2)
    opened = open_memory(made.offer, 2)
    assert made.mapping is not None
    assert opened.mapping is not None
    made.mapping[5000] = 7
    assert opened.mapping[5000] == 7
    assert set(os.listdir("/dev/shm")) == before
    made.close()
    made.close()
    assert opened.mapping[5000] == 7
    opened.close()


def test_another_process_can_open_it_until_it_is_unlinked() -> None:
    made = create_memory(2)
    script = (
        "import sys; from nexar.collectives.shared_region_layout import open_memory; "
        "open_memory(sys.argv[1], 2).close()"
    )
    subprocess.run([sys.executable, "-c", script, made.offer], check=True, timeout=60)
    made.close_descriptor()
    made.close_descriptor()
    with pytest.raises(FileNotFoundError):
        open_memory(made.offer, 2)
    made.close()


def test_it_is_refused_with_another_size_or_nonce_and_where_it_is_something_else(tmp_path) -> None:  # type: ignore[no-untyped-def]
    made = create_memory(2)
    with pytest.raises(OSError, match="expected"):
        open_memory(made.offer, 3)
    process, descriptor, slot, nonce = made.offer.split()
    with pytest.raises(OSError, match="another segment"):
        open_memory(" ".join([process, descriptor, slot, "00" * (len(nonce) // 2)]), 2)
    with (tmp_path / "file").open("w+b") as file, pytest.raises(OSError, match="not a memory segment"):
        open_memory(f"{process} {file.fileno()} {slot} {nonce}", 2)
    made.close()


def test_where_memory_cannot_be_shared_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_region_layout, "missing_support", lambda: "this CPU cannot")
    with pytest.raises(OSError, match="this CPU cannot"):
        create_memory(2)
    with pytest.raises(OSError, match="this CPU cannot"):
        open_memory("1 2 3 4", 2)


def test_whoever_keeps_an_array_keeps_the_mapping() -> None:
    made = create_memory(1)
    kept = made.records()
    made.close()
    assert kept[0] == 0
    kept.release()


SUM = reduction_of("sum")


@pytest.fixture
def memory() -> Iterator[RegionMemory]:
    made = create_memory(2)
    yield made
    made.close()


@pytest.fixture
def both(memory: RegionMemory) -> Iterator[list[RegionSlots]]:
    made = [RegionSlots(memory, rank) for rank in range(2)]
    yield made
    for slots in made:
        slots.release()


def test_a_plan_is_made_once_and_the_oldest_is_forgotten(both: list[RegionSlots]) -> None:
    plans = RegionPlans(both[0])
    first = plans.of(np.ones(3), SUM)
    assert plans.of(np.zeros(3), SUM) is first
    assert plans.of(np.zeros(3, np.int64), SUM) is not first
    assert plans.of(np.zeros(3), reduction_of("max")) is not first
    for count in range(100, 200):
        plans.of(np.ones(count), SUM)
    assert plans.of(np.ones(3), SUM) is not first
    plans.release()


def test_few_bytes_take_one_round_more_take_two_and_too_many_fit_into_no_slot(both: list[RegionSlots]) -> None:
    plans = RegionPlans(both[0])
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
    both: list[RegionSlots], name: str, expected: float, parity: int, count: int
) -> None:
    reduction, arrays = reduction_of(name), [np.full(count, value, np.float32) for value in (2.0, 3.0)]
    made = [RegionPlans(slots) for slots in both]
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


REDUCE = Fingerprint(OperationCode.ALL_REDUCE, 11, 2**40, 0, 1)
BROADCAST = Fingerprint(OperationCode.BROADCAST, 17, 8, rooted(2**20), 0)


def two() -> tuple[RegionRecords, RegionRecords]:
    memory = memoryview(bytearray(2 * RECORD_BYTES))
    return RegionRecords(memory, 0, 2), RegionRecords(memory, 1, 2)


def test_each_record_is_its_ranks_own() -> None:
    left, right = two()
    assert left.all == right.all
    assert left.others == (right.mine,)
    assert [left.index(word) for word in left.all] == [0, 1]
    assert RECORD_BYTES % 128 == 0


def test_what_was_given_up_in_a_row_is_known_and_nothing_else() -> None:
    left, right = two()
    for order_number in (5, 6, 7):
        left.mark_aborted(order_number)
    assert [right.has_aborted(left.mine, order_number) for order_number in range(4, 9)] == [
        False,
        True,
        True,
        True,
        False,
    ]
    left.mark_aborted(9)
    assert [right.has_aborted(left.mine, order_number) for order_number in range(7, 11)] == [False, False, True, False]


def test_the_row_is_empty_while_it_is_being_begun_anew() -> None:
    left, right = two()
    left.mark_aborted(5)
    left.words[left.mine + 1] = 9  # the first of the two stores
    assert not any(right.has_aborted(left.mine, order_number) for order_number in range(4, 12))


def test_what_an_operation_is_taken_to_be_is_compared_and_reported() -> None:
    left, right = two()
    left.take(4, REDUCE)
    right.take(4, REDUCE)
    assert not left.differs(right.mine, 4)
    right.take(5, BROADCAST)
    assert not left.differs(right.mine, 4)
    left.take(5, REDUCE)
    assert left.differs(right.mine, 5)
    assert left.taken(right.mine, 5) == BROADCAST
    left.take(6, REDUCE)
    right.take(6, REDUCE._replace())
    assert not left.differs(right.mine, 6)


def test_announcements_are_reported_and_compared() -> None:
    left, right = two()
    before = time.monotonic_ns()
    left.announce(0, REDUCE)
    reported = right.announced(left.mine, 0)
    assert reported is not None
    assert reported[0] == REDUCE
    assert before <= reported[1] <= time.monotonic_ns()
    assert right.disagreement(0) is None
    right.announce(0, BROADCAST)
    assert right.disagreement(0) == (0, REDUCE)
    assert left.disagreement(0) == (1, BROADCAST)
    assert left.disagreement(8) is None
    assert all(left.arrivals(0))
    left.announce(8, REDUCE)
    assert left.announced(left.mine, 0) is None


def test_the_first_announcement_is_not_believed_before_it_is_whole() -> None:
    left, right = two()
    left.announce(0, REDUCE)
    last = left.mine + 16 + 4
    whole, left.words[last] = left.words[last], 0  # as it is before the last store
    assert right.announced(left.mine, 0) is None
    left.words[last] = whole
    assert right.announced(left.mine, 0) is not None


def test_an_announcement_that_is_overwritten_meanwhile_is_not_believed() -> None:
    left, right = two()
    left.announce(3, REDUCE)
    at = left.mine + 16 + 3 * 8
    left.words[at] = 11  # the first store of the next one in its room
    assert right.announced(left.mine, 3) is None


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.complex128])
def test_no_two_rows_share_a_byte(dtype: type) -> None:
    memory = create_memory(3, 4096)
    slots = RegionSlots(memory, 1)
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
