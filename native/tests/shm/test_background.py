"""Operations that a native thread runs."""

from __future__ import annotations

import select

import numpy as np
from nexar_native import shm
from ranks import FLOAT32, LIMIT, SUM, Member, members, results


def has_news(member: Member, seconds: float = LIMIT) -> bool:
    return bool(select.select([member.group.fileno()], [], [], seconds)[0])


def wait_for_news(member: Member, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        assert has_news(member)
        found += member.group.finished()
    return found


def test_they_run_while_nobody_waits() -> None:
    def body(member: Member) -> list[float]:
        arrays = [np.full(count, 1.0, np.float32) for count in (2, 5000, 500_000, 2)]
        pending = [
            member.post(shm.ALL_REDUCE, SUM, FLOAT32, array=array, out=array, background=True) for array in arrays
        ]
        assert wait_for_news(member, len(arrays)) == [each.order for each in pending]
        assert [each.status for each in pending] == [shm.DONE] * len(arrays)
        return [float(array[-1]) for array in arrays]

    assert results(3, body) == [[3.0] * 4] * 3


def test_they_can_be_waited_for() -> None:
    def body(member: Member) -> float:
        array = np.full(100_000, 1.0, np.float32)
        pending = member.post(shm.ALL_REDUCE, SUM, FLOAT32, array=array, out=array, background=True)
        member.run(shm.BARRIER)
        assert pending.wait(LIMIT) == shm.DONE
        small = np.ones(2, np.float32)
        member.run(shm.ALL_REDUCE, SUM, FLOAT32, array=small, out=small)
        return float(array[0] + small[0])

    assert results(4, body) == [8.0] * 4


def test_python_code_goes_on_meanwhile() -> None:
    """The thread needs no GIL: it finishes while this thread holds it."""

    def body(member: Member) -> float:
        array = np.full(2_000_000, 1.0, np.float32)
        pending = member.post(shm.ALL_REDUCE, SUM, FLOAT32, array=array, out=array, background=True)
        while pending.status == shm.WAITING:
            sum(range(1000))
        return float(array[-1])

    assert results(2, body) == [2.0] * 2


def test_one_that_waits_for_others_is_cancelled() -> None:
    one, two = members(2)
    pending = one.post(shm.BARRIER, background=True)
    behind = one.post(shm.BARRIER, background=True)
    assert not has_news(one, 0.05)
    pending.cancel()
    assert pending.status == shm.ABORTED
    assert one.group.finished() == [pending.order]
    assert two.post(shm.BARRIER).wait(LIMIT) == shm.ABORTED
    assert two.post(shm.BARRIER).wait(LIMIT) == shm.DONE
    assert wait_for_news(one, 1) == [behind.order]
    assert behind.status == shm.DONE


def test_closing_ends_them() -> None:
    one, _ = members(2)
    pending = [one.post(shm.BARRIER, background=True) for _ in range(3)]
    one.group.close()
    assert [each.status for each in pending] == [shm.CLOSED] * 3
    assert one.group.finished() == [each.order for each in pending]
    late = one.post(shm.BARRIER, background=True)
    assert late.status == shm.CLOSED
    assert one.group.finished() == [late.order]


def test_a_lost_rank_ends_them() -> None:
    one, _ = members(2)
    pending = [one.post(shm.BARRIER, background=True) for _ in range(3)]
    one.group.fail(1)
    wait_for_news(one, 3)
    assert [(each.status, each.rank) for each in pending] == [(shm.DIED, 1)] * 3


def test_interrupts_do_not_end_them() -> None:
    one, two = members(2)
    pending = one.post(shm.BARRIER, background=True)
    for _ in range(20):
        one.group.interrupt()
    assert two.post(shm.BARRIER).wait(LIMIT) == shm.DONE
    wait_for_news(one, 1)
    assert pending.status == shm.DONE
