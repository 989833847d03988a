"""Who watches whom."""

from collections import Counter

import pytest

from nexar.cluster.decisions.watchers import SMALL_WORLD, watched, watchers
from nexar.topology.neighbors import neighbors

WORLDS = [*range(1, 40), 1000, 4096]


@pytest.mark.parametrize("size", WORLDS)
def test_to_watch_and_to_be_watched_are_two_sides_of_one_thing(size: int) -> None:
    pairs = {(other, rank) for rank in range(size) for other in watchers(size, rank)}
    assert pairs == {(rank, other) for rank in range(size) for other in watched(size, rank)}


@pytest.mark.parametrize("size", WORLDS)
def test_everybody_is_watched_by_as_many_and_nobody_by_itself(size: int) -> None:
    many = min(size - 1, 3) if size > SMALL_WORLD else size - 1
    for rank in range(size):
        found = watchers(size, rank)
        assert len(set(found) - {rank}) == len(found) == many
        assert all(0 <= other < size for other in found)
    assert set(Counter(other for rank in range(size) for other in watchers(size, rank)).values()) <= {many}


def test_in_a_large_world_one_watcher_is_far_away() -> None:
    assert watchers(100, 99) == (0, 1, 49)
    assert watched(100, 0) == (50, 98, 99)


@pytest.mark.parametrize("topology", ["k_regular:2", "k_regular:4", "hypercube"])
def test_in_a_sparse_world_neighbours_watch_one_another(topology: str) -> None:
    for size in (4, 8, 9, 33):
        for rank in range(size):
            assert watchers(size, rank, topology) == watched(size, rank, topology) == neighbors(topology, size, rank)
