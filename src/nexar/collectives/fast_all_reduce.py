"""The fast path of all_reduce: in place, with default options.

A call is prepared once per operation, dtype and count. In shared memory, a call that ends at once is neither logged nor
announced.
"""

from __future__ import annotations

from time import monotonic
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.dtypes import code_of
from nexar.arrays.operators import Reduction, check, reduction_of
from nexar.collectives.call import RegionCall
from nexar.collectives.context import CollectiveContext
from nexar.collectives.executor import Run, execute
from nexar.collectives.fingerprint import Fingerprint, code_of_algorithm
from nexar.collectives.operations import OperationCode
from nexar.collectives.reductions import ReducePlan, Rounding, rounding_of
from nexar.collectives.schedule import Program
from nexar.collectives.selection import SHARED_MEMORY, TWO_LEVEL
from nexar.collectives.shared_region import SharedRegion
from nexar.links.operation import Operation

_CODE: Final = OperationCode.ALL_REDUCE
_KEPT: Final = 256


class _FastPlan(NamedTuple):
    reduction: Reduction
    fingerprint: Fingerprint
    size_bytes: int
    region: SharedRegion | None
    program: Program | None
    reducing: ReducePlan


class FastAllReduce:
    """Fast path of one communicator. Thread-safe."""

    def __init__(self, context: CollectiveContext) -> None:
        self._context = context
        self._plans: dict[tuple[str, np.dtype[Any], int], _FastPlan] = {}  # dict methods are atomic

    def all_reduce(self, array: NDArray[Any], op: str) -> bool:
        """False: the fast path does not apply, and nothing was done."""
        if not array.flags.carray:
            return False
        plan = self._plans.get((op, array.dtype, array.size)) or self._plan(array, op)
        row = array if array.ndim == 1 else array.reshape(-1)
        if plan.region is not None:
            return self._in_memory(plan, plan.region, row)
        if plan.program is None:
            return False
        self._by_links(plan, plan.program, row)
        return True

    def _plan(self, array: NDArray[Any], op: str) -> _FastPlan:
        context, reduction = self._context, reduction_of(op)
        check(reduction, array.dtype)
        name = context.choose(_CODE, array.size, array.dtype, reduction=reduction)
        program, reducing = self._program(name, array, reduction)
        if len(self._plans) >= _KEPT:
            self._plans.clear()
        plan = self._plans[op, array.dtype, array.size] = _FastPlan(
            reduction,
            Fingerprint(_CODE, code_of(array.dtype), array.size, 0, reduction.code, code_of_algorithm(name)),
            array.nbytes,
            context.region if name == SHARED_MEMORY else None,
            program,
            reducing,
        )
        return plan

    def _program(self, name: str, array: NDArray[Any], reduction: Reduction) -> tuple[Program | None, ReducePlan]:
        """Without a program if that needs extra memory."""
        context, dtype, size = self._context, array.dtype, self._context.group.size
        if name in (SHARED_MEMORY, TWO_LEVEL):
            return None, ReducePlan.of(Rounding.NATURAL, reduction, dtype, size)
        large = array.nbytes >= context.config.large_msg_bytes
        rounding = rounding_of(name, _CODE, reduction, dtype, size=size, large=large)
        reducing = ReducePlan.of(rounding, reduction, dtype, size)
        if rounding is Rounding.EACH:
            return None, reducing  # a large array does not profit from the fast path
        return context.program(name, _CODE, array.size, reducing.dtype), reducing

    # -- through links -----------------------------------------------------------------------------------

    def _by_links(self, plan: _FastPlan, program: Program, row: NDArray[Any]) -> None:
        context, reducing = self._context, plan.reducing
        call = context.begin(plan.fingerprint)
        work = row
        if reducing.widens:
            work = np.empty(len(row), reducing.dtype)
            reducing.load(work, row)
        self._run_blocking(call, execute(context.run_context(call), program, (work,), reducing.arithmetic))
        reducing.deliver(row, work)

    # -- through memory ----------------------------------------------------------------------------------

    def _in_memory(self, plan: _FastPlan, region: SharedRegion, row: NDArray[Any]) -> bool:
        taken = self._context.take_order_number()
        if taken is None:
            return False
        sequence, order_number = taken
        began = monotonic()
        about = sequence, plan.fingerprint
        operation = region.all_reduce(order_number, row, plan.reduction, announcement=about, spin=True)
        if operation.done and operation.error is None:
            self._context.call_log.note(sequence, plan.fingerprint, plan.size_bytes, began)
        else:
            region.announce(sequence, plan.fingerprint)
            call = RegionCall(self._context.call_log.adopt(sequence, plan.fingerprint, began), plan.fingerprint)
            self._run_blocking(call, _rest(operation))
        return True

    def _run_blocking(self, call: RegionCall, run: Run) -> None:
        work = self._context.work(call, run)
        work.writes = True
        self._context.runner.run_blocking(work, self._context.config.collective_timeout)


def _rest(operation: Operation) -> Run:
    try:
        yield (operation,)
    except BaseException:
        operation.cancel()
        raise
