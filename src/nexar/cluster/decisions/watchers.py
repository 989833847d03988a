"""Who watches whom: everybody everybody in a small world, three others in a large one. Pure.

In a large world a rank is watched by the next two and by the one opposite on the ring: neighbours often share a host
and may die with it, the one opposite hardly does. Three are enough to notice, because what they notice is checked by
everybody before anybody is removed; and what a node spends on watching does not grow with the world.

Law: `a` watches `b` exactly if `b` is watched by `a`; every rank watches as many as it is watched by.
"""

from __future__ import annotations

from typing import Final

from nexar.types import Rank

SMALL_WORLD: Final = 8
"""Up to this size everybody watches everybody."""


def watchers(size: int, rank: Rank) -> tuple[Rank, ...]:
    """The ranks that watch this one, ascending."""
    return _others(size, rank, +1)


def watched(size: int, rank: Rank) -> tuple[Rank, ...]:
    """The ranks that this one watches, ascending."""
    return _others(size, rank, -1)


def _others(size: int, rank: Rank, direction: int) -> tuple[Rank, ...]:
    if size <= SMALL_WORLD:
        return tuple(other for other in range(size) if other != rank)
    steps = (1, 2, size // 2)
    return tuple(sorted((rank + direction * step) % size for step in steps))
