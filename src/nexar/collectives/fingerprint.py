"""Fingerprints of collective calls.

They include the algorithm, and whether `algorithm=` or `deterministic=` was given: ranks with different algorithms
would wait forever.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Final, NamedTuple

from nexar.arrays.compression.codes import describe_code
from nexar.arrays.dtypes import dtype_of
from nexar.arrays.operators import ReduceCode
from nexar.collectives.operations import AlgorithmCode, OperationCode


def operation_name(code: int) -> str:
    """`collective 99` for an unknown code."""
    return _OPERATION_NAMES.get(code) or f"collective {code}"


_OPERATION_NAMES: Final = {int(code): code.name.lower() for code in OperationCode}


ROOTS_CHOICE: Final = 0x20
"""The root selects the algorithm, once it knows the sizes."""
_FORCED: Final = 0x40  # by `algorithm=`
_DETERMINISTIC: Final = 0x80
_NUMBER: Final = 0x3F


def code_of_algorithm(algorithm: str, *, forced: bool = False, deterministic: bool = False) -> int:
    """0 for an algorithm without a number."""
    number = _NUMBERS.get(algorithm, 0)
    return number and number | (_FORCED if forced else 0) | (_DETERMINISTIC if deterministic else 0)


def algorithm_name(code: int) -> str:
    """For example `ring, algorithm='ring'`; `algorithm 30` if unknown."""
    number = code & _NUMBER
    name = _ALGORITHM_NAMES.get(number) or f"algorithm {number}"
    forced = f", algorithm={name!r}" if code & _FORCED else ""
    return name + forced + (", deterministic=True" if code & _DETERMINISTIC else "")


_ALGORITHM_NAMES: Final = {ROOTS_CHOICE: "the root's choice"} | {int(code): code.name.lower() for code in AlgorithmCode}
_NUMBERS: Final = {code.name.lower(): int(code) for code in AlgorithmCode}


class Fingerprint(NamedTuple):
    """The facts of a call that must be equal on all ranks. Not hashed, so that a difference can be described."""

    operation: int
    dtype: int = 0
    count: int = 0  # type: ignore[assignment] # tuple.count() is not needed
    root: int = 0
    reduce_op: int = 0
    algorithm_code: int = 0
    """0: not stated. The field `way` of a frame."""

    def describe(self, *, with_algorithm: bool = False) -> str:
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
        return f"{text}, by {algorithm_name(self.algorithm_code)}" if with_algorithm and self.algorithm_code else text


def rooted(root: int) -> int:
    """The `root` field; 0: no root."""
    return root + 1


def counted(counts: Iterable[int]) -> int:
    """The `root` field of reduce_scatter_v: a digest of the counts."""
    return zlib.crc32(" ".join(map(str, counts)).encode()) >> 1


def _reduce_name(code: int) -> str:
    try:
        return ReduceCode(code).name.lower()
    except ValueError:
        return f"op {code}"
