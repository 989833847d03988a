"""Which ranks have a link for data, and how the others are reached: arithmetic on graphs. Pure.

Which ranks are neighbours: three kinds of graph, by the names that the setting `topology` takes. Pure.

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

How a message gets from one rank to another along neighbours. Pure; the same facts give the same route everywhere.

A route is a shortest one; of several that are as short, the one that takes the lowest rank where they part. A dead rank
is avoided by asking for the route without it. A route names every rank on the way, and none twice: so what travels
along it cannot go round in circles, whatever the ranks on the way believe.

A tree along neighbours that reaches every rank: for what one rank has to say to all. Pure.

Law: a rank's parent is its neighbour and one hop nearer to the root, so nothing is relayed and the deepest rank is as
deep as the farthest one is far.
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


SPARE_HOPS: Final = 4
NOBODY: Final[frozenset[Rank]] = frozenset()


@lru_cache(maxsize=4096)
def route(
    topology: str, size: int, source: Rank, destination: Rank, avoid: frozenset[Rank] = NOBODY
) -> tuple[Rank, ...] | None:
    """Every rank on the way, both ends included; None: those that are avoided leave none. The ends are not avoided."""
    if source == destination:
        return (source,)
    distance = _distances(topology, size, destination, avoid - {source, destination})
    if source not in distance:
        return None
    way = [source]
    while way[-1] != destination:
        here = way[-1]
        near = (each for each in neighbors(topology, size, here) if distance.get(each, size) == distance[here] - 1)
        way.append(min(near))
    return tuple(way)


def diameter(topology: str, size: int) -> int:
    """No route is longer than this while nobody is avoided."""
    if size == 1:
        return 0
    if topology == FULL_MESH:
        return 1
    if topology == HYPERCUBE:
        return dimensions(size)
    reach = max(1, degree_of(topology) // 2)
    return 1 if 2 * reach >= size - 1 else -(-(size // 2) // reach)


def hop_limit(topology: str, size: int) -> int:
    """What has travelled further than this has lost its way."""
    return diameter(topology, size) + SPARE_HOPS


def detour_limit(topology: str, size: int) -> int:
    """The same for a route that avoids somebody: a ring that is cut is a line, and there are no longer ones."""
    return max(hop_limit(topology, size), size - 1)


@lru_cache(maxsize=1024)
def _distances(topology: str, size: int, origin: Rank, avoid: frozenset[Rank]) -> dict[Rank, int]:
    """Of every rank that can be reached, to the origin."""
    found = {origin: 0}
    for here, near in outward(topology, size, origin, avoid):
        found[near] = found[here] + 1
    return found


def outward(topology: str, size: int, origin: Rank, avoid: frozenset[Rank] = NOBODY) -> Iterator[tuple[Rank, Rank]]:
    """Each rank but the origin once, nearer ones first, with the neighbour that is one hop nearer to the origin."""
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
    """By rank; None for the root."""
    found: list[Rank | None] = [None] * size
    for parent, child in outward(topology, size, root):
        found[child] = parent
    return tuple(found)


@lru_cache(maxsize=256)
def children(topology: str, size: int, root: Rank) -> tuple[tuple[Rank, ...], ...]:
    """By rank; each ascending."""
    found: list[list[Rank]] = [[] for _ in range(size)]
    for parent, child in outward(topology, size, root):
        found[parent].append(child)
    return tuple(tuple(sorted(each)) for each in found)
