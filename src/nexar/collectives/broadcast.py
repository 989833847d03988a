"""Every rank gets what the root has."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from nexar.arrays.dtypes import code_of
from nexar.collectives.arena import Arena
from nexar.collectives.assembly import Assembly, Manner
from nexar.collectives.call import Call
from nexar.collectives.choose import SHARED_MEMORY
from nexar.collectives.executor import Run
from nexar.collectives.fingerprint import Fingerprint, rooted
from nexar.collectives.operations import OperationCode
from nexar.collectives.work import Work

_CODE = OperationCode.BROADCAST


def broadcast(assembly: Assembly, array: NDArray[Any], root: int, manner: Manner) -> Work:
    """In place, on a flat array."""
    name = assembly.choose(_CODE, len(array), array.dtype, manner)
    fingerprint = Fingerprint(_CODE, code_of(array.dtype), len(array), rooted(root), way=manner.way(name))
    call = assembly.begin(fingerprint, assembly.in_memory(name, Arena.broadcast, array, root))
    return assembly.work(call, _run(assembly, call, name, array, root))


def _run(assembly: Assembly, call: Call, name: str, array: NDArray[Any], root: int) -> Run:
    if name == SHARED_MEMORY:
        yield (call.take_turn(),)
    else:
        yield from assembly.execute(call, name, _CODE, array, root=root)
