"""The shortest way of an all_reduce: in place, and nothing special asked for.

The same law as on the usual way, but what a call needs is made once for each operation, dtype and count. Through the
memory of one host, what only a call that lasts needs (its entry in the journal, its announcement to those on other
ways) is made when it turns out to last.
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
from nexar.collectives.choose import SHARED_MEMORY, TWO_LEVEL
from nexar.collectives.executor import Run, execute
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import OperationCode
from nexar.collectives.program import Program
from nexar.collectives.reducing import Reducing, Rounding, rounding_of
from nexar.collectives.ways import way_of
from nexar.links.operation import Operation

_CODE: Final = OperationCode.ALL_REDUCE
_KEPT: Final = 256


class _Plan(NamedTuple):
    reduction: Reduction
    fingerprint: Fingerprint
    size_bytes: int
    arena: Arena | None
    program: Program | None
    reducing: Reducing


class Quick:
    """Of one communicator. Any thread."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._plans: dict[tuple[str, np.dtype[Any], int], _Plan] = {}  # dict methods are atomic

    def all_reduce(self, array: NDArray[Any], op: str) -> bool:
        """False: this is no case for it, and nothing was done. Raises what the usual way raises."""
        if not array.flags.carray:
            return False
        plan = self._plans.get((op, array.dtype, array.size)) or self._plan(array, op)
        row = array if array.ndim == 1 else array.reshape(-1)
        if plan.arena is not None:
            return self._in_memory(plan, plan.arena, row)
        if plan.program is None:
            return False
        self._by_links(plan, plan.program, row)
        return True

    def _plan(self, array: NDArray[Any], op: str) -> _Plan:
        assembly, reduction = self._assembly, reduction_of(op)
        check(reduction, array.dtype)
        name = assembly.choose(_CODE, array.size, array.dtype, reduction=reduction)
        program, reducing = self._program(name, array, reduction)
        if len(self._plans) >= _KEPT:
            self._plans.clear()
        plan = self._plans[op, array.dtype, array.size] = _Plan(
            reduction,
            Fingerprint(_CODE, code_of(array.dtype), array.size, 0, reduction.code, way_of(name)),
            array.nbytes,
            assembly.arena if name == SHARED_MEMORY else None,
            program,
            reducing,
        )
        return plan

    def _program(self, name: str, array: NDArray[Any], reduction: Reduction) -> tuple[Program | None, Reducing]:
        """A program of None: this way has none, or needs more memory than the array."""
        assembly, dtype, size = self._assembly, array.dtype, self._assembly.group.size
        if name in (SHARED_MEMORY, TWO_LEVEL):
            return None, Reducing.of(Rounding.NATURAL, reduction, dtype, size)
        large = array.nbytes >= assembly.config.large_msg_bytes
        rounding = rounding_of(name, _CODE, reduction, dtype, size=size, large=large)
        reducing = Reducing.of(rounding, reduction, dtype, size)
        if rounding is Rounding.EACH:
            return None, reducing  # a large array has no use for a short way
        return assembly.program(name, _CODE, array.size, reducing.dtype), reducing

    # -- through links -----------------------------------------------------------------------------------

    def _by_links(self, plan: _Plan, program: Program, row: NDArray[Any]) -> None:
        assembly, reducing = self._assembly, plan.reducing
        call = assembly.begin(plan.fingerprint)
        work = row
        if reducing.widens:
            work = np.empty(len(row), reducing.dtype)
            reducing.load(work, row)
        self._perform(call, execute(assembly.ground(call), program, (work,), reducing.arithmetic))
        reducing.deliver(row, work)

    # -- through memory ----------------------------------------------------------------------------------

    def _in_memory(self, plan: _Plan, arena: Arena, row: NDArray[Any]) -> bool:
        taken = self._assembly.take_slip()
        if taken is None:
            return False
        sequence, slip = taken
        began = monotonic()
        about = sequence, plan.fingerprint
        operation = arena.all_reduce(slip, row, plan.reduction, announcement=about, spin=True)
        if operation.done and operation.error is None:
            self._assembly.journal.note(sequence, plan.fingerprint, plan.size_bytes, began)
        else:
            arena.announce(sequence, plan.fingerprint)
            call = Call(self._assembly.journal.adopt(sequence, plan.fingerprint, began), plan.fingerprint)
            self._perform(call, _rest(operation))
        return True

    def _perform(self, call: Call, run: Run) -> None:
        work = self._assembly.work(call, run)
        work.writes = True
        self._assembly.conductor.perform(work, self._assembly.config.collective_timeout)


def _rest(operation: Operation) -> Run:
    try:
        yield (operation,)
    except BaseException:
        operation.cancel()
        raise
