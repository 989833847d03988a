"""The root gets what every rank brought, in the order of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.dtypes import code_of
from nexar.arrays.partition import split
from nexar.collectives.assembly import Assembly, Manner
from nexar.collectives.call import Call
from nexar.collectives.executor import Run, exchange
from nexar.collectives.fingerprint import Fingerprint, rooted
from nexar.collectives.operations import OperationCode
from nexar.collectives.work import Work

_CODE = OperationCode.GATHER


def gather(assembly: Assembly, array: NDArray[Any], out: NDArray[Any] | None, root: int, manner: Manner) -> Work:
    """Flat arrays; `out` is the root's, with room for all of them."""
    name = assembly.choose(_CODE, len(array), array.dtype, manner)
    call = assembly.begin(Fingerprint(_CODE, code_of(array.dtype), len(array), rooted(root), way=manner.way(name)))
    return assembly.work(call, _run(assembly, call, name, array, out))


def _run(assembly: Assembly, call: Call, name: str, array: NDArray[Any], out: NDArray[Any] | None) -> Run:
    size, root = assembly.group.size, call.fingerprint.root - 1
    memory = assembly.scratch.take(size * array.nbytes) if out is None else None
    work = out if memory is None else memory[: size * array.nbytes].view(array.dtype)
    assert work is not None
    mine = split(len(work), size)[assembly.group.rank]
    np.copyto(work[mine.start : mine.stop], array)
    yield from assembly.execute(call, name, _CODE, work, root=root, count=len(array))
    if memory is not None:
        assembly.scratch.give_back(memory)


def gather_v(assembly: Assembly, array: NDArray[Any], root: int, code: OperationCode = OperationCode.GATHER_V) -> Work:
    """Arrays of one dtype and any shape; at the root the result is a list, elsewhere None."""
    dtype = code_of(array.dtype) if code is OperationCode.GATHER_V else 0
    call = assembly.begin(Fingerprint(code, dtype, 0, rooted(root)))
    return assembly.work(call, _run_unequal(assembly, call, array, root))


def _run_unequal(assembly: Assembly, call: Call, array: NDArray[Any], root: int) -> Run:
    rank, size = assembly.group.rank, assembly.group.size
    if rank != root:
        yield from exchange(assembly.ground(call), {root: array}, ())
        return None
    others = [each for each in range(size) if each != root]
    found = yield from exchange(assembly.ground(call), {}, others)
    return [array.copy() if each == rank else found[each] for each in range(size)]
