"""Every rank gets the reduction of what all ranks brought: bit-identical everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from nexar.arrays.dtypes import code_of
from nexar.arrays.operations import Reduction
from nexar.arrays.partition import Span
from nexar.collectives.arena import Arena
from nexar.collectives.assembly import Assembly, Manner
from nexar.collectives.call import Call, Turn
from nexar.collectives.choose import SHARED_MEMORY, TWO_LEVEL
from nexar.collectives.executor import Run
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import OperationCode
from nexar.collectives.reducing import Job, reduce_by
from nexar.collectives.two_level import TwoLevel
from nexar.collectives.work import Work

_CODE = OperationCode.ALL_REDUCE


def all_reduce(assembly: Assembly, array: NDArray[Any], reduction: Reduction, manner: Manner) -> Work:
    """In place, on a flat array."""
    name = assembly.choose(_CODE, len(array), array.dtype, manner, reduction)
    fingerprint = Fingerprint(_CODE, code_of(array.dtype), len(array), 0, reduction.code, manner.way(name))
    prepared = Prepared(assembly, name, array, reduction)
    call = assembly.begin(fingerprint, prepared.turns)
    return assembly.work(call, prepared.run(call))


class Prepared:
    """An all-reduce of a flat array, in place, by the algorithm `name`; it has no number yet."""

    def __init__(self, assembly: Assembly, name: str, array: NDArray[Any], reduction: Reduction) -> None:
        self._assembly = assembly
        self._name = name
        self._array = array
        self._reduction = reduction
        self._levels = TwoLevel(assembly, array, reduction) if name == TWO_LEVEL else None

    @property
    def turns(self) -> Sequence[Turn]:
        """What the call needs of the arena."""
        if self._levels is not None:
            return self._levels.turns
        return self._assembly.in_memory(self._name, Arena.all_reduce, self._array, self._reduction)

    def run(self, call: Call) -> Run:
        """The call that took these turns."""
        if self._name == SHARED_MEMORY:
            return _in_memory(call)
        if self._levels is not None:
            return self._levels.run(call)
        array, size = self._array, self._assembly.group.size
        job = Job(array, array, self._reduction, size, Span(0, len(array)))
        return reduce_by(self._assembly, call, self._name, _CODE, job)


def _in_memory(call: Call) -> Run:
    yield (call.take_turn(),)
