"""The operations that reduce, and their numbers on the wire."""

from __future__ import annotations

from enum import IntEnum


class ReduceCode(IntEnum):
    """In the fingerprint of every frame. Numbers are the wire format: never reuse one."""

    SUM = 1
    PROD = 2
    MIN = 3
    MAX = 4
    AVG = 5
    BAND = 6
    BOR = 7
    BXOR = 8
    LAND = 9
    LOR = 10
    LXOR = 11
    USER = 12
