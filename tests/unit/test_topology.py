"""The laws of neighbourhood, in every world of 1 to 40 ranks.

The laws of routes, in every world of 1 to 40 ranks, and with each rank on the way dead.

The laws of spanning trees.
"""

from itertools import pairwise

import pytest

from nexar.topology import (
    are_neighbors,
    children,
    degree_of,
    detour_limit,
    diameter,
    dimensions,
    hop_limit,
    is_complete,
    neighbors,
    outward,
    parents,
    route,
)

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
        with pytest.raises(ValueError, match="no topology is called"):
            neighbors(name, 4, 0)


ROUTED_KINDS = ("full_mesh", "k_regular:2", "k_regular:4", "hypercube")


def _reachable(topology: str, size: int, origin: int, dead: int) -> set[int]:
    found, waiting = {origin}, [origin]
    while waiting:
        fresh = {near for near in neighbors(topology, size, waiting.pop()) if near != dead} - found
        found |= fresh
        waiting.extend(fresh)
    return found


@pytest.mark.parametrize("topology", ROUTED_KINDS)
def test_every_route_goes_along_neighbours_without_a_loop_and_within_the_diameter(topology: str) -> None:
    for size in SIZES:
        longest = 0
        for source in range(size):
            for destination in range(size):
                way = route(topology, size, source, destination)
                assert way is not None
                assert (way[0], way[-1]) == (source, destination)
                assert len(set(way)) == len(way)
                assert all(near in neighbors(topology, size, here) for here, near in pairwise(way))
                longest = max(longest, len(way) - 1)
        assert longest <= diameter(topology, size) == hop_limit(topology, size) - 4


@pytest.mark.parametrize("topology", ["k_regular:2", "k_regular:4"])
def test_on_a_ring_the_diameter_is_met(topology: str) -> None:
    for size in SIZES:
        ways = [route(topology, size, 0, other) for other in range(size)]
        assert max(len(way or ()) - 1 for way in ways) == diameter(topology, size)


@pytest.mark.parametrize("topology", ROUTED_KINDS)
def test_one_dead_rank_is_avoided_wherever_it_stands(topology: str) -> None:
    for size in (*range(3, 18), 23, 32, 33, 40):
        for destination in range(1, size):
            way = route(topology, size, 0, destination) or ()
            for dead in way[1:-1]:
                around = route(topology, size, 0, destination, frozenset({dead}))
                assert around is not None, (size, destination, dead)
                assert dead not in around
                assert len(set(around)) == len(around) <= detour_limit(topology, size) + 1


@pytest.mark.parametrize("topology", ROUTED_KINDS)
def test_no_single_death_parts_the_survivors(topology: str) -> None:
    for size in range(3, 41):
        for dead in range(size):
            origin = (dead + 1) % size
            assert len(_reachable(topology, size, origin, dead)) == size - 1, (size, dead)


def test_the_rest_of_a_route_is_the_route_from_there() -> None:
    for topology in ROUTED_KINDS:
        for size in (2, 5, 9, 16, 21):
            for destination in range(1, size):
                way = route(topology, size, 0, destination) or ()
                for place, here in enumerate(way):
                    assert way[place:] == route(topology, size, here, destination)


def test_where_the_dead_part_two_ranks_there_is_no_route() -> None:
    assert route("k_regular:2", 6, 0, 3, frozenset({1, 5})) is None
    assert route("k_regular:2", 6, 0, 1, frozenset({0, 1})) == (0, 1)  # the ends are not avoided


def test_a_rank_is_no_hop_away_from_itself() -> None:
    assert route("hypercube", 8, 3, 3) == (3,)
    assert diameter("k_regular:2", 1) == 0


def test_outward_finds_everybody_once_and_nearer_ones_first() -> None:
    for topology in ROUTED_KINDS:
        found = [child for _, child in outward(topology, 21, 4)]
        assert sorted([4, *found]) == list(range(21))
        depths = [len(route(topology, 21, 4, child) or ()) for child in found]
        assert depths == sorted(depths)


@pytest.mark.parametrize("topology", ["full_mesh", "k_regular:2", "k_regular:4", "hypercube"])
def test_a_tree_reaches_everybody_along_neighbours_by_a_shortest_way(topology: str) -> None:
    for size in range(1, 41):
        for root in {0, size // 2, size - 1}:
            above = parents(topology, size, root)
            assert above[root] is None
            for rank in range(size):
                depth, here = 0, rank
                while (parent := above[here]) is not None:
                    assert parent in neighbors(topology, size, here)
                    depth, here = depth + 1, parent
                assert here == root
                assert depth == len(route(topology, size, root, rank) or ()) - 1


def test_children_are_the_other_side_of_parents() -> None:
    for topology in ("k_regular:4", "hypercube"):
        above, below = parents(topology, 21, 5), children(topology, 21, 5)
        pairs = {(parent, child) for parent, each in enumerate(below) for child in each}
        assert pairs == {(parent, child) for child, parent in enumerate(above) if parent is not None}
