"""Rank i gets part i of the reduction of what all ranks brought."""

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
from nexar.collectives.fingerprint import Fingerprint, counted
from nexar.collectives.operations import OperationCode
from nexar.collectives.reducing import Job, reduce_by
from nexar.collectives.work import Work

_CODE = OperationCode.REDUCE_SCATTER


class Scattering(NamedTuple):
    """What is reduced, flat."""

    array: NDArray[Any]
    out: NDArray[Any]
    """As long as this rank's span, and no part of `array`, which stays as it is."""
    spans: tuple[Span, ...]
    reduction: Reduction


def reduce_scatter(assembly: Assembly, job: Scattering, manner: Manner, code: OperationCode = _CODE) -> Work:
    """Without a result: it is in `out`."""
    array, reduction = job.array, job.reduction
    name = assembly.choose(_CODE, len(array), array.dtype, manner, reduction)
    root = 0 if code is _CODE else counted(span.count for span in job.spans)
    fingerprint = Fingerprint(code, code_of(array.dtype), len(array), root, reduction.code, manner.way(name))
    call = assembly.begin(fingerprint, assembly.in_memory(name, Arena.reduce_scatter, *job))
    return assembly.work(call, _run(assembly, call, name, job))


def _run(assembly: Assembly, call: Call, name: str, job: Scattering) -> Run:
    if name == SHARED_MEMORY:
        yield (call.take_turn(),)
        return
    array, out, spans, reduction = job
    whole = Job(array, out, reduction, assembly.group.size, spans[assembly.group.rank])
    yield from reduce_by(assembly, call, name, _CODE, whole, spans=spans)
