"""The numbers of algorithms on the wire: which way a call takes is part of what it is.

Ranks that take different ways wait for messages that nobody sends. A way is chosen from facts that all ranks have
alike, unless one was asked for another way (`algorithm=`, `deterministic=`, `commutative=`) or has other settings.
What counts is the way that came out of it: two ranks that chose the same for different reasons understand each other.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class Way(IntEnum):
    """In the fingerprint of every frame, a byte. Numbers are the wire format: never reuse one. 0: not stated, as for
    calls whose ranks know too little of one another to choose.
    """

    SHARED_MEMORY = 1
    TWO_LEVEL = 2
    BRUCK = 3
    CHAIN = 4
    DIRECT = 5
    DISSEMINATION = 6
    FLAT = 7
    GATHER_FOLD = 8
    HALVING = 9
    HALVING_DOUBLING = 10
    PAIRWISE = 11
    PIPELINED_RING = 12
    RECURSIVE_DOUBLING = 13
    REDUCE_SCATTER_GATHER = 14
    RING = 15
    SCATTER_ALL_GATHER = 16
    TREE = 17
    TWO_PHASE = 18
    SPANNING_TREE = 19


def way_of(algorithm: str) -> int:
    """Its number; 0 for one that has none."""
    return _NUMBERS.get(algorithm, 0)


def name_of_way(way: int) -> str:
    """As `algorithm=` calls it; `way 99` for one that this version does not know."""
    return _NAMES.get(way) or f"way {way}"


_NAMES: Final = {int(way): way.name.lower() for way in Way}
_NUMBERS: Final = {name: way for way, name in _NAMES.items()}
