"""Shapes nobody thought of: any world, count, root, segment, and blocks of any length."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nexar.collectives.operations import OperationCode as Op
from tests.conformance.schedules.arithmetics import Neighbours, Sums
from tests.conformance.schedules.cases import ALL, ORDERED, REDUCING, Case, compare, tiled

BLOCKWISE = [pair for pair in ALL if pair[0] in {Op.ALL_GATHER, Op.GATHER, Op.SCATTER, Op.REDUCE_SCATTER}]
EXCHANGES = [name for operation, name in ALL if operation is Op.ALL_TO_ALL]
SIZES = st.integers(1, 20)
COUNTS = st.integers(0, 60)


@pytest.mark.parametrize(("operation", "name"), ALL)
@settings(max_examples=20, deadline=None)
@given(size=SIZES, count=COUNTS, root=st.integers(0, 100), segment=st.integers(0, 9))
def test_any_shape_is_right(operation, name, *, size, count, root, segment):
    case = Case(operation, name, size, count, root % size, segment)
    compare(case, Neighbours() if (operation, name) in ORDERED else Sums())


@pytest.mark.parametrize(("operation", "name"), BLOCKWISE)
@settings(max_examples=20, deadline=None)
@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=12), root=st.integers(0, 100), segment=st.integers(0, 4))
def test_blocks_of_any_length_are_right(operation, name, counts, root, segment):
    spans = tiled(counts)
    size = len(counts)
    compare(
        Case(operation, name, size, sum(counts) if operation in REDUCING else 0, root % size, segment, spans), Sums()
    )


@pytest.mark.parametrize("name", EXCHANGES)
@settings(max_examples=30, deadline=None)
@given(data=st.data(), size=st.integers(1, 7))
def test_every_pair_may_exchange_another_count(name, data, size):
    rows = st.lists(st.integers(0, 5), min_size=size, max_size=size)
    spans = tuple(span for _ in range(size) for span in tiled(data.draw(rows)))
    compare(Case(Op.ALL_TO_ALL, name, size, 0, spans=spans), Sums())
