"""What one call of a collective is, so far as all ranks must agree on it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import NamedTuple

from nexar.arrays.compression.mark import words_of
from nexar.arrays.dtypes import dtype_of
from nexar.arrays.operations import ReduceCode
from nexar.collectives.operations import OperationCode, name_of
from nexar.collectives.ways import name_of_way


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
        text = name_of(self.operation)
        if self.dtype:
            text += f" of {dtype_of(self.dtype) or f'dtype {self.dtype}'}[{self.count}]"
        if self.reduce_op:
            text += f", {_reduce_name(self.reduce_op)}"
        if self.operation == OperationCode.REDUCE_SCATTER_V:
            text += f", counts of digest {self.root:x}"
        elif self.operation == OperationCode.ALL_REDUCE_COMPRESSED:
            text += f", {words_of(self.root)}"
        elif self.root:
            text += f", root {self.root - 1}"
        return f"{text}, by {name_of_way(self.way)}" if way and self.way else text


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
