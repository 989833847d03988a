"""Inside hosts through the memory they share, between hosts through the network, each local rank with its share.

Of S envoys per host (as many as the host with the fewest ranks has), envoy i owns share i of the array: the ranks
of a host reduce it for its envoy through memory; the envoys i of all hosts reduce it among themselves; through
memory it goes back to everybody. So each byte crosses the network as often as between single ranks, on S links at a
time, instead of once for each rank. Each share has one way, so the result is the same everywhere.

Narrow floats: the sum of a host travels as float32 and is rounded at the end. From `large_msg_bytes` on it is rounded
to travel, after an average is divided, and once more at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.operations import ReduceCode, Reduction, reduction_of
from nexar.arrays.partition import Span, split
from nexar.arrays.reduce import finish, folder, round_total, rounds, wide_folder
from nexar.collectives.arena_plans import Fold
from nexar.collectives.assembly import Assembly
from nexar.collectives.call import Call, Turn
from nexar.collectives.executor import Run
from nexar.collectives.operations import OperationCode
from nexar.collectives.reducing import WIDE, Job, Rounding, reduce_by


def shares(assembly: Assembly, count: int) -> tuple[Span, ...]:
    """By the index of a rank on this host; those that are no envoys have an empty one."""
    envoys = min(map(len, assembly.hosts))
    others = len(assembly.group.local_ranks) - envoys
    return (*split(count, envoys), *(Span(count, count),) * others)


class TwoLevel:
    """One all-reduce of a flat array, in place."""

    def __init__(self, assembly: Assembly, array: NDArray[Any], reduction: Reduction) -> None:
        self._assembly = assembly
        self._array = array
        self._reduction = reduction
        self._summing = reduction_of("sum") if reduction.code is ReduceCode.AVG else reduction
        self._spans = shares(assembly, len(array))
        mine = self._spans[assembly.index]
        self._share = array[mine.start : mine.stop]
        self._rounding = self._how_often()
        wide = self._rounding is Rounding.AT_THE_END
        self._partial = np.empty(len(self._share), WIDE) if wide else self._share
        """My share: first of what this host brought, then of all."""

    def _how_often(self) -> Rounding:
        if not rounds(self._reduction, self._array.dtype):
            return Rounding.NATURAL
        large = self._array.nbytes >= self._assembly.config.large_msg_bytes
        return Rounding.EACH if large else Rounding.AT_THE_END

    @cached_property
    def _fold(self) -> Fold | None:
        """What adds up the arrays of one host, for its envoys; None: as the arena does."""
        dtype = self._array.dtype
        if self._rounding is Rounding.AT_THE_END:
            return wide_folder(self._reduction, dtype)
        if self._rounding is Rounding.EACH:
            return folder(self._reduction, dtype, self._assembly.group.size)
        return None

    @property
    def turns(self) -> Sequence[Turn]:
        """In the memory of this host: before and after what crosses the network. None where a rank is alone."""
        arena = self._assembly.arena
        if arena is None:
            return ()
        array, share, spans = self._array, self._share, self._spans
        return (
            lambda slip, about, spin: arena.reduce_scatter(
                slip, array, self._partial, spans, self._summing, fold=self._fold, announcement=about, spin=spin
            ),
            lambda slip, about, spin: arena.all_gather(slip, share, array, spans, announcement=about, spin=spin),
        )

    def run(self, call: Call) -> Run:
        """The call that took these turns."""
        if call.turns:
            yield (call.take_turn(),)
        elif self._fold is not None:
            self._fold(self._partial, [self._share])
        if len(self._share):
            yield from self._between_hosts(call)
            self._finish()
        if call.turns:
            yield (call.take_turn(),)

    def _between_hosts(self, call: Call) -> Run:
        assembly, partial = self._assembly, self._partial
        team = [ranks[assembly.index] for ranks in assembly.hosts]
        code = OperationCode.ALL_REDUCE
        name = assembly.choose_schedule(code, len(partial), partial.dtype, len(team), self._summing)
        job = Job(partial, partial, self._summing, len(team), Span(0, len(partial)))
        yield from reduce_by(assembly, call, name, code, job, team=team)

    def _finish(self) -> None:
        size = self._assembly.group.size
        if self._rounding is Rounding.AT_THE_END:
            round_total(self._reduction, self._share, self._partial, size)
        elif self._rounding is Rounding.NATURAL:
            finish(self._reduction, self._share, size)
