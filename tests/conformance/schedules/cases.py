"""One call of one collective: what each rank brings, what the schedule makes of it, what it should have made."""

from typing import NamedTuple

import numpy as np

from nexar.arrays.views import Span, split
from nexar.collectives.operations import COLLECTIVES, Layout, RootRole, buffers, steps
from nexar.collectives.operations import OperationCode as Op
from nexar.collectives.schedule import check_schedules
from nexar.collectives.schedules.algorithm import Shape
from nexar.collectives.schedules.blocks import equal
from tests.conformance.schedules.interpreter import Arithmetic, Interpreter

SMALL_WORLDS = range(1, 10)
LARGE_WORLDS = (16, 17, 33)
WORLDS = (*SMALL_WORLDS, *LARGE_WORLDS)
ALGORITHMS = {row.code: row.algorithms for row in COLLECTIVES.values() if row.same_as is None}
REDUCING = {operation for operation in ALGORITHMS if COLLECTIVES[operation].operands is not None}
ROOTED = {operation for operation in ALGORITHMS if COLLECTIVES[operation].root is not RootRole.NONE}
PIPELINED = {"pipelined_ring", "chain", "direct"}
ALL = [(operation, name) for operation, names in ALGORITHMS.items() for name in names]
ORDERED = [
    (operation, name) for operation, name in ALL if operation in REDUCING and ALGORITHMS[operation][name].ordered
]


class Case(NamedTuple):
    """One schedule to test: operation, algorithm, world size, element count and root."""

    operation: Op
    name: str
    size: int
    count: int
    root: int = 0
    segment: int = 0
    spans: tuple[Span, ...] | None = None
    """Unequal shares."""

    @property
    def layout(self):
        return COLLECTIVES[self.operation].layout

    @property
    def blocks(self):
        if self.spans is not None:
            return self.spans
        return split(self.count, self.size) if self.layout is Layout.SHARE else equal(self.count, self.size)

    def input_count(self, rank):
        """How many elements a rank has to bring."""
        match self.layout:
            case Layout.GATHERED:
                return self.blocks[rank].count
            case Layout.EXCHANGED | Layout.SCATTERED | Layout.SHARE:
                return end(self.blocks)
            case Layout.NONE:
                return 0
        return self.count


def tiled(counts):
    """Spans of these lengths, one after the other."""
    stops = np.cumsum(counts, dtype=int).tolist()
    return tuple(Span(stop - count, stop) for stop, count in zip(stops, counts, strict=True))


def end(spans):
    return max(span.stop for span in spans)


def run_case(case: Case, brought, arithmetic: Arithmetic):
    """Run it on all ranks, from `brought[rank]`. What each has got: an array, or None where nothing is promised."""
    ranks = range(case.size)
    schedules = [steps(case.name, case.operation, _shape(case, rank)) for rank in ranks]
    memories = [_memory(case, rank, brought[rank]) for rank in ranks]
    check_schedules(schedules, [list(map(len, memory)) for memory in memories])
    Interpreter(schedules, memories, arithmetic).run()
    return [_got(case, rank, memories[rank]) for rank in ranks]


def _shape(case: Case, rank):
    return Shape(rank, case.size, case.count, case.root, case.segment, case.spans)


def _memory(case: Case, rank, brought):
    """Whatever a rank does not bring is filled with what would be noticed."""
    extra = buffers(case.name, case.operation, _shape(case, rank))
    return [_work(case, rank, brought), *(_filler(length, brought.dtype) for length in extra)]


def _work(case: Case, rank, brought):
    if case.layout is Layout.GATHERED:
        work = _filler(end(case.blocks), brought.dtype)
        block = case.blocks[rank]
        work[block.start : block.stop] = brought
        return work
    if COLLECTIVES[case.operation].root is RootRole.SOURCE and rank != case.root:
        return _filler(len(brought), brought.dtype)
    return brought.copy()


def _filler(count, dtype):
    return np.full(count, 77).astype(dtype)


def _got(case: Case, rank, memory):
    row = COLLECTIVES[case.operation]
    block = case.blocks[rank] if case.layout in {Layout.SHARE, Layout.SCATTERED} else Span(0, len(memory[0]))
    nothing = (
        row.root is RootRole.TARGET and rank != case.root,
        row.operands is not None and not row.operands(rank, case.size),
        case.layout is Layout.NONE,
    )
    if any(nothing):
        return None
    return memory[1] if case.layout is Layout.EXCHANGED else memory[0][block.start : block.stop]


def wanted(case: Case, brought, total):
    """What each rank should have got. `total(arrays)` reduces them."""
    ranks = range(case.size)
    if COLLECTIVES[case.operation].is_scan:
        sums = [total(brought[: rank + 1]) for rank in ranks]
        return sums if case.operation is Op.SCAN else [None, *sums[:-1]]
    if case.operation is Op.ALL_TO_ALL:
        return [np.concatenate([_block(case, brought, peer, rank) for peer in ranks]) for rank in ranks]
    if case.operation in REDUCING:
        everything = total(brought)
    elif case.operation in {Op.BROADCAST, Op.SCATTER}:
        everything = brought[case.root]
    else:
        everything = np.concatenate(brought)
    if case.operation in {Op.REDUCE_SCATTER, Op.SCATTER}:
        return [everything[block.start : block.stop] for block in case.blocks]
    return [everything for _ in ranks]


def _block(case: Case, brought, source, dest):
    span = case.blocks[dest]
    return brought[source][span.start : span.stop]


def compare(case: Case, arithmetic):
    """Every rank has got what it should have."""
    brought = [arithmetic.contribution(rank, case.input_count(rank)) for rank in range(case.size)]
    expected = wanted(case, brought, arithmetic.total)
    for rank, got in enumerate(run_case(case, brought, arithmetic)):
        assert got is None or np.array_equal(got, expected[rank]), f"{case} is wrong on rank {rank}"
