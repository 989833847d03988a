"""Shapes nobody thought of: any world, count, root, segment, and shares of any length."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nexar.collectives.operations import COLLECTIVES, Layout
from tests.conformance.schedules.arithmetics import Neighbours, Sums
from tests.conformance.schedules.cases import ALL, ORDERED, Case, compare, tiled

WITH_SHARES = [pair for pair in ALL if COLLECTIVES[pair[0]].layout is Layout.SHARE]
SIZES = st.integers(1, 20)
COUNTS = st.integers(0, 60)


@pytest.mark.parametrize(("operation", "name"), ALL)
@settings(max_examples=20, deadline=None)
@given(size=SIZES, count=COUNTS, root=st.integers(0, 100), segment=st.integers(0, 9))
def test_any_shape_is_right(operation, name, *, size, count, root, segment):
    case = Case(operation, name, size, count, root % size, segment)
    compare(case, Neighbours() if (operation, name) in ORDERED else Sums())


@pytest.mark.parametrize(("operation", "name"), WITH_SHARES)
@settings(max_examples=20, deadline=None)
@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=12), root=st.integers(0, 100), segment=st.integers(0, 4))
def test_shares_of_any_length_are_right(operation, name, counts, root, segment):
    size = len(counts)
    compare(Case(operation, name, size, sum(counts), root % size, segment, tiled(counts)), Sums())
