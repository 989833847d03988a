"""Fingerprints of collective calls, and the wire numbers of operations and algorithms.

Ranks with different algorithms would wait forever, so the algorithm is included, and whether `algorithm=` or
`deterministic=` was given.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from enum import IntEnum
from typing import Final, NamedTuple

from nexar.arrays.compression.codes import describe_code
from nexar.arrays.dtypes import dtype_of
from nexar.arrays.operators import ReduceCode


class OperationCode(IntEnum):
    """Wire numbers: never reuse one."""

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


def operation_name(code: int) -> str:
    """Returns `collective 99` for an unknown code."""
    return _OPERATION_NAMES.get(code) or f"collective {code}"


_OPERATION_NAMES: Final = {int(code): code.name.lower() for code in OperationCode}


class AlgorithmCode(IntEnum):
    """Wire numbers, one byte: never reuse one. 0: not stated."""

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
"""The root selects the algorithm, once it knows the sizes."""
_FORCED: Final = 0x40  # by `algorithm=`
_DETERMINISTIC: Final = 0x80
_NUMBER: Final = 0x3F


def code_of_algorithm(algorithm: str, *, forced: bool = False, deterministic: bool = False) -> int:
    """Returns 0 for an algorithm without a number."""
    number = _NUMBERS.get(algorithm, 0)
    return number and number | (_FORCED if forced else 0) | (_DETERMINISTIC if deterministic else 0)


def algorithm_name(way: int) -> str:
    """Returns for example `ring, algorithm='ring'`; `way 30` if unknown."""
    number = way & _NUMBER
    name = _ALGORITHM_NAMES.get(number) or f"way {number}"
    forced = f", algorithm={name!r}" if way & _FORCED else ""
    return name + forced + (", deterministic=True" if way & _DETERMINISTIC else "")


_ALGORITHM_NAMES: Final = {ROOTS_CHOICE: "the root's choice"} | {int(way): way.name.lower() for way in AlgorithmCode}
_NUMBERS: Final = {way.name.lower(): int(way) for way in AlgorithmCode}


class Fingerprint(NamedTuple):
    """What all ranks must agree on in a call. Packed, not hashed, so that a difference can be described."""

    operation: int
    dtype: int = 0
    count: int = 0  # type: ignore[assignment] # tuple.count() is not needed
    root: int = 0
    reduce_op: int = 0
    way: int = 0
    """Algorithm code; 0: not stated."""

    def describe(self, *, way: bool = False) -> str:
        """`all_reduce of float32[8], sum`; with its algorithm: `…, by ring`."""
        text = operation_name(self.operation)
        if self.dtype:
            text += f" of {dtype_of(self.dtype) or f'dtype {self.dtype}'}[{self.count}]"
        if self.reduce_op:
            text += f", {_reduce_name(self.reduce_op)}"
        if self.operation == OperationCode.REDUCE_SCATTER_V:
            text += f", counts of digest {self.root:x}"
        elif self.operation == OperationCode.ALL_REDUCE_COMPRESSED:
            text += f", {describe_code(self.root)}"
        elif self.root:
            text += f", root {self.root - 1}"
        return f"{text}, by {algorithm_name(self.way)}" if way and self.way else text


def rooted(root: int) -> int:
    """Returns the `root` field; 0 means no root."""
    return root + 1


def counted(counts: Iterable[int]) -> int:
    """Returns the `root` field of reduce_scatter_v: a digest of the counts."""
    return zlib.crc32(" ".join(map(str, counts)).encode()) >> 1


def _reduce_name(code: int) -> str:
    try:
        return ReduceCode(code).name.lower()
    except ValueError:
        return f"op {code}"
