"""Every schedule, every world, every size: it ends, and everything is where it belongs."""

import numpy as np
import pytest

from nexar.collectives.operations import OperationCode as Op
from nexar.collectives.operations import algorithms_of, steps
from nexar.collectives.schedule import Combine, Range, RecvStep, SendStep, Step
from nexar.collectives.schedules.algorithm import Shape
from tests.conformance.schedules.arithmetics import Neighbours, Sums
from tests.conformance.schedules.cases import (
    ALL,
    LARGE_WORLDS,
    ORDERED,
    PIPELINED,
    REDUCING,
    ROOTED,
    SMALL_WORLDS,
    WORLDS,
    Case,
    compare,
)
from tests.conformance.schedules.interpreter import Deadlock, Interpreter

QUADRATIC = {Op.ALL_GATHER, Op.GATHER, Op.SCATTER, Op.ALL_TO_ALL}


def cases(operation, name, size):
    """Sizes 0, 1, world-1, world+1, 1000 and 70,001: of the vector; the largest of all blocks together."""
    for count in sorted({0, 1, size - 1, size + 1, 1000, 70_001}):
        quadratic = operation in QUADRATIC or (name == "gather_fold" and size > 9)
        block = count // size + 1 if quadratic and count > 1000 else count
        roots = sorted({0, size // 2, size - 1}) if size < 10 else [size // 3]
        for root in roots if operation in ROOTED else [0]:
            for segment in (0, 5 if count < 1000 else count // 40) if name in PIPELINED else [0]:
                yield Case(operation, name, size, block, root, segment)


SIZES = pytest.mark.parametrize(
    "sizes", [SMALL_WORLDS, pytest.param(LARGE_WORLDS, marks=pytest.mark.full)], ids=["small", "large"]
)


@SIZES
@pytest.mark.parametrize(("operation", "name"), ALL)
def test_every_element_ends_where_it_belongs(operation, name, sizes):
    for size in sizes:
        for case in cases(operation, name, size):
            compare(case, Sums())


@SIZES
@pytest.mark.parametrize(("operation", "name"), ORDERED)
def test_rank_order_is_kept_where_it_is_promised(operation, name, sizes):
    for size in sizes:
        for case in cases(operation, name, size):
            compare(case, Neighbours())


@pytest.mark.parametrize(("operation", "name"), [pair for pair in ALL if pair[0] in REDUCING and pair not in ORDERED])
def test_what_does_not_promise_rank_order_does_not_keep_it(operation, name):
    """Else the promise could be made, and more could be chosen from."""
    with pytest.raises(AssertionError, match="out of rank order"):
        compare(Case(operation, name, 5, 10), Neighbours())


def test_nobody_leaves_a_barrier_before_everybody_has_come():
    for name in algorithms_of(Op.BARRIER):
        for size in WORLDS:
            _watch_a_barrier(name, size)


def _watch_a_barrier(name, size):
    """`known`: the ranks that a rank knows to have come; each message carries those of its sender."""
    schedules = [steps(name, Op.BARRIER, Shape(rank, size, 0)) for rank in range(size)]
    known = [{rank} for rank in range(size)]
    reported = {}
    at = [0] * size
    while any(at[rank] < len(schedules[rank]) for rank in range(size)):
        before = list(at)
        for rank in [rank for rank in range(size) if at[rank] < len(schedules[rank])]:
            step = schedules[rank][at[rank]]
            reported.update({(rank, send.peer, send.tag): set(known[rank]) for send in step.sends})
            received = [(receive.peer, rank, receive.tag) for receive in step.receives]
            if all(way in reported for way in received):
                known[rank].update(*(reported[way] for way in received))
                at[rank] += 1
        assert at != before, "deadlock"
    assert all(each == set(range(size)) for each in known)


def test_a_deadlock_is_seen():
    here = Range(0, 0, 1)
    late = [Step(receives=(RecvStep(1, here, 0, Combine.COPY),)), Step(sends=(SendStep(1, here, 0),))]
    other = [Step(receives=(RecvStep(0, here, 0, Combine.COPY),)), Step(sends=(SendStep(0, here, 0),))]
    with pytest.raises(Deadlock, match=r"ranks \[0, 1\] at steps \[0, 0\]"):
        Interpreter([late, other], [[np.zeros(1)], [np.zeros(1)]], Sums()).run()
