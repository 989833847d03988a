"""Every rank gets the reduction of what all ranks brought: bit-identical everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from nexar.arrays.dtypes import code_of
from nexar.arrays.operations import Reduction
from nexar.arrays.reduce import finish
from nexar.collectives.arena import Arena
from nexar.collectives.assembly import Assembly, Manner
from nexar.collectives.call import Call, Turn
from nexar.collectives.choose import SHARED_MEMORY, TWO_LEVEL
from nexar.collectives.executor import Arithmetic, Run
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import OperationCode
from nexar.collectives.two_level import all_reduce as all_reduce_between_hosts
from nexar.collectives.two_level import turns as turns_between_hosts
from nexar.collectives.ways import way_of
from nexar.collectives.work import Work

_CODE = OperationCode.ALL_REDUCE


def all_reduce(assembly: Assembly, array: NDArray[Any], reduction: Reduction, manner: Manner) -> Work:
    """In place, on a flat array."""
    name = assembly.choose(_CODE, len(array), array.dtype, manner, reduction)
    fingerprint = Fingerprint(_CODE, code_of(array.dtype), len(array), 0, reduction.code, way_of(name))
    call = assembly.begin(fingerprint, turns(assembly, name, array, reduction))
    return assembly.work(call, run(assembly, call, name, array, reduction))


def turns(assembly: Assembly, name: str, array: NDArray[Any], reduction: Reduction) -> Sequence[Turn]:
    """What the call needs of the arena, on this way."""
    if name == TWO_LEVEL and assembly.arena is not None:
        return turns_between_hosts(assembly, assembly.arena, array, reduction)
    return assembly.in_memory(name, Arena.all_reduce, array, reduction)


def run(assembly: Assembly, call: Call, name: str, array: NDArray[Any], reduction: Reduction) -> Run:
    """A call that has its number and its turns."""
    if name == SHARED_MEMORY:
        yield (call.take_turn(),)
        return
    if name == TWO_LEVEL:
        yield from all_reduce_between_hosts(assembly, call, array, reduction)
    else:
        arithmetic = Arithmetic.of(reduction, array.dtype)
        yield from assembly.execute(call, name, _CODE, array, arithmetic=arithmetic)
    finish(reduction, array, assembly.group.size)
