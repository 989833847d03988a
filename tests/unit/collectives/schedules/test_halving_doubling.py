"""Halves of the world, and halves of these."""

import pytest

from nexar.collectives.schedules.halving_doubling import cuts


@pytest.mark.parametrize("size", range(1, 40))
def test_who_gives_to_a_rank_is_who_it_takes_from(size):
    given = {(rank, peer) for rank in range(size) for cut in cuts(rank, size) for peer in cut.given}
    taken = {(peer, rank) for rank in range(size) for cut in cuts(rank, size) for peer in cut.taken}
    assert given == taken


@pytest.mark.parametrize("size", range(2, 40))
def test_everybody_gives_once_to_the_other_half_at_every_cut(size):
    for rank in range(size):
        for cut in cuts(rank, size):
            assert len(cut.given) == 1
            assert cut.given[0] in cut.far
            assert rank in cut.near


@pytest.mark.parametrize("size", range(1, 40))
def test_the_cuts_end_at_the_rank_itself_after_log2_n(size):
    assert max(len(cuts(rank, size)) for rank in range(size)) == (size - 1).bit_length()
    assert all(found[-1].near == range(rank, rank + 1) for rank in range(size) if (found := cuts(rank, size)))
