"""The numbers of algorithms on the wire: which way a call takes is part of what it is.

Ranks that take different ways wait for messages that nobody sends. A way is chosen from facts that all ranks have
alike, unless one was asked for another way (`algorithm=`, `deterministic=`, `commutative=`) or has other settings. So
`algorithm=` and `deterministic=` are stated too: ranks that give them differently are told at once, also where they
happen to take the same way with this size and on these hosts.
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


ROOTS_CHOICE: Final = 0x20
"""In place of a number: the root chooses, when it knows the sizes."""
_FORCED: Final = 0x40  # by algorithm=
_DETERMINISTIC: Final = 0x80
_NUMBER: Final = 0x3F


def way_of(algorithm: str, *, forced: bool = False, deterministic: bool = False) -> int:
    """Its number, and what was asked for; 0 for an algorithm that has none."""
    number = _NUMBERS.get(algorithm, 0)
    return number and number | (_FORCED if forced else 0) | (_DETERMINISTIC if deterministic else 0)


def name_of_way(way: int) -> str:
    """As `algorithm=` calls it, and whether it was asked for: `ring, algorithm='ring'`. `way 30` for one that this
    version does not know.
    """
    number = way & _NUMBER
    name = _NAMES.get(number) or f"way {number}"
    forced = f", algorithm={name!r}" if way & _FORCED else ""
    return name + forced + (", deterministic=True" if way & _DETERMINISTIC else "")


_NAMES: Final = {ROOTS_CHOICE: "the root's choice"} | {int(way): way.name.lower() for way in Way}
_NUMBERS: Final = {way.name.lower(): int(way) for way in Way}
