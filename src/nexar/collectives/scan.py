"""Rank i gets the reduction of what ranks 0 to i brought; exclusive: without its own."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.dtypes import code_of
from nexar.arrays.operations import Reduction, identity
from nexar.arrays.partition import Span
from nexar.collectives.assembly import Assembly, Manner
from nexar.collectives.call import Call
from nexar.collectives.executor import Run
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import OperationCode
from nexar.collectives.reducing import Job, reduce_by
from nexar.collectives.work import Work


def scan(assembly: Assembly, out: NDArray[Any], reduction: Reduction, manner: Manner, *, exclusive: bool) -> Work:
    """In place, on a flat array. Exclusive: rank 0 gets the identity."""
    code = OperationCode.EXCLUSIVE_SCAN if exclusive else OperationCode.SCAN
    name = assembly.choose(code, len(out), out.dtype, manner, reduction)
    call = assembly.begin(Fingerprint(code, code_of(out.dtype), len(out), 0, reduction.code, manner.way(name)))
    return assembly.work(call, _run(assembly, call, name, out, reduction))


def _run(assembly: Assembly, call: Call, name: str, out: NDArray[Any], reduction: Reduction) -> Run:
    code = OperationCode(call.fingerprint.operation)
    operands = assembly.group.rank + (code is OperationCode.SCAN)
    job = Job(out, out, reduction, operands, Span(0, len(out)))
    yield from reduce_by(assembly, call, name, code, job)
    if not operands:
        np.copyto(out, identity(reduction, out.dtype))
