"""Every rank gets what every rank brought, in the order of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.dtypes import code_of
from nexar.arrays.partition import Span, split
from nexar.collectives.arena import Arena
from nexar.collectives.assembly import Assembly, Manner
from nexar.collectives.call import Call
from nexar.collectives.choose import SHARED_MEMORY
from nexar.collectives.executor import Run, exchange
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import OperationCode
from nexar.collectives.work import Work

_CODE = OperationCode.ALL_GATHER


def all_gather(
    assembly: Assembly, array: NDArray[Any], out: NDArray[Any], manner: Manner, code: OperationCode = _CODE
) -> Work:
    """Flat arrays; `out` has room for all of them."""
    name = assembly.choose(_CODE, len(array), array.dtype, manner)
    fingerprint = Fingerprint(code, code_of(array.dtype), len(array), way=manner.way(name))
    spans = split(len(out), assembly.group.size)
    call = assembly.begin(fingerprint, assembly.in_memory(name, Arena.all_gather, array, out, spans))
    return assembly.work(call, run(assembly, call, name, array, out, mine=spans[assembly.group.rank]))


def run(assembly: Assembly, call: Call, name: str, array: NDArray[Any], out: NDArray[Any], *, mine: Span) -> Run:
    """A call that has its number and its turn. `array` may be that span of `out`."""
    if name == SHARED_MEMORY:
        yield (call.take_turn(),)
        return
    np.copyto(out[mine.start : mine.stop], array)
    yield from assembly.execute(call, name, _CODE, out, count=len(array))


def all_gather_v(assembly: Assembly, array: NDArray[Any], code: OperationCode = OperationCode.ALL_GATHER_V) -> Work:
    """Arrays of one dtype and any shape; the result is a list."""
    dtype = code_of(array.dtype) if code is OperationCode.ALL_GATHER_V else 0
    call = assembly.begin(Fingerprint(code, dtype))
    return assembly.work(call, _run_unequal(assembly, call, array))


def _run_unequal(assembly: Assembly, call: Call, array: NDArray[Any]) -> Run:
    rank, size = assembly.group.rank, assembly.group.size
    others = [(rank + distance) % size for distance in range(1, size)]  # each begins with another one
    found = yield from exchange(assembly.ground(call), dict.fromkeys(others, array), others)
    return [array.copy() if each == rank else found[each] for each in range(size)]
