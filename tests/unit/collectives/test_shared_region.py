"""What happens around operations: order, giving up, disagreeing, losing, closing."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

from nexar.arrays.operators import reduction_of
from nexar.collectives.fingerprint import Fingerprint, rooted
from nexar.collectives.operations import OperationCode
from nexar.collectives.shared_region_layout import ABORTED
from nexar.errors import Cancelled, OperationTimeout, PeerLost, UsageError
from tests.unit.collectives.region_ranks import Different, GivenUp, Rank, all_well, ranks, together

SUM = reduction_of("sum")
SLOT = 4096
LARGE = 5_000  # several rounds of such slots
REDUCE = Fingerprint(OperationCode.ALL_REDUCE, 5, 4, 0, 1)


def ones(count: int = 4) -> np.ndarray:
    return np.ones(count, np.int64)


def add(rank: Rank, count: int = 4, *, spin: bool = True) -> np.ndarray:
    array = ones(count)
    rank.wait(rank.region.all_reduce(rank.region.reserve(), array, SUM, spin=spin))
    return array


# -- order -----------------------------------------------------------------------------------------------------------


def test_a_barrier_ends_when_all_have_come() -> None:
    with ranks(3) as members:
        waiting = [rank.region.barrier(rank.region.reserve()) for rank in members[:2]]
        assert not any(operation.done for operation in waiting)
        last = members[2].region.barrier(members[2].region.reserve(), spin=True)
        for rank, operation in zip(members, [*waiting, last], strict=True):
            rank.wait(operation)


def test_operations_run_in_the_order_of_their_order_numbers_whatever_the_order_of_posting() -> None:
    with ranks(2) as (left, right):
        first, second = left.region.reserve(2), 2
        a, b = np.array([1]), np.array([10])
        posted = [left.region.all_reduce(second, b, SUM, spin=True), left.region.all_reduce(first, a, SUM, spin=True)]
        c, d = np.array([2]), np.array([20])
        theirs = [right.region.all_reduce(right.region.reserve(), array, SUM) for array in (c, d)]
        left.wait(*posted)
        right.wait(*theirs)
        assert (a[0], b[0], c[0], d[0]) == (3, 30, 3, 30)


def test_many_in_flight_are_all_right() -> None:
    with ranks(3, slot_bytes=SLOT) as members:

        def many(rank: Rank) -> None:
            for _ in range(5):
                arrays = [np.full(count, rank.number) for count in range(0, 2000, 40)]
                posted = [rank.region.all_reduce(rank.region.reserve(), array, SUM) for array in arrays]
                rank.wait(*posted)
                assert all((array == 3).all() for array in arrays)

        all_well(together(members, many))


def test_thousands_of_small_ones_in_a_row_are_all_right() -> None:
    with ranks(2) as members:

        def many(rank: Rank) -> None:
            for number in range(2_000):
                array = np.array([number + rank.number])
                operation = rank.region.all_reduce(rank.region.reserve(), array, SUM, spin=True)
                if not operation.done:
                    rank.wait(operation)
                assert array[0] == 2 * number + 1

        all_well(together(members, many))


def test_whoever_sleeps_is_woken() -> None:
    with ranks(2, spin=0.0) as members:
        for _ in range(20):
            assert all((array == 2).all() for array in all_well(together(members, add)))


def test_threads_of_one_rank_may_take_turns() -> None:
    with ranks(2) as (left, right):
        order = threading.Lock()

        def call(rank: Rank) -> None:
            for _ in range(100):
                with order:
                    order_number = rank.region.reserve()
                array = ones()
                rank.wait(rank.region.all_reduce(order_number, array, SUM, spin=True))
                assert (array == 2).all()

        all_well(together([left, left, right, right], call))


# -- giving up -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [4, LARGE])
def test_a_late_one_is_given_up_and_names_whom_it_waited_for(count: int) -> None:
    with ranks(3, slot_bytes=SLOT) as members:
        first, second, third = members
        early = second.region.all_reduce(second.region.reserve(), ones(count), SUM)
        with pytest.raises(OperationTimeout, match="all_reduce") as caught:
            first.wait(first.region.all_reduce(first.region.reserve(), ones(count), SUM, spin=True), timeout=0.02)
        assert [peer.rank for peer in caught.value.waiting_for] == [2]  # type: ignore[union-attr]
        with pytest.raises(GivenUp) as given_up:
            second.wait(early)
        assert given_up.value.args == (0, "all_reduce")
        with pytest.raises(GivenUp):
            add(third, count)
        assert all((array == 3).all() for array in all_well(together(members, lambda rank: add(rank, count))))


def test_several_given_up_in_a_row_are_all_missed_by_who_comes_late() -> None:
    with ranks(2, slot_bytes=SLOT) as (left, right):
        for count in (4, LARGE, 9):
            operation = left.region.all_reduce(left.region.reserve(), ones(count), SUM)
            operation.cancel()
            with pytest.raises(Cancelled):
                left.wait(operation)
        for count in (4, LARGE, 9):
            with pytest.raises(GivenUp):
                add(right, count)
        all_well(together([left, right], add))
        gone = left.region.barrier(left.region.reserve())
        gone.cancel()
        with pytest.raises(GivenUp):
            right.wait(right.region.barrier(right.region.reserve()))
        all_well(together([left, right], add))


def test_one_that_is_cancelled_before_its_turn_keeps_its_order_number() -> None:
    with ranks(2, slot_bytes=SLOT) as (left, right):
        array, second = ones(), ones(LARGE)
        head = left.region.all_reduce(left.region.reserve(), array, SUM)
        queued = left.region.all_reduce(left.region.reserve(), second, SUM)
        queued.cancel()
        queued.cancel()
        assert isinstance(queued.error, Cancelled)
        theirs = [right.region.all_reduce(right.region.reserve(), ones(count), SUM) for count in (4, LARGE)]
        left.wait(head)
        right.wait(theirs[0])
        with pytest.raises(GivenUp):
            right.wait(theirs[1])
        assert (array == 2).all()
        assert (second == 1).all()
        all_well(together([left, right], add))


def test_an_order_number_that_is_not_used_can_be_given_back() -> None:
    with ranks(2) as (left, right):
        left.region.skip(left.region.reserve(), 1)
        with pytest.raises(GivenUp):
            add(right)
        all_well(together([left, right], add))


@pytest.mark.parametrize("count", [4, LARGE])
def test_an_error_of_the_users_function_is_raised_where_it_happened_and_the_others_learn_of_it(count: int) -> None:
    def fail(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        if threading.current_thread().name == "culprit":
            raise ZeroDivisionError
        return left + right

    function = reduction_of(fail)
    with ranks(2, slot_bytes=SLOT, spin=5.0) as members:

        def call(rank: Rank) -> None:
            threading.current_thread().name = "culprit" if rank.number else "innocent"
            rank.wait(rank.region.all_reduce(rank.region.reserve(), ones(count), function, spin=True))

        results = together(members, call)
        assert isinstance(results[1], ZeroDivisionError) or count == LARGE  # another thread may have led
        assert any(isinstance(result, ZeroDivisionError | GivenUp) for result in results)
        all_well(together(members, add))


# -- disagreeing -----------------------------------------------------------------------------------------------------


def test_who_gives_up_because_of_a_difference_does_not_hide_it_from_the_others() -> None:
    """The first rank was notified of the difference otherwise, so its mark is there before anybody says why."""
    elsewhere = Fingerprint(OperationCode.BROADCAST, 1, 3)
    with ranks(3) as (first, odd, last):
        for rank, fingerprint in ((first, REDUCE), (odd, elsewhere), (last, REDUCE)):
            rank.region.announce(7, fingerprint)
        first.region.all_reduce(first.region.reserve(), ones(), SUM, announcement=(7, REDUCE)).cancel()
        with pytest.raises(Different) as raised:
            last.wait(last.region.all_reduce(last.region.reserve(), ones(), SUM, announcement=(7, REDUCE)))
        assert raised.value.args[:2] == (odd.number, elsewhere)


@pytest.mark.parametrize("spin", [False, True])
@pytest.mark.parametrize("counts", [(4, 4, 4), (4, LARGE, 4)], ids=["another operation", "another count"])
def test_a_difference_is_seen_by_every_rank_and_nothing_runs_any_more(spin: bool, counts: tuple[int, ...]) -> None:
    other = REDUCE._replace(operation=OperationCode.BROADCAST, root=rooted(1), count=counts[1])
    with ranks(3, slot_bytes=SLOT) as members:

        def call(rank: Rank) -> None:
            fingerprint = other if rank.number == 1 else REDUCE
            rank.region.announce(1, fingerprint)
            order_number, array = rank.region.reserve(), ones(counts[rank.number])
            rank.wait(rank.region.all_reduce(order_number, array, SUM, announcement=(1, fingerprint), spin=spin))

        results = together(members, call)
        assert all(isinstance(result, Different) for result in results)
        for rank, result in zip(members, results, strict=True):
            index, theirs, mine = result.args
            assert {theirs, mine[1]} == {REDUCE, other}
            assert theirs == (other if index == 1 else REDUCE)
            with pytest.raises(Different):
                add(rank)


def test_who_waits_for_one_that_is_elsewhere_finds_out() -> None:
    with ranks(2) as (left, right):
        elsewhere = Fingerprint(OperationCode.ALL_TO_ALL, 5, 4)
        right.region.announce(7, elsewhere)
        left.region.announce(7, REDUCE)
        assert left.region.disagreement(7) == (1, elsewhere)
        assert left.region.disagreement(6) is None
        with pytest.raises(Different):
            left.wait(left.region.all_reduce(left.region.reserve(), ones(), SUM, announcement=(7, REDUCE), spin=True))


def test_arrivals_are_known_for_a_while() -> None:
    with ranks(2) as (left, right):
        before = time.monotonic_ns()
        left.region.announce(3, REDUCE)
        arrival, missing = right.region.arrivals(3)
        assert arrival is not None
        assert before <= arrival <= time.monotonic_ns()
        assert missing is None
        left.region.announce(3 + 8, REDUCE)
        assert right.region.arrivals(3) == [None, None]


# -- losing and closing ----------------------------------------------------------------------------------------------


def test_losing_a_rank_ends_everything_at_once() -> None:
    with ranks(2) as (left, _):
        posted = [left.region.barrier(left.region.reserve()) for _ in range(3)]
        threading.Timer(0.01, left.region.fail, [PeerLost(rank=1, cause="it is gone")]).start()
        begin = time.monotonic()
        for operation in posted:
            with pytest.raises(PeerLost):
                left.wait(operation)
        assert time.monotonic() - begin < 5
        with pytest.raises(PeerLost):
            add(left)


def test_what_a_lost_rank_had_published_still_counts() -> None:
    with ranks(2) as (left, right):
        theirs = right.region.all_reduce(right.region.reserve(), ones(), SUM)
        left.region.fail(PeerLost(rank=1, cause="it is gone"))
        array = ones()
        left.wait(left.region.all_reduce(left.region.reserve(), array, SUM, spin=True))
        assert (array == 2).all()
        right.wait(theirs)


def test_closing_ends_what_is_pending_and_may_be_done_again() -> None:
    with ranks(2) as (left, _):
        operation = left.region.barrier(left.region.reserve())
        left.region.close()
        with pytest.raises(UsageError, match="closed"):
            left.wait(operation)
        with pytest.raises(UsageError, match="closed"):
            add(left)
        with pytest.raises(UsageError, match="closed"):
            left.region.announce(1, REDUCE)
        assert left.region.arrivals(1) == [None, None]
        assert left.region.disagreement(1) is None
        left.region.close()


def test_a_forked_child_lets_go() -> None:
    with ranks(2) as (left, right):
        child = os.fork()
        if not child:
            code = 1
            try:
                with pytest.raises(UsageError):
                    left.region.announce(0, REDUCE)
                with pytest.raises(UsageError):
                    add(left)
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        all_well(together([left, right], add))


@pytest.mark.parametrize("count", [4, LARGE])
@pytest.mark.parametrize("spin", [True, False])
def test_after_a_give_up_nobody_writes_into_its_slots_until_the_others_have_left(count: int, spin: bool) -> None:
    with ranks(2, slot_bytes=SLOT) as (left, right):
        queue = left.region._queue
        given_up = left.region.all_reduce(left.region.reserve(), ones(count), SUM, spin=spin)
        given_up.cancel()
        mine = [row[0].copy() for row in queue.slots.of(np.dtype(np.uint8))]
        published = queue._round_sync.round
        array = np.full(count, 7)
        operation = left.region.all_reduce(left.region.reserve(), array, SUM, spin=spin)
        queue.poll()
        assert not operation.done
        assert queue._round_sync.round == published, "it has not begun"
        after = [row[0] for row in queue.slots.of(np.dtype(np.uint8))]
        assert all((one == other).all() for one, other in zip(mine, after, strict=True))
        del after, mine
        with pytest.raises(GivenUp):
            add(right, count)
        both = np.ones(count, np.int64)
        theirs = right.region.all_reduce(right.region.reserve(), both, SUM)
        all_well(together([left, right], lambda rank: rank.wait(operation if rank is left else theirs)))
        assert (array == 8).all()
        assert (both == 8).all()


def test_nobody_sleeps_while_its_operation_can_begin_or_go_on() -> None:
    with ranks(2) as (left, right):
        queue = left.region._queue
        assert queue.prepare_sleep()
        with queue._region_lock:  # so that it is posted and not begun
            operation = left.region.barrier(left.region.reserve())
        assert not queue.prepare_sleep(), "it has not begun"
        queue.poll()
        assert queue.prepare_sleep(), "the other one has not come"
        theirs = right.region.barrier(right.region.reserve())
        right.region._queue.poll()
        assert not queue.prepare_sleep(), "the other one has come"
        left.wait(operation)
        right.wait(theirs)


def test_an_operation_that_is_announced_as_given_up_touches_no_slot_and_the_others_are_notified() -> None:
    with ranks(2) as (left, right):
        array = np.full(4, 7)
        before = [row[0].copy() for row in left.region._queue.slots.of(np.dtype(np.uint8))]
        operation = left.region.all_reduce(left.region.reserve(), array, SUM, announcement=ABORTED)
        assert operation.done
        after = [row[0] for row in left.region._queue.slots.of(np.dtype(np.uint8))]
        assert all((one == other).all() for one, other in zip(before, after, strict=True))
        del before, after
        with pytest.raises(GivenUp):
            add(right)
        all_well(together([left, right], add))
