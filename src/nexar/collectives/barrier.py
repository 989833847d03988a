"""Nobody leaves before everybody has come."""

from __future__ import annotations

import numpy as np

from nexar.collectives.arena import Arena
from nexar.collectives.assembly import PLAIN, Assembly, Manner
from nexar.collectives.call import Call
from nexar.collectives.choose import SHARED_MEMORY
from nexar.collectives.executor import Run
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import OperationCode
from nexar.collectives.work import Work

_CODE = OperationCode.BARRIER


def barrier(assembly: Assembly, manner: Manner = PLAIN) -> Work:
    """Without a result."""
    name = assembly.choose(_CODE, 0, None, manner)
    call = assembly.begin(Fingerprint(_CODE, way=manner.way(name)), assembly.in_memory(name, Arena.barrier))
    return assembly.work(call, _run(assembly, call, name))


def _run(assembly: Assembly, call: Call, name: str) -> Run:
    if name == SHARED_MEMORY:
        yield (call.take_turn(),)
    else:
        yield from assembly.execute(call, name, _CODE, np.empty(1, np.uint8))
