"""The shortest way of an all_reduce: one host, in place, and nothing special asked for.

The same law as on the usual way, but what a call needs is made once for each dtype and count, and what only a call
that lasts needs (its entry in the journal, its announcement to those on other ways) is made when it turns out to last.
"""

from __future__ import annotations

from time import monotonic
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.dtypes import code_of
from nexar.arrays.operations import Reduction, check, reduction_of
from nexar.collectives.arena import Arena
from nexar.collectives.assembly import Assembly
from nexar.collectives.call import Call
from nexar.collectives.executor import Run
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import OperationCode
from nexar.links.operation import Operation

_KEPT: Final = 256


class _Plan(NamedTuple):
    reduction: Reduction
    fingerprint: Fingerprint
    size_bytes: int


class Quick:
    """Of one communicator whose ranks all share memory."""

    def __init__(self, assembly: Assembly, arena: Arena) -> None:
        self._assembly = assembly
        self._arena = arena
        self._plans: dict[tuple[str, np.dtype[Any], int], _Plan] = {}  # dict methods are atomic

    def all_reduce(self, array: NDArray[Any], op: str) -> bool:
        """False: this is no case for it, and nothing was done. Raises what the usual way raises."""
        plan = self._plans.get((op, array.dtype, array.size)) or self._plan(array, op)
        if not array.flags.carray:
            return False
        taken = self._assembly.take_ticket()
        if taken is None:
            return False
        sequence, ticket = taken
        began = monotonic()
        reduction, fingerprint, size_bytes = plan
        row = array if array.ndim == 1 else array.reshape(-1)
        about = sequence, fingerprint
        operation = self._arena.all_reduce(ticket, row, reduction, announcement=about, spin=True)
        if operation.done and operation.error is None:
            self._assembly.journal.note(sequence, fingerprint, size_bytes, began)
        else:
            self._wait(sequence, fingerprint, began, operation)
        return True

    def _plan(self, array: NDArray[Any], op: str) -> _Plan:
        reduction = reduction_of(op)
        check(reduction, array.dtype)
        fingerprint = Fingerprint(OperationCode.ALL_REDUCE, code_of(array.dtype), array.size, 0, reduction.code)
        if len(self._plans) >= _KEPT:
            self._plans.clear()
        plan = self._plans[op, array.dtype, array.size] = _Plan(reduction, fingerprint, array.nbytes)
        return plan

    def _wait(self, sequence: int, fingerprint: Fingerprint, began: float, operation: Operation) -> None:
        assembly = self._assembly
        self._arena.announce(sequence, fingerprint)
        call = Call(assembly.journal.adopt(sequence, fingerprint, began), fingerprint)
        work = assembly.work(call, _rest(operation))
        work.writes = True
        assembly.conductor.perform(work, assembly.config.collective_timeout)


def quick_way(assembly: Assembly) -> Quick | None:
    """Where there is one: all ranks share the memory of one host."""
    arena = assembly.arena
    return None if arena is None or len(assembly.hosts) > 1 else Quick(assembly, arena)


def _rest(operation: Operation) -> Run:
    try:
        yield (operation,)
    except BaseException:
        operation.cancel()
        raise
