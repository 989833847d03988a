"""With each round a rank knows of twice as many."""

from nexar.collectives.schedule import How
from nexar.collectives.schedules.recursive_doubling import all_reduce, exclusive_scan, scan


def test_partners_combine_lower_with_upper_on_both_sides():
    for rank in range(8):
        for step in all_reduce(rank, 8, 1):
            (receive,) = step.receives
            assert receive.how is (How.LEFT if receive.peer < rank else How.RIGHT)


def test_ranks_in_excess_give_first_and_get_last():
    gives, gets = all_reduce(1, 5, 1)
    assert (gives.sends[0].peer, gets.receives[0].peer) == (0, 0)
    assert len(list(all_reduce(0, 5, 1))) == 4
    assert len(list(all_reduce(4, 5, 1))) == 2


def test_the_first_ranks_of_a_scan_only_give():
    assert not any(step.receives for step in scan(0, 9, 1))
    assert not any(step.sends for step in scan(8, 9, 1))


def test_an_exclusive_scan_never_takes_the_rank_s_own_into_its_result():
    first = next(step for step in exclusive_scan(3, 4, 1) if step.receives)
    assert first.then[0].how is How.COPY
