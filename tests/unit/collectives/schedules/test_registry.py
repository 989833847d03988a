"""The catalog of algorithms, and that the documents say of each what it really costs."""

import re
from math import ceil, log2
from pathlib import Path

import numpy as np
import pytest

from nexar.arrays.operators import reduction_of
from nexar.arrays.views import Span
from nexar.collectives.fingerprint import OperationCode
from nexar.collectives.reductions import rounding_of
from nexar.collectives.schedule import schedule_cost
from nexar.collectives.schedules.registry import ALGORITHMS, SAME_AS, Shape, algorithms_of, buffers, steps
from tests.conformance.schedules.cases import REDUCING

PAGE = Path(__file__).parents[4] / "docs" / "reference" / "algorithms.md"
ROW = re.compile(r"\| (\w+) \| (\w+) \| `(.+?)` \| `(.+?)`( \*)? \| `(.+?)` \| (yes|no) \| (yes|no) \| (.+?) \|")
ROWS = ROW.findall(PAGE.read_text())
ON_THE_WHOLE_VECTOR = {"broadcast", "scan", "exclusive_scan"}
ROOTED = {"broadcast", "reduce", "gather", "scatter"}
SEGMENT = 20


def test_every_algorithm_is_documented_once():
    there = [(operation.name.lower(), name) for operation, names in ALGORITHMS.items() for name in names]
    assert [row[:2] for row in ROWS] == there


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}")
@pytest.mark.parametrize("n", [*range(2, 10), 16, 17, 19])
def test_a_schedule_costs_what_the_documents_say(row, n):
    operation, name, steps_said, sent_said, roughly, memory_said, *_ = row
    c = n * 60
    block = c if operation in ON_THE_WHOLE_VECTOR or (operation, name) == ("all_gather", "pipelined_ring") else c // n
    known = {
        "n": n,
        "c": c,
        "s": block // SEGMENT,
        "p": 1 << (n.bit_length() - 1),
        "rounds": ceil(log2(n)),
        "log2": log2,
    }
    worst_steps, worst_sent, memory = _cost(OperationCode[operation.upper()], name, n, c)
    assert worst_steps == _worth(steps_said, known)
    assert memory == _worth(memory_said, known)
    said = _worth(sent_said, known)
    assert said <= worst_sent <= said * 1.67 if roughly and n & (n - 1) else worst_sent == said


def _worth(formula, known):
    return eval(formula, known)  # noqa: S307  # our own page


def _cost(operation, name, n, c):
    """The most of any rank, for any root."""
    roots = range(n) if operation.name.lower() in ROOTED else [0]
    shapes = [Shape(rank, n, c, root, SEGMENT) for rank in range(n) for root in roots]
    costs = [schedule_cost(steps(name, operation, shape)) for shape in shapes]
    memory = max(sum(buffers(name, operation, shape)) for shape in shapes)
    return max(each.steps for each in costs), max(each.sent_bytes for each in costs), memory


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}")
def test_the_documents_say_which_algorithms_keep_order(row):
    found = ALGORITHMS[OperationCode[row[0].upper()]][row[1]]
    assert (found.ordered, found.folds) == (row[6] == "yes", row[7] == "yes")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}")
def test_the_documents_say_how_often_narrow_floats_are_rounded(row):
    operation, name, said = OperationCode[row[0].upper()], row[1], row[8]
    if operation not in REDUCING:
        assert said == "never"
        return
    few, many = (
        rounding_of(name, operation, reduction_of("avg"), np.dtype(np.float16), size=5, large=large)
        for large in (False, True)
    )
    assert said == (few.value if few is many else f"{few.value}, or {many.value} time")


def test_every_operation_has_algorithms():
    for operation in OperationCode:
        assert algorithms_of(operation) is ALGORITHMS[SAME_AS.get(operation, operation)]


def test_what_folds_keeps_order():
    assert all(each.ordered or not each.folds for names in ALGORITHMS.values() for each in names.values())


def test_a_shape_without_spans_has_equal_blocks_and_nearly_equal_shares():
    shape = Shape(rank=0, size=3, count=4)
    assert shape.blocks == shape.inputs == shape.outputs == ((0, 4), (4, 8), (8, 12))
    assert shape.shares == ((0, 2), (2, 3), (3, 4))


def test_a_world_of_one_has_nothing_to_send():
    for operation in OperationCode:
        for name in algorithms_of(operation):
            made = steps(name, operation, Shape(rank=0, size=1, count=5))
            assert not any(step.sends or step.receives for step in made)


def test_a_barrier_keeps_its_empty_messages():
    assert len(steps("dissemination", OperationCode.BARRIER, Shape(rank=0, size=8, count=0))) == 3


def test_buffers_follow_the_spans():
    unequal = Shape(1, 2, 7, spans=(Span(0, 5), Span(5, 7)))
    assert buffers("direct", OperationCode.REDUCE_SCATTER_V, unequal) == (4,)
    both = Shape(0, 2, 0, spans=(Span(0, 1), Span(1, 2), Span(0, 1), Span(1, 4)))
    assert buffers("pairwise", OperationCode.ALL_TO_ALL_V, both) == (4,)
