"""The table of operations, and that it states of each algorithm what it really costs."""

from math import ceil, log2

import pytest

from nexar.arrays.views import Span
from nexar.collectives.fingerprint import ROOTS_CHOICE
from nexar.collectives.operations import (
    COLLECTIVES,
    AlgorithmCode,
    Layout,
    OperationCode,
    algorithms_of,
    buffers,
    steps,
)
from nexar.collectives.schedule import schedule_cost
from nexar.collectives.schedules.algorithm import Shape
from tests.conformance.schedules.cases import ALGORITHMS, ALL, ROOTED

ON_THE_WHOLE_VECTOR = {  # of which no rank has a share
    code for code, row in COLLECTIVES.items() if row.is_scan or (row.layout is Layout.IN_PLACE and not row.operands)
}
SEGMENT = 20


def test_every_algorithm_states_its_cost():
    assert all(each.cost is not None for names in ALGORITHMS.values() for each in names.values())


@pytest.mark.parametrize(
    ("operation", "name"), ALL, ids=lambda each: each if isinstance(each, str) else each.name.lower()
)
def test_a_schedule_costs_what_its_formulas_say(operation, name):
    for n in (*range(2, 10), 16, 17, 19):
        _compare_costs(operation, name, n)


def _compare_costs(operation, name, n):
    said = ALGORITHMS[operation][name].cost
    c = n * 60
    whole = operation in ON_THE_WHOLE_VECTOR or (operation, name) == (OperationCode.ALL_GATHER, "pipelined_ring")
    block = c if whole else c // n
    known = {
        "n": n,
        "c": c,
        "s": block // SEGMENT,
        "p": 1 << (n.bit_length() - 1),
        "rounds": ceil(log2(n)),
        "log2": log2,
    }
    worst_steps, worst_sent, memory = _cost(operation, name, n, c)
    assert worst_steps == _worth(said.steps, known), n
    assert memory == _worth(said.memory, known), n
    sent = _worth(said.sent, known)
    assert sent <= worst_sent <= sent * 1.67 if said.powers_of_two and n & (n - 1) else worst_sent == sent, n


def _worth(formula, known):
    return eval(formula, known)  # noqa: S307  # our own formulas


def _cost(operation, name, n, c):
    """The most of any rank, for any root."""
    roots = range(n) if operation in ROOTED else [0]
    shapes = [Shape(rank, n, c, root, SEGMENT) for rank in range(n) for root in roots]
    costs = [schedule_cost(steps(name, operation, shape)) for shape in shapes]
    memory = max(sum(buffers(name, operation, shape)) for shape in shapes)
    return max(each.steps for each in costs), max(each.sent_bytes for each in costs), memory


def test_every_operation_has_a_row_with_algorithms():
    assert {row.code: code for code, row in COLLECTIVES.items()} == {code: code for code in OperationCode}
    for operation, row in COLLECTIVES.items():
        assert algorithms_of(operation) is ALGORITHMS[row.base_operation]


def test_operations_in_which_the_order_of_operands_matters_can_keep_it():
    for row in COLLECTIVES.values():
        assert (row.choose_ordered is not None) == (row.operands is not None), row.name


def test_scans_are_the_operations_whose_result_depends_on_the_rank():
    assert {code for code, row in COLLECTIVES.items() if row.is_scan} == {
        OperationCode.SCAN,
        OperationCode.EXCLUSIVE_SCAN,
    }


def test_numbers_of_algorithms_leave_room_for_the_flags_of_a_fingerprint():
    assert all(0 < code < ROOTS_CHOICE for code in AlgorithmCode)


def test_what_folds_keeps_order():
    assert all(each.ordered or not each.left_fold for names in ALGORITHMS.values() for each in names.values())


def test_a_shape_without_spans_has_equal_blocks_and_nearly_equal_shares():
    shape = Shape(rank=0, size=3, count=4)
    assert shape.blocks == ((0, 4), (4, 8), (8, 12))
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
