"""Ranks that end, stop, abort, close or disagree: every wait ends with a status."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from nexar_native import shm
from ranks import FAST, FLOAT32, LIMIT, MAX, SUM, Member, fork, members, results, world

BIG = 1 << 20  # elements: some rounds


def wait_forever(member: Member) -> None:
    member.tell()
    threading.Event().wait(LIMIT)


# -- ends of processes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_rank_ends_the_wait_of_the_others(size: int) -> None:
    def survivor(member: Member) -> tuple[int, int]:
        member.tell()
        pending = member.post(shm.BARRIER)
        return pending.wait(LIMIT), pending.rank

    with world(size, [survivor] * (size - 1) + [wait_forever]) as processes:
        for process in processes:
            process.hear()
        processes[-1].kill()
        for process in processes[:-1]:
            assert process.hear() == (shm.DIED, size - 1)


def test_what_a_dead_rank_has_published_counts() -> None:
    def first(member: Member) -> None:
        array = np.full(2, 5.0, np.float32)
        pending = member.post(shm.ALL_REDUCE, SUM, FLOAT32, array=array, out=array)
        assert pending.wait(0) == shm.WAITING
        wait_forever(member)

    def second(member: Member) -> tuple[float, int]:
        member.listen()
        array = np.full(2, 1.0, np.float32)
        member.run(shm.ALL_REDUCE, SUM, FLOAT32, array=array, out=array)
        later = member.post(shm.BARRIER)
        return float(array[0]), later.wait(LIMIT)

    with world(2, [first, second]) as processes:
        processes[0].hear()
        processes[0].kill()
        processes[1].say()
        assert processes[1].hear() == (6.0, shm.DIED)


@pytest.mark.parametrize("seed", range(4))
def test_survivors_of_a_kill_at_any_moment_have_right_results_or_a_status(seed: int) -> None:
    size, victim = 3, seed % 3

    def body(member: Member) -> tuple[int, int]:
        member.tell()
        for number in range(1_000_000):
            count = (2, 3000, BIG // 4)[number % 3]
            array = np.full(count, float(number % 7 + member.rank), np.float32)
            done = member.group.all_reduce(array, "sum")
            if isinstance(done, shm.Pending) and done.wait(LIMIT) != shm.DONE:
                return done.status, done.rank
            assert (array == 3 * (number % 7) + 3).all()
        raise AssertionError("nobody died")

    with world(size, body) as processes:
        for process in processes:
            process.hear()
        time.sleep(random.Random(seed).uniform(0.001, 0.1))
        processes[victim].kill()
        for index, process in enumerate(processes):
            if index != victim:
                assert process.hear() == (shm.DIED, victim)


def test_a_lost_rank_ends_a_wait_of_another_thread() -> None:
    one, _ = members(2)
    pending = one.post(shm.BARRIER)
    waiting = threading.Thread(target=pending.wait, args=(LIMIT,))
    waiting.start()
    one.group.fail(1)
    waiting.join(LIMIT)
    assert (pending.status, pending.rank) == (shm.DIED, 1)
    assert one.post(shm.BARRIER).wait(LIMIT) == shm.DIED


def test_a_stopped_rank_is_missing_until_it_continues() -> None:
    def body(member: Member) -> tuple[int, list[int], int]:
        member.tell()
        member.listen()
        pending = member.post(shm.BARRIER)
        early = pending.wait(0.1)
        missing = pending.missing()
        member.tell()
        return early, missing, pending.wait(LIMIT)

    def stopped(member: Member) -> None:
        member.tell()
        member.listen()
        member.run(shm.BARRIER)

    with world(3, [body, stopped, stopped]) as processes:
        for process in processes:
            process.hear()
        processes[1].signal(signal.SIGSTOP)
        for process in processes:
            process.say()
        processes[0].hear()
        processes[1].signal(signal.SIGCONT)
        early, missing, late = processes[0].hear()
        assert early == shm.WAITING
        assert 1 in missing
        assert late == shm.DONE


# -- signals and interrupts ----------------------------------------------------------------------------------------


def test_a_signal_handler_runs_during_a_wait() -> None:
    def body(member: Member) -> tuple[str, int]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        pending = member.post(shm.BARRIER)
        try:
            member.tell()
            pending.wait(LIMIT)
        except KeyboardInterrupt:
            pending.cancel()
            return "interrupted", pending.status
        return "not interrupted", pending.status

    def other(member: Member) -> tuple[int, int]:
        member.listen()
        pending = member.post(shm.BARRIER)
        return pending.wait(LIMIT), pending.rank

    with world(2, [body, other]) as processes:
        processes[0].hear()
        processes[0].signal(signal.SIGINT)
        assert processes[0].hear() == ("interrupted", shm.ABORTED)
        processes[1].say()
        assert processes[1].hear() == (shm.ABORTED, 0)


def test_an_interrupt_is_reported_once_by_each_operation() -> None:
    one, two = members(2)
    first, second = one.post(shm.BARRIER), one.post(shm.BARRIER)
    one.group.interrupt()
    assert first.wait(LIMIT) == shm.INTERRUPTED
    assert first.wait(0) == shm.WAITING
    assert second.wait(LIMIT) == shm.INTERRUPTED
    waiting: list[int] = []
    thread = threading.Thread(target=lambda: waiting.append(first.wait(LIMIT)))
    thread.start()
    one.group.interrupt()
    thread.join(LIMIT)
    assert waiting == [shm.INTERRUPTED]
    two.post(shm.BARRIER).wait(0)
    assert first.wait(LIMIT) == shm.DONE


def test_a_long_operation_is_interrupted_although_the_others_keep_pace() -> None:
    """So many rounds that it takes longer than a slice, unless a machine is very fast."""
    count = 60_000_000

    def body(member: Member) -> tuple[bool, int, int]:
        array = np.ones(count, np.uint8)
        pending = member.post(shm.ALL_REDUCE, SUM, 6, array=array, out=array)
        member.group.interrupt()
        status = pending.wait(LIMIT)
        early = pending.wait(0)
        late = pending.wait(LIMIT)
        return status == shm.INTERRUPTED, early, late

    for interrupted, early, late in results(2, body, chunk_bytes=32 << 10):
        assert interrupted
        assert early in (shm.WAITING, shm.DONE)
        assert late == shm.DONE


# -- aborts --------------------------------------------------------------------------------------------------------


def test_the_others_find_a_cancelled_operation_aborted() -> None:
    def canceller(member: Member) -> int:
        array = np.ones(BIG, np.float32)
        pending = member.post(shm.ALL_REDUCE, SUM, FLOAT32, array=array, out=array)
        pending.cancel()
        status = pending.status
        member.run(shm.BARRIER)
        return status

    def other(member: Member) -> tuple[int, int]:
        array = np.ones(BIG, np.float32)
        pending = member.post(shm.ALL_REDUCE, SUM, FLOAT32, array=array, out=array)
        status = pending.wait(LIMIT)
        member.run(shm.BARRIER)
        return status, pending.rank

    with world(3, [canceller, other, other]) as processes:
        assert processes[0].hear() == shm.ABORTED
        for index in (1, 2):
            status, rank = processes[index].hear()
            assert status == shm.ABORTED
            assert rank in (0, 3 - index)


def test_an_operation_is_cancelled_before_its_turn() -> None:
    one, two = members(2)
    first, second, third = (one.post(shm.BARRIER) for _ in range(3))
    second.cancel()
    assert (first.status, second.status) == (shm.WAITING, shm.ABORTED)
    theirs = [two.post(shm.BARRIER) for _ in range(3)]
    assert theirs[0].wait(0) == shm.WAITING
    assert first.wait(LIMIT) == shm.DONE
    assert theirs[0].wait(LIMIT) == shm.DONE
    assert (theirs[1].wait(LIMIT), theirs[1].rank) == (shm.ABORTED, 0)
    assert third.wait(0) == shm.WAITING
    assert theirs[2].wait(LIMIT) == shm.DONE
    assert third.wait(LIMIT) == shm.DONE


def test_a_dropped_operation_is_cancelled() -> None:
    one, two = members(2)
    one.post(shm.BARRIER)
    pending = two.post(shm.BARRIER)
    assert (pending.wait(LIMIT), pending.rank) == (shm.ABORTED, 0)
    begun = one.post(shm.BARRIER)
    assert begun.wait(0) == shm.WAITING
    del begun
    assert two.post(shm.BARRIER).wait(LIMIT) == shm.ABORTED


def test_nothing_accesses_the_arrays_of_a_cancelled_operation() -> None:
    one, two = members(2)
    mine, theirs = bytearray(4 * BIG), bytearray(b"\1") * (4 * BIG)
    pending = one.post(shm.ALL_REDUCE, SUM, FLOAT32, array=mine, out=mine)
    waiting = threading.Thread(target=pending.wait, args=(LIMIT,))
    waiting.start()
    other = two.post(shm.ALL_REDUCE, SUM, FLOAT32, array=theirs, out=theirs)
    other.wait(0)
    pending.cancel()
    copy = bytes(mine)
    assert other.wait(LIMIT) in (shm.ABORTED, shm.DONE)
    assert mine == copy
    waiting.join(LIMIT)
    mine.append(0)  # fails while a buffer is exported


@pytest.mark.parametrize("seed", range(3))
def test_ranks_stay_in_step_after_aborts_at_any_moment(seed: int) -> None:
    size = 3

    def body(member: Member) -> int:
        chance = random.Random(10 * seed + member.rank)
        aborted = 0
        for number in range(150):
            count = chance_of_all.choice((2, 3000, BIG // 8))
            array = np.full(count, 1.0, np.float32)
            pending = member.post(shm.ALL_REDUCE, SUM, FLOAT32, count, array=array, out=array)
            if chance.random() < 0.2:
                if chance.random() < 0.5:
                    pending.wait(chance.choice((0.0, 0.0005)))
                pending.cancel()
            status = pending.wait(LIMIT)
            assert status in (shm.DONE, shm.ABORTED), (number, status)
            assert status == shm.ABORTED or (array == size).all()
            aborted += status == shm.ABORTED
        array = np.full(2, 2.0, np.float32)
        member.run(shm.ALL_REDUCE, SUM, FLOAT32, array=array, out=array)
        assert array[0] == 2 * size
        return aborted

    chance_of_all = random.Random(seed)  # forked: the same sequence in every rank
    assert sum(results(size, body)) > 0


# -- closing -------------------------------------------------------------------------------------------------------


def test_a_closed_group_ends_its_own_waits_and_those_of_the_others() -> None:
    one, two = members(2)
    mine, later, theirs = one.post(shm.BARRIER), one.post(shm.BARRIER), two.post(shm.BARRIER)
    mine.wait(0)
    waiting = threading.Thread(target=mine.wait, args=(LIMIT,))
    waiting.start()
    one.group.close()
    waiting.join(LIMIT)
    assert (mine.status, later.status) == (shm.CLOSED, shm.CLOSED)
    assert (theirs.wait(LIMIT), theirs.rank) in [(shm.ABORTED, 0), (shm.DONE, -1)]
    assert one.post(shm.BARRIER).wait(LIMIT) == shm.CLOSED
    assert one.group.all_reduce(np.ones(2, np.float32), "sum") is False
    assert one.group.barrier() is False
    one.group.close()
    assert two.post(shm.BARRIER).wait(LIMIT) == shm.ABORTED


def test_a_dropped_group_is_closed() -> None:
    one, two = members(2)
    pending = two.post(shm.BARRIER)
    del one
    assert (pending.wait(LIMIT), pending.rank) == (shm.ABORTED, 0)


def test_a_rank_that_closes_has_finished_what_it_did() -> None:
    def body(member: Member) -> float:
        array = np.full(BIG, 1.0, np.float32)
        member.reduce(array)
        member.group.close()
        return float(array[-1])

    assert results(4, body) == [4.0] * 4


def test_the_interpreter_exits_while_threads_wait() -> None:
    code = """
import threading
from nexar_native import shm
region = shm.Region.create(2)
group = shm.Group(region, 0)
sequence, order = group.take(2)
fingerprint = (1, 0, 0, 0, 0, 0)
waiting = group.post(order, sequence, fingerprint, shm.BARRIER)
background = group.post(order + 1, sequence, fingerprint, shm.BARRIER, background=True)
threading.Thread(target=waiting.wait, args=(60,), daemon=True).start()
waiting.wait(0.01)
print("end")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "end\n", "")


def is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except RuntimeError:
        return True
    return False


def test_a_forked_child_is_refused() -> None:
    one, two = members(2)
    pending = one.post(shm.BARRIER)
    pending.wait(0)
    background = one.post(shm.BARRIER, background=True)
    calls: list[Callable[[], object]] = [
        lambda: one.group.all_reduce(np.ones(2, np.float32), "sum"),
        lambda: one.group.take(),  # noqa: PLW0108 - a bound method would keep the group
        lambda: one.group.close(),  # noqa: PLW0108
        lambda: one.post(shm.BARRIER),
        lambda: pending.wait(1),
        lambda: pending.cancel(),  # noqa: PLW0108
    ]
    child = fork()
    if child == 0:
        code = 1
        try:
            refused = [is_refused(call) for call in calls]
            del one, two, pending, background
            gc.collect()
            code = 0 if all(refused) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert two.post(shm.BARRIER).wait(LIMIT) == shm.DONE
    assert pending.wait(LIMIT) == shm.DONE


# -- mismatches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_finds_a_mismatch(size: int, fast: bool) -> None:
    def body(member: Member) -> tuple[int, list[int], int]:
        count, op = (3, MAX) if member.rank == 0 else (2, SUM)
        array = np.ones(count, np.float32)
        if fast:
            pending = member.group.all_reduce(array, "max" if op == MAX else "sum")
            assert isinstance(pending, shm.Pending)
        else:
            pending = member.post(shm.ALL_REDUCE, op, FLOAT32, count, array=array, out=array)
        status = pending.wait(LIMIT)
        assert pending.theirs is not None
        theirs = list(pending.theirs)
        later = member.post(shm.BARRIER).wait(LIMIT)
        return status, [pending.rank, theirs[2], theirs[4]], later

    found = results(size, body)
    assert found[0][0] == shm.MISMATCH
    assert found[0][1][1:] == [2, SUM]
    for status, facts, later in found[1:]:
        assert (status, facts, later) == (shm.MISMATCH, [0, 3, MAX], shm.FAILED)


def test_a_call_that_runs_elsewhere_is_found() -> None:
    one, two = members(2)
    two.group.publish_call(0, (99, 0, 0, 0, 0, 0))
    pending = one.post(shm.BARRIER)
    assert (pending.wait(LIMIT), pending.rank) == (shm.MISMATCH, 1)
    assert pending.theirs == (99, 0, 0, 0, 0, 0)


def test_a_mismatch_is_preferred_to_the_abort_that_it_caused() -> None:
    one, two = members(2)
    other = two.post(shm.BARRIER)
    mine = one.post(shm.ALL_REDUCE, SUM, FLOAT32, array=np.ones(2, np.float32), out=np.ones(2, np.float32))
    mine.cancel()
    assert (other.wait(LIMIT), other.rank) == (shm.MISMATCH, 0)


def test_published_calls_are_compared() -> None:
    one, two = members(2)
    assert one.group.differing(3) is None
    one.group.publish_call(3, (1, 11, 2, 0, 1, 5))
    assert one.group.differing(3) is None
    assert one.group.arrivals(3)[1] is None
    two.group.publish_call(3, (1, 11, 2, -7, 1, 5))
    assert one.group.differing(3) == (1, (1, 11, 2, -7, 1, 5))
    began = time.monotonic_ns()
    for arrival in one.group.arrivals(3):
        assert arrival is not None
        assert arrival <= began
    two.group.publish_call(3, (1, 11, 2, 0, 1, 5))  # only the first counts
    assert one.group.differing(3) is not None


def test_the_fast_types_are_refused_by_a_group_without_them() -> None:
    (one,) = members(1, fast=None)
    assert one.group.all_reduce(np.ones(2, np.float32), "sum") is False
    assert one.group.barrier() is False
    assert FAST[0] is np.ndarray
