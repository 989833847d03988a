"""Branches that stand for neighbouring ranks."""

import pytest

from nexar.collectives.schedules.tree import branches

WORLDS = [(size, root) for size in (1, 2, 3, 5, 8, 13) for root in range(size)]


@pytest.mark.parametrize(("size", "root"), WORLDS)
def test_everybody_but_the_root_has_one_parent_who_knows_it(size, root):
    upward = [(rank, each.peer) for rank in range(size) for each in branches(rank, size, root) if each.upward]
    downward = [(each.peer, rank) for rank in range(size) for each in branches(rank, size, root) if not each.upward]
    assert sorted(upward) == sorted(downward)
    assert [rank for rank, _ in upward] == [rank for rank in range(size) if rank != root]


@pytest.mark.parametrize(("size", "root"), WORLDS)
def test_two_runs_that_meet_are_neighbours_and_each_has_its_head(size, root):
    for rank in range(size):
        for each in branches(rank, size, root):
            assert each.near.stop == each.far.start or each.far.stop == each.near.start
            assert rank in each.near
            assert each.peer in each.far


@pytest.mark.parametrize(("size", "root"), WORLDS)
def test_there_are_log2_n_levels(size, root):
    assert max(len(branches(rank, size, root)) for rank in range(size)) <= (size - 1).bit_length()
