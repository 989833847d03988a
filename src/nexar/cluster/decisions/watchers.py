"""Who watches whom: everybody in a small world, three others in a large one, neighbours in a sparse one. Pure.

In a large world a rank is watched by the next two and by the one opposite on the ring: neighbours often share a host
and may die with it, the one opposite hardly does. Three are enough to notice, because what they notice is checked by
everybody before anybody is removed; and what a node spends on watching does not grow with the world. Where not all
ranks are neighbours, watching needs no link that is not there anyway; and who relays over somebody hears of its end
first.

Law: `a` watches `b` exactly if `b` is watched by `a`; every rank watches as many as it is watched by.
"""

from __future__ import annotations

from typing import Final

from nexar.topology.neighbors import FULL_MESH, neighbors
from nexar.types import Rank

SMALL_WORLD: Final = 8
"""Up to this size everybody watches everybody."""


def watchers(size: int, rank: Rank, topology: str = FULL_MESH) -> tuple[Rank, ...]:
    """The ranks that watch this one, ascending."""
    return _others(size, rank, +1, topology)


def watched(size: int, rank: Rank, topology: str = FULL_MESH) -> tuple[Rank, ...]:
    """The ranks that this one watches, ascending."""
    return _others(size, rank, -1, topology)


def _others(size: int, rank: Rank, direction: int, topology: str) -> tuple[Rank, ...]:
    if topology != FULL_MESH or size <= SMALL_WORLD:
        return neighbors(topology, size, rank)
    steps = (1, 2, size // 2)
    return tuple(sorted((rank + direction * step) % size for step in steps))
