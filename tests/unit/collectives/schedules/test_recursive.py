"""Twice as many blocks with each round.

Halves of the world, and halves of these.

With each round a rank knows of twice as many.
"""

import pytest

from nexar.collectives.schedule import Combine
from nexar.collectives.schedules.blocks import equal
from nexar.collectives.schedules.recursive import (
    bruck_all_gather,
    doubling_all_reduce,
    doubling_exclusive_scan,
    doubling_scan,
    halvings,
)


def test_a_run_past_the_last_rank_is_two_messages():
    first, second, third = bruck_all_gather(5, 6, equal(10, 6))
    assert [each.part.count for each in first.sends] == [10]
    assert [each.part[1:] for each in second.sends] == [(50, 60), (0, 10)]
    assert sum(each.part.count for each in third.sends) == 20


def test_the_last_round_passes_only_what_is_missing():
    *_, last = bruck_all_gather(0, 5, equal(10, 5))
    assert sum(each.part.count for each in last.receives) == 10


@pytest.mark.parametrize("size", range(1, 40))
def test_who_gives_to_a_rank_is_who_it_takes_from(size):
    given = {(rank, peer) for rank in range(size) for cut in halvings(rank, size) for peer in cut.given}
    taken = {(peer, rank) for rank in range(size) for cut in halvings(rank, size) for peer in cut.taken}
    assert given == taken


@pytest.mark.parametrize("size", range(2, 40))
def test_everybody_gives_once_to_the_other_half_at_every_cut(size):
    for rank in range(size):
        for cut in halvings(rank, size):
            assert len(cut.given) == 1
            assert cut.given[0] in cut.far
            assert rank in cut.near


@pytest.mark.parametrize("size", range(1, 40))
def test_the_cuts_end_at_the_rank_itself_after_log2_n(size):
    assert max(len(halvings(rank, size)) for rank in range(size)) == (size - 1).bit_length()
    assert all(found[-1].near == range(rank, rank + 1) for rank in range(size) if (found := halvings(rank, size)))


def test_partners_combine_lower_with_upper_on_both_sides():
    for rank in range(8):
        for step in doubling_all_reduce(rank, 8, 1):
            (receive,) = step.receives
            assert receive.how is (Combine.BEFORE if receive.peer < rank else Combine.AFTER)


def test_ranks_in_excess_give_first_and_get_last():
    gives, gets = doubling_all_reduce(1, 5, 1)
    assert (gives.sends[0].peer, gets.receives[0].peer) == (0, 0)
    assert len(list(doubling_all_reduce(0, 5, 1))) == 4
    assert len(list(doubling_all_reduce(4, 5, 1))) == 2


def test_the_first_ranks_of_a_scan_only_give():
    assert not any(step.receives for step in doubling_scan(0, 9, 1))
    assert not any(step.sends for step in doubling_scan(8, 9, 1))


def test_an_exclusive_scan_never_takes_the_rank_s_own_into_its_result():
    first = next(step for step in doubling_exclusive_scan(3, 4, 1) if step.receives)
    assert first.then[0].how is Combine.COPY
