"""The names of collectives, and their numbers on the wire.

The numbers of algorithms on the wire: which way a call takes is part of what it is.

Ranks that take different ways wait for messages that nobody sends. A way is chosen from facts that all ranks have
alike, unless one was asked for another way (`algorithm=`, `deterministic=`, `commutative=`) or has other settings. So
`algorithm=` and `deterministic=` are stated too: ranks that give them differently are told at once, also where they
happen to take the same way with this size and on these hosts.

What one call of a collective is, so far as all ranks must agree on it.
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


def operation_name(code: int) -> str:
    """As the user writes it; `collective 99` for one that this version does not know."""
    return _OPERATION_NAMES.get(code) or f"collective {code}"


_OPERATION_NAMES: Final = {int(code): code.name.lower() for code in OperationCode}


class AlgorithmCode(IntEnum):
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


def code_of_algorithm(algorithm: str, *, forced: bool = False, deterministic: bool = False) -> int:
    """Its number, and what was asked for; 0 for an algorithm that has none."""
    number = _NUMBERS.get(algorithm, 0)
    return number and number | (_FORCED if forced else 0) | (_DETERMINISTIC if deterministic else 0)


def algorithm_name(way: int) -> str:
    """As `algorithm=` calls it, and whether it was asked for: `ring, algorithm='ring'`. `way 30` for one that this
    version does not know.
    """
    number = way & _NUMBER
    name = _ALGORITHM_NAMES.get(number) or f"way {number}"
    forced = f", algorithm={name!r}" if way & _FORCED else ""
    return name + forced + (", deterministic=True" if way & _DETERMINISTIC else "")


_ALGORITHM_NAMES: Final = {ROOTS_CHOICE: "the root's choice"} | {int(way): way.name.lower() for way in AlgorithmCode}
_NUMBERS: Final = {way.name.lower(): int(way) for way in AlgorithmCode}


class Fingerprint(NamedTuple):
    """Travels in every frame of the call: packed, not hashed, so that a difference can be told in words."""

    operation: int
    dtype: int = 0
    count: int = 0  # type: ignore[assignment]  # a fingerprint has no use for a tuple's count()
    root: int = 0
    reduce_op: int = 0
    way: int = 0
    """See ways; 0: not stated."""

    def describe(self, *, way: bool = False) -> str:
        """`all_reduce of float32[8], sum`, as errors say it; with its way: `…, by ring`."""
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
    """The `root` field of an operation that has one: 0 says that there is none."""
    return root + 1


def counted(counts: Iterable[int]) -> int:
    """The `root` field of reduce_scatter_v, which has none: a digest of the counts that all ranks must give alike."""
    return zlib.crc32(" ".join(map(str, counts)).encode()) >> 1


def _reduce_name(code: int) -> str:
    try:
        return ReduceCode(code).name.lower()
    except ValueError:
        return f"op {code}"
