"""Inside hosts through the memory they share, between hosts through the network, each local rank with its share.

Of S envoys per host (as many as the host with the fewest ranks has), envoy i owns share i of the array: the ranks
of a host reduce it for its envoy through memory; the envoys i of all hosts reduce it among themselves; through
memory it goes back to everybody. So each byte crosses the network as often as between single ranks, on S links at a
time, instead of once for each rank. Each share has one way, so the result is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from nexar.arrays.operations import ReduceCode, Reduction, reduction_of
from nexar.arrays.partition import Span, split
from nexar.collectives.arena import Arena
from nexar.collectives.assembly import Assembly
from nexar.collectives.call import Call, Turn
from nexar.collectives.executor import Arithmetic, Run
from nexar.collectives.operations import OperationCode


def shares(assembly: Assembly, count: int) -> tuple[Span, ...]:
    """By the index of a rank on this host; those that are no envoys have an empty one."""
    envoys = min(map(len, assembly.hosts))
    others = len(assembly.group.local_ranks) - envoys
    return (*split(count, envoys), *(Span(count, count),) * others)


def turns(assembly: Assembly, arena: Arena, array: NDArray[Any], reduction: Reduction) -> Sequence[Turn]:
    """In the memory of this host: before and after what crosses the network."""
    spans = shares(assembly, len(array))
    share = array[spans[assembly.index].start : spans[assembly.index].stop]
    summing = reduction_of("sum") if reduction.code is ReduceCode.AVG else reduction  # who calls divides, once
    return (
        lambda slip, about, spin: arena.reduce_scatter(
            slip, array, share, spans, summing, announcement=about, spin=spin
        ),
        lambda slip, about, spin: arena.all_gather(slip, share, array, spans, announcement=about, spin=spin),
    )


def all_reduce(assembly: Assembly, call: Call, array: NDArray[Any], reduction: Reduction) -> Run:
    """In place. The division of an average is the caller's."""
    spans = shares(assembly, len(array))
    share = array[spans[assembly.index].start : spans[assembly.index].stop]
    if call.turns:
        yield (call.take_turn(),)
    if len(share):
        team = [ranks[assembly.index] for ranks in assembly.hosts]
        name = assembly.choose_schedule(OperationCode.ALL_REDUCE, len(share), share.dtype, len(team))
        arithmetic = Arithmetic.of(reduction, array.dtype)
        yield from assembly.execute(call, name, OperationCode.ALL_REDUCE, share, arithmetic=arithmetic, team=team)
    if call.turns:
        yield (call.take_turn(),)
