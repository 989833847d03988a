"""The fast path: which calls it takes, and what it records."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from nexar_native import shm
from ranks import ALL_REDUCE_CODE, BARRIER_CODE, FLOAT32, LIMIT, SUM, Member, members, results

NUMPY_TYPES = ["?", "b", "h", "i", "l", "B", "H", "I", "L", "e", "f", "d", "F", "D"]


def alone() -> shm.Group:
    (member,) = members(1)
    return member.group


def test_it_reduces_arrays_of_numpys_types() -> None:
    def body(member: Member) -> None:
        for code in NUMPY_TYPES:
            for count in (1, 5, 700, 30_000):
                array = np.ones(count, code)
                member.reduce(array, "max" if code not in "FD" else "sum")
                assert (array == (1 if code not in "FD" else 2)).all(), (code, count)

    results(2, body)


def test_it_takes_arrays_of_any_shape() -> None:
    group = alone()
    for shape in [(), (0,), (2, 3), (1, 2, 3)]:
        assert group.all_reduce(np.ones(shape), "sum") is True


@pytest.mark.parametrize(
    ("array", "op"),
    [
        (np.ones(6)[::2], "sum"),
        (np.ones((3, 4), order="F"), "sum"),
        (np.ones(2, ">f4"), "sum"),
        (np.ones(2, np.longdouble), "sum"),
        (np.array(["a"]), "sum"),
        (np.array([object()]), "sum"),
        (np.zeros(2, "f4,i4"), "sum"),
        (np.zeros(2, "M8[s]"), "sum"),
        (np.ones(2).view(np.matrix), "sum"),
        (np.ma.ones(2), "sum"),
        (np.ones(2), "median"),
        (np.ones(2), b"sum"),
        (np.ones(2), np.add),
        (np.ones(2, np.int32), "avg"),
        (np.ones(2, np.float32), "band"),
        (bytearray(8), "sum"),
        ([1.0], "sum"),
        (1.0, "sum"),
        (None, "sum"),
    ],
)
@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")  # of np.matrix
def test_it_leaves_other_calls_alone(array: Any, op: Any) -> None:
    group = alone()
    assert group.all_reduce(array, op) is False
    assert group.next_sequence() == 0


def test_it_does_not_write_read_only_arrays() -> None:
    array = np.ones(2)
    array.flags.writeable = False
    assert alone().all_reduce(array, "sum") is False


def test_a_blocked_call_does_nothing() -> None:
    group = alone()
    group.block(6)
    group.unblock(2)
    assert group.blocked() == 4
    assert group.all_reduce(np.ones(2), "sum") is False
    assert group.barrier() is False
    group.unblock(4)
    assert group.barrier() is True
    assert group.next_sequence() == 1


def test_it_waits_for_the_turn_of_earlier_calls() -> None:
    group = alone()
    sequence, order = group.take(1)
    assert group.all_reduce(np.ones(2), "sum") is False
    group.skip(order, 1)
    assert group.all_reduce(np.ones(2), "sum") is True
    assert group.take(0) == (sequence + 2, order + 2)


def test_finished_calls_are_recorded() -> None:
    group = alone()
    before = time.monotonic()
    assert group.all_reduce(np.ones(2, np.float32), "sum") is True
    assert group.barrier() is True
    (reduced, barrier), dropped = group.recent()
    assert dropped == 0
    assert reduced[:2] == (0, (ALL_REDUCE_CODE, FLOAT32, 2, 0, SUM, 9))
    assert reduced[4:] == (8, 0)
    assert before <= reduced[2] <= reduced[3] <= barrier[2] <= barrier[3] <= time.monotonic()
    assert group.totals()[ALL_REDUCE_CODE][:2] == (1, 8)
    assert group.last_success() == (1, BARRIER_CODE, 1, barrier[3])
    group.note(7, (4, 0, 0, 0, 0, 0), 1.0, 3.0, 5, 2, 0.5)
    assert group.totals()[4] == (1, 5, 2.0, 0.5, 1)
    assert group.recent()[0][-1] == (7, (4, 0, 0, 0, 0, 0), 1.0, 3.0, 5, 2)
    success = group.last_success()
    assert success is not None
    assert success[0] == 1


def test_a_group_without_a_region_has_numbers_only() -> None:
    group = shm.Group(None, 0)
    assert group.take(3) == (0, 1)
    assert group.take() == (1, 4)
    assert group.all_reduce(np.ones(2), "sum") is False
    assert group.barrier() is False
    for call in (group.fileno, group.interrupt, lambda: group.publish_call(0, (0, 0, 0, 0, 0, 0))):
        with pytest.raises(ValueError, match="no region"):
            call()
    group.close()


def test_a_call_that_is_not_done_at_once_can_be_waited_for() -> None:
    one, two = members(2, spin_us=0)
    array = np.ones(2, np.float32)
    pending = one.group.all_reduce(array, "sum")
    assert isinstance(pending, shm.Pending)
    assert (pending.status, pending.sequence, pending.order) == (shm.WAITING, 0, 1)
    assert pending.fingerprint == (ALL_REDUCE_CODE, FLOAT32, 2, 0, SUM, 9)
    assert pending.began <= time.monotonic()
    assert pending.missing() == [1]
    assert one.group.arrivals(0)[0] is not None
    assert one.group.recent()[0] == []
    assert two.group.all_reduce(np.full(2, 3, np.float32), "sum") is True
    assert pending.wait(LIMIT) == shm.DONE
    assert array[0] == 4.0


def test_threads_of_one_rank_share_the_group() -> None:
    """Each thread posts its calls in any order: they run by order number."""
    size, calls = 2, 40

    def body(member: Member) -> list[float]:
        numbers = [member.group.take(1) for _ in range(calls)]
        arrays = [np.full(3000, float(index), np.float32) for index in range(calls)]
        failures: list[object] = []

        def run(part: int) -> None:
            mine = range(calls)[part::4]
            posted = []
            for index in mine if part % 2 else reversed(mine):
                sequence, order = numbers[index]
                array, fingerprint = arrays[index], (20, FLOAT32, index, 0, 0, 0)
                posted.append(
                    member.group.post(
                        order, sequence, fingerprint, shm.ALL_REDUCE, SUM, FLOAT32, array=array, out=array
                    )
                )
            failures.extend(each.status for each in posted if each.wait(LIMIT) != shm.DONE)

        threads = [threading.Thread(target=run, args=(part,)) for part in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert not failures
        return [float(array[-1]) for array in arrays]

    wanted = [2.0 * index for index in range(calls)]
    assert results(size, body) == [wanted, wanted]


def test_fast_calls_of_threads_do_not_collide() -> None:
    """Two threads make the same call many times. A call that finds the other one busy takes the general path."""

    def body(member: Member) -> tuple[float, int]:
        total = [0.0, 0.0]

        def run(part: int) -> None:
            for _ in range(300):
                array = np.ones(2, np.float32)
                done = member.group.all_reduce(array, "sum")
                if done is False:
                    sequence, order = member.group.take(1)
                    fingerprint = (ALL_REDUCE_CODE, FLOAT32, 2, 0, SUM, 9)
                    done = member.group.post(
                        order, sequence, fingerprint, shm.ALL_REDUCE, SUM, FLOAT32, array=array, out=array
                    )
                if isinstance(done, shm.Pending):
                    assert done.wait(LIMIT) == shm.DONE
                total[part] += float(array[0])

        threads = [threading.Thread(target=run, args=(part,)) for part in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        return sum(total), member.group.next_sequence()

    assert results(2, body) == [(1200.0, 600)] * 2
