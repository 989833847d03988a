"""Rank i gets block i of every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from nexar.arrays.dtypes import code_of
from nexar.collectives.assembly import Assembly, Manner
from nexar.collectives.call import Call
from nexar.collectives.executor import Run, exchange
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import OperationCode
from nexar.collectives.work import Work

_CODE = OperationCode.ALL_TO_ALL


def all_to_all(assembly: Assembly, array: NDArray[Any], out: NDArray[Any], manner: Manner) -> Work:
    """Flat arrays of `size` equal blocks, which are not the same memory."""
    name = assembly.choose(_CODE, len(array), array.dtype, manner)
    call = assembly.begin(Fingerprint(_CODE, code_of(array.dtype), len(array), way=manner.way(name)))
    count = len(array) // assembly.group.size
    return assembly.work(call, assembly.execute(call, name, _CODE, array, more=(out,), count=count))


def all_to_all_v(assembly: Assembly, arrays: Sequence[NDArray[Any]]) -> Work:
    """One array for each rank, of one dtype and any shape; the result is a list."""
    call = assembly.begin(Fingerprint(OperationCode.ALL_TO_ALL_V, code_of(arrays[0].dtype)))
    return assembly.work(call, _run_unequal(assembly, call, arrays))


def _run_unequal(assembly: Assembly, call: Call, arrays: Sequence[NDArray[Any]]) -> Run:
    rank, size = assembly.group.rank, assembly.group.size
    others = [(rank + distance) % size for distance in range(1, size)]  # each begins with another one
    found = yield from exchange(assembly.ground(call), {each: arrays[each] for each in others}, others)
    return [arrays[rank].copy() if each == rank else found[each] for each in range(size)]
