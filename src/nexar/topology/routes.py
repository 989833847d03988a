"""How a message gets from one rank to another along neighbours. Pure; the same facts give the same route everywhere.

A route is a shortest one; of several that are as short, the one that takes the lowest rank where they part. A dead rank
is avoided by asking for the route without it. A route names every rank on the way, and none twice: so what travels
along it cannot go round in circles, whatever the ranks on the way believe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from nexar.topology.neighbors import FULL_MESH, HYPERCUBE, degree_of, dimensions, neighbors
from nexar.types import Rank

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
