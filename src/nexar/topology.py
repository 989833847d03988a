"""Topologies: neighbours, routes and spanning trees. Pure.

    full_mesh     all ranks are neighbours
    k_regular:K   ranks on a ring, connected to the nearest K/2 on each side
    hypercube     ranks are neighbours if their numbers differ in one bit

A hypercube need not be complete, but its last ranks would have few neighbours. So the rank opposite a missing corner on
the highest axis, which misses it too, becomes a neighbour of the lowest other rank that misses it. From three ranks on,
every rank has at least two neighbours.

Invariant: the relation is symmetric, the graph is connected, and in a hypercube no rank has more than ⌈log2 n⌉
neighbours.

A route is a shortest path; among equals it takes the lowest next rank, so it is the same everywhere. It lists every
rank once, so messages cannot loop. A parent in a tree is one hop nearer to the root, so nothing is relayed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from nexar.types import Rank

FULL_MESH: Final = "full_mesh"
HYPERCUBE: Final = "hypercube"
_K_REGULAR: Final = "k_regular:"


@lru_cache(maxsize=4096)
def neighbors(topology: str, size: int, rank: Rank) -> tuple[Rank, ...]:
    """Ascending. Raises ValueError for an unknown topology."""
    if topology == FULL_MESH:
        return tuple(other for other in range(size) if other != rank)
    if topology == HYPERCUBE:
        return _on_cube(size, rank)
    return _on_ring(size, rank, degree_of(topology) // 2)


def degree_of(topology: str) -> int:
    """K of `k_regular:K`. Raises ValueError."""
    kind, _, degree = topology.partition(":")
    if f"{kind}:" != _K_REGULAR or not degree.isdecimal():
        raise ValueError(f"no topology is called {topology!r}")
    return int(degree)


def are_neighbors(topology: str, size: int, one: Rank, other: Rank) -> bool:
    """Whether they have a direct link."""
    return topology == FULL_MESH or other in neighbors(topology, size, one)


def is_complete(topology: str, size: int) -> bool:
    """Whether all ranks are neighbours."""
    return topology == FULL_MESH or all(len(neighbors(topology, size, rank)) == size - 1 for rank in range(size))


def dimensions(size: int) -> int:
    """⌈log2 size⌉."""
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
    elif rank | highest >= size:  # this rank replaces a missing corner
        near |= {_misses(size, rank | highest, axes)} - {size}
    return tuple(sorted(near))


def _misses(size: int, corner: int, axes: list[int]) -> Rank:
    """The lowest rank in the upper half of the cube that misses this corner, or `size`."""
    highest = axes[-1]
    return min((corner ^ axis for axis in axes[:-1] if highest <= corner ^ axis < size), default=size)


SPARE_HOPS: Final = 4
NO_RANKS: Final[frozenset[Rank]] = frozenset()


@lru_cache(maxsize=4096)
def route(
    topology: str, size: int, source: Rank, destination: Rank, avoid: frozenset[Rank] = NO_RANKS
) -> tuple[Rank, ...] | None:
    """All ranks on the path; None if `avoid` leaves no path. The ends are not avoided."""
    if source == destination:
        return (source,)
    distance = _distances(topology, size, destination, avoid - {source, destination})
    if source not in distance:
        return None
    path = [source]
    while path[-1] != destination:
        here = path[-1]
        near = (each for each in neighbors(topology, size, here) if distance.get(each, size) == distance[here] - 1)
        path.append(min(near))
    return tuple(path)


def diameter(topology: str, size: int) -> int:
    """The length of the longest route that avoids no rank."""
    if size == 1:
        return 0
    if topology == FULL_MESH:
        return 1
    if topology == HYPERCUBE:
        return dimensions(size)
    reach = max(1, degree_of(topology) // 2)
    return 1 if 2 * reach >= size - 1 else -(-(size // 2) // reach)


def hop_limit(topology: str, size: int) -> int:
    """Hops after which a message is dropped."""
    return diameter(topology, size) + SPARE_HOPS


def detour_limit(topology: str, size: int) -> int:
    """For routes that avoid ranks: a ring without one rank is a line."""
    return max(hop_limit(topology, size), size - 1)


@lru_cache(maxsize=1024)
def _distances(topology: str, size: int, origin: Rank, avoid: frozenset[Rank]) -> dict[Rank, int]:
    found = {origin: 0}
    for here, near in outward(topology, size, origin, avoid):
        found[near] = found[here] + 1
    return found


def outward(topology: str, size: int, origin: Rank, avoid: frozenset[Rank] = NO_RANKS) -> Iterator[tuple[Rank, Rank]]:
    """(nearer neighbour, rank) for each rank except the origin, nearer ones first."""
    seen, waiting = {origin, *avoid}, deque([origin])
    while waiting:
        here = waiting.popleft()
        for near in neighbors(topology, size, here):
            if near not in seen:
                seen.add(near)
                waiting.append(near)
                yield here, near


@lru_cache(maxsize=256)
def parents(topology: str, size: int, root: Rank) -> tuple[Rank | None, ...]:
    """The parent of each rank; None for the root."""
    found: list[Rank | None] = [None] * size
    for parent, child in outward(topology, size, root):
        found[child] = parent
    return tuple(found)


@lru_cache(maxsize=256)
def children(topology: str, size: int, root: Rank) -> tuple[tuple[Rank, ...], ...]:
    """The children of each rank, ascending."""
    found: list[list[Rank]] = [[] for _ in range(size)]
    for parent, child in outward(topology, size, root):
        found[parent].append(child)
    return tuple(tuple(sorted(each)) for each in found)
