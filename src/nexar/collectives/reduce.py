"""The root gets the reduction of what all ranks brought; the others' arrays stay as they are."""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy.typing import NDArray

from nexar.arrays.dtypes import code_of
from nexar.arrays.operations import Reduction
from nexar.arrays.partition import Span
from nexar.collectives.arena import Arena
from nexar.collectives.assembly import Assembly, Manner
from nexar.collectives.call import Call
from nexar.collectives.choose import SHARED_MEMORY
from nexar.collectives.executor import Run
from nexar.collectives.fingerprint import Fingerprint, rooted
from nexar.collectives.operations import OperationCode
from nexar.collectives.reducing import Job, reduce_by
from nexar.collectives.work import Work

_CODE = OperationCode.REDUCE


class Reducing(NamedTuple):
    """What is reduced, flat."""

    array: NDArray[Any]
    out: NDArray[Any] | None
    """The root's; it may be `array` itself."""
    reduction: Reduction
    root: int


def reduce(assembly: Assembly, job: Reducing, manner: Manner) -> Work:
    """Without a result: it is in the root's `out`."""
    array, _, reduction, root = job
    name = assembly.choose(_CODE, len(array), array.dtype, manner, reduction)
    fingerprint = Fingerprint(_CODE, code_of(array.dtype), len(array), rooted(root), reduction.code, manner.way(name))
    call = assembly.begin(fingerprint, assembly.in_memory(name, Arena.reduce, *job))
    return assembly.work(call, _run(assembly, call, name, job))


def _run(assembly: Assembly, call: Call, name: str, job: Reducing) -> Run:
    if name == SHARED_MEMORY:
        yield (call.take_turn(),)
        return
    array, out, reduction, root = job
    into = out if assembly.group.rank == root else None
    yield from reduce_by(
        assembly, call, name, _CODE, Job(array, into, reduction, assembly.group.size, Span(0, len(array))), root=root
    )
