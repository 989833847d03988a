"""The laws of routes, in every world of 1 to 40 ranks, and with each rank on the way dead."""

from itertools import pairwise

import pytest

from nexar.topology.neighbors import neighbors
from nexar.topology.routes import detour_limit, diameter, hop_limit, outward, route

KINDS = ("full_mesh", "k_regular:2", "k_regular:4", "hypercube")
SIZES = range(1, 41)


def _reachable(topology: str, size: int, origin: int, dead: int) -> set[int]:
    found, waiting = {origin}, [origin]
    while waiting:
        fresh = {near for near in neighbors(topology, size, waiting.pop()) if near != dead} - found
        found |= fresh
        waiting.extend(fresh)
    return found


@pytest.mark.parametrize("topology", KINDS)
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


@pytest.mark.parametrize("topology", KINDS)
def test_one_dead_rank_is_avoided_wherever_it_stands(topology: str) -> None:
    for size in (*range(3, 18), 23, 32, 33, 40):
        for destination in range(1, size):
            way = route(topology, size, 0, destination) or ()
            for dead in way[1:-1]:
                around = route(topology, size, 0, destination, frozenset({dead}))
                assert around is not None, (size, destination, dead)
                assert dead not in around
                assert len(set(around)) == len(around) <= detour_limit(topology, size) + 1


@pytest.mark.parametrize("topology", KINDS)
def test_no_single_death_parts_the_survivors(topology: str) -> None:
    for size in range(3, 41):
        for dead in range(size):
            origin = (dead + 1) % size
            assert len(_reachable(topology, size, origin, dead)) == size - 1, (size, dead)


def test_the_rest_of_a_route_is_the_route_from_there() -> None:
    for topology in KINDS:
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
    for topology in KINDS:
        found = [child for _, child in outward(topology, 21, 4)]
        assert sorted([4, *found]) == list(range(21))
        depths = [len(route(topology, 21, 4, child) or ()) for child in found]
        assert depths == sorted(depths)
