"""The laws of neighbourhood, in every world of 1 to 40 ranks."""

import pytest

from nexar.topology.neighbors import are_neighbors, degree_of, dimensions, is_complete, neighbors

KINDS = ("full_mesh", "k_regular:2", "k_regular:4", "k_regular:6", "hypercube")
SIZES = range(1, 41)


@pytest.mark.parametrize("topology", KINDS)
def test_neighbourhood_is_mutual_and_nobody_is_his_own_neighbour(topology: str) -> None:
    for size in SIZES:
        pairs = {(rank, near) for rank in range(size) for near in neighbors(topology, size, rank)}
        assert pairs == {(near, rank) for rank, near in pairs}
        assert all(rank != near and 0 <= near < size for rank, near in pairs)
        assert all(are_neighbors(topology, size, rank, near) for rank, near in pairs)


@pytest.mark.parametrize("topology", KINDS)
def test_neighbours_come_in_ascending_order_and_once(topology: str) -> None:
    for size in SIZES:
        for rank in range(size):
            found = neighbors(topology, size, rank)
            assert list(found) == sorted(set(found))


@pytest.mark.parametrize("degree", [2, 4, 6])
def test_a_ring_has_as_many_neighbours_as_it_says_or_everybody(degree: int) -> None:
    for size in SIZES:
        for rank in range(size):
            assert len(neighbors(f"k_regular:{degree}", size, rank)) == min(degree, size - 1)


def test_a_cube_never_has_more_neighbours_than_axes_and_never_one_alone() -> None:
    for size in SIZES:
        degrees = [len(neighbors("hypercube", size, rank)) for rank in range(size)]
        assert max(degrees) <= dimensions(size)
        assert size < 3 or min(degrees) >= 2


def test_ranks_of_a_cube_that_differ_in_one_bit_are_neighbours() -> None:
    for size in SIZES:
        for rank in range(size):
            assert {rank ^ 1 << axis for axis in range(6) if rank ^ 1 << axis < size} <= set(
                neighbors("hypercube", size, rank)
            )


def test_what_is_complete_is_known() -> None:
    assert is_complete("full_mesh", 1000)
    assert is_complete("k_regular:2", 3)
    assert is_complete("k_regular:4", 5)
    assert is_complete("hypercube", 3)
    assert not is_complete("k_regular:2", 4)
    assert not is_complete("hypercube", 4)


def test_a_topology_that_there_is_not_is_refused() -> None:
    assert degree_of("k_regular:12") == 12
    for name in ("k_regular", "k_regular:x", "torus", "ring:2"):
        with pytest.raises(ValueError, match="no topology"):
            neighbors(name, 4, 0)
