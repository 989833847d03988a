"""A tree along neighbours that reaches every rank: for what one rank has to say to all. Pure.

Law: a rank's parent is its neighbour and one hop nearer to the root, so nothing is relayed and the deepest rank is as
deep as the farthest one is far.
"""

from __future__ import annotations

from functools import lru_cache

from nexar.topology.routes import outward
from nexar.types import Rank


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
