"""The names of collectives, and their numbers on the wire."""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class OperationCode(IntEnum):
    """In the fingerprint of every frame. Numbers are the wire format: never reuse one."""

    BARRIER = 1
    ALL_REDUCE = 2
    BROADCAST = 3
    REDUCE = 4
    ALL_GATHER = 5
    REDUCE_SCATTER = 6
    ALL_TO_ALL = 7
    GATHER = 8
    SCATTER = 9
    SCAN = 10
    EXCLUSIVE_SCAN = 11
    ALL_GATHER_V = 12
    GATHER_V = 13
    SCATTER_V = 14
    REDUCE_SCATTER_V = 15
    ALL_TO_ALL_V = 16
    BROADCAST_OBJECT = 17
    GATHER_OBJECT = 18
    ALL_GATHER_OBJECT = 19
    SCATTER_OBJECT = 20
    SPLIT = 21
    ALL_REDUCE_COMPRESSED = 22
    CHECKPOINT = 23
    GROW = 24


def name_of(code: int) -> str:
    """As the user writes it; `collective 99` for one that this version does not know."""
    return _NAMES.get(code) or f"collective {code}"


_NAMES: Final = {int(code): code.name.lower() for code in OperationCode}
