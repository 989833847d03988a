"""Which ranks are neighbours: three kinds of graph, by the names that the setting `topology` takes. Pure.

    full_mesh     everybody is everybody's neighbour
    k_regular:K   ranks on a ring; the nearest K/2 on each side. In a small world that is everybody
    hypercube     ranks as corners of a cube, neighbours where their numbers differ in one bit

A cube has 2, 4, 8, … corners, a world any number of ranks. Those ranks that exist form a connected graph in which the
shortest way between two is as long as their numbers differ in bits: clear bits first, then set bits, and every rank on
the way is smaller than one of the two ends. But the last ranks may have few neighbours (in a world of 5 rank 4 has one,
and would be alone without it). So a missing corner is stood in for by the rank opposite on the highest axis, which
has an edge to spare, because that corner is its own missing neighbour: the lowest rank that misses the corner becomes
its neighbour. From three ranks on nobody has fewer than two.

Law: the relation is symmetric, the graph is connected, and in a hypercube of n ranks nobody has more than ⌈log2 n⌉
neighbours.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from nexar.types import Rank

FULL_MESH: Final = "full_mesh"
HYPERCUBE: Final = "hypercube"
_K_REGULAR: Final = "k_regular:"


@lru_cache(maxsize=4096)
def neighbors(topology: str, size: int, rank: Rank) -> tuple[Rank, ...]:
    """The neighbours of a rank, ascending. ValueError for a topology that there is not."""
    if topology == FULL_MESH:
        return tuple(other for other in range(size) if other != rank)
    if topology == HYPERCUBE:
        return _on_cube(size, rank)
    return _on_ring(size, rank, degree_of(topology) // 2)


def degree_of(topology: str) -> int:
    """K of `k_regular:K`. ValueError for any other."""
    kind, _, degree = topology.partition(":")
    if f"{kind}:" != _K_REGULAR or not degree.isdecimal():
        raise ValueError(f"there is no topology {topology!r}")
    return int(degree)


def are_neighbors(topology: str, size: int, one: Rank, other: Rank) -> bool:
    """Whether the two have a link for data."""
    return topology == FULL_MESH or other in neighbors(topology, size, one)


def is_complete(topology: str, size: int) -> bool:
    """Whether everybody is everybody's neighbour, so that nothing is ever relayed."""
    return topology == FULL_MESH or all(len(neighbors(topology, size, rank)) == size - 1 for rank in range(size))


def dimensions(size: int) -> int:
    """Of the smallest cube with that many corners: ⌈log2 size⌉."""
    return (size - 1).bit_length()


def _on_ring(size: int, rank: Rank, reach: int) -> tuple[Rank, ...]:
    if 2 * reach >= size - 1:
        return neighbors(FULL_MESH, size, rank)
    return tuple(sorted((rank + step) % size for step in range(-reach, reach + 1) if step))


def _on_cube(size: int, rank: Rank) -> tuple[Rank, ...]:
    axes = [1 << axis for axis in range(dimensions(size))]
    if not axes:
        return ()
    highest = axes[-1]
    near = {rank ^ axis for axis in axes if rank ^ axis < size}
    if rank & highest:
        missing = (rank ^ axis for axis in axes if rank ^ axis >= size)
        near |= {corner ^ highest for corner in missing if _misses(size, corner, axes) == rank}
    elif rank | highest >= size:  # this rank stands in for a corner that is missing
        near |= {_misses(size, rank | highest, axes)} - {size}
    return tuple(sorted(near))


def _misses(size: int, corner: int, axes: list[int]) -> Rank:
    """The lowest rank on the upper half of the cube that would be this missing corner's neighbour; `size`: nobody."""
    highest = axes[-1]
    return min((corner ^ axis for axis in axes[:-1] if highest <= corner ^ axis < size), default=size)
